"""What `--plan` reckons with; it shapes no output and is in no hash."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.section import Section


class PlanSection(Section):
    """The machines that a plan is for, and what it cannot know."""

    device: str = "auto"
    """cpu, or a GPU by its data sheet: a100, h100, h200, b200, l40s, l4, … (docs/planning.md).
    auto: this machine's (`--device`)."""
    workers: int = Field(1, gt=0)
    """GPUs, or CPU processes with run.threads each, that share a stage (`--workers`)."""
    tensor_parallel: int | None = Field(None, gt=0)
    """GPUs that hold one copy of the target together. None: the fewest of 1, 2, 4, 8 that fit."""
    target_config: str | None = None
    """config.json, or its directory, of a target that is not on this disk."""
    prompts: int | None = Field(None, gt=0)
    """Prompts assumed where sources cannot be counted here; synth.max_prompts still limits them."""
    prompt_tokens: int = Field(200, gt=0)
    """Length assumed of a prompt that cannot be read here; one turn."""
    server_tokens_per_second: float | None = Field(None, gt=0)
    """Tokens that one endpoint of synth.generator generates a second, measured. None: the device's
    data sheet; without one, 30 for each request under way."""
    store_bytes_per_second: float = Field(500e6, gt=0)
    """What one worker reads from or writes to the store."""

"""What `--plan` assumes; it shapes no output and is in no hash."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.section import Section


class PlanSection(Section):
    """What a plan cannot read."""

    workers: int = Field(1, gt=0)
    """Training processes, over which ZeRO splits the optimiser's state (`--workers`)."""
    target_config: str | None = None
    """config.json, or its directory, of a target that is not on this disk."""
    prompts: int | None = Field(None, gt=0)
    """Prompts assumed where sources cannot be counted here; synth.max_prompts still limits them."""
    prompt_tokens: int = Field(200, gt=0)
    """Length assumed of a prompt that cannot be read here; one turn."""

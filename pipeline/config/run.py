"""The whole configuration: one section a stage, and what all stages share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipeline.config.section import Section
from pipeline.config.synth import HOW_REQUESTS_TRAVEL, SourceSpec, SynthSection
from pipeline.config.train import TrainSection
from pipeline.config.tree import TreeSection
from pipeline.records import Stage, digest

#: What may change between two attempts at a stage: it does not decide what comes out.
_NOT_IN_THE_OUTPUT: dict[str, Any] = {
    "synth": {"generator": HOW_REQUESTS_TRAVEL},
    "features": {"self_check_tolerance", "device_map"},
}


class RunSection(Section):
    """Where the run lives and what all its stages share."""

    uri: str = Field(
        "runs/run",
        description="Directory or fsspec URI (file://, gs://, …) that holds one folder a stage.",
    )
    seed: int = Field(0, ge=0, description="Seed of every random choice in the run.")
    threads: int = Field(
        0, ge=0, description="CPU threads of torch; 0 takes the cores this process may use."
    )
    cache_dir: str | None = Field(
        None, description="Where copies of remote shards are kept; default $XDG_CACHE_HOME/eagle3."
    )
    cache_bytes: int = Field(
        20_000_000_000,
        ge=0,
        description="Limit of those copies. Where it cannot hold 64 shards, samples are read by byte range.",
    )
    force: bool = Field(
        False,
        description="Discard a stage's earlier output when it belongs to another config (`--force`).",
    )


class TargetSection(Section):
    """The model to accelerate."""

    source: str = Field(
        description="Hub id, local directory, GGUF file, or package:NAME for a pip package that carries a GGUF file."
    )
    revision: str | None = Field(None, description="Hub revision; ignored for local sources.")
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        "bfloat16", description="Compute type of the target in every stage."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the target and the head run; auto takes CUDA when present."
    )
    capture_layers: Literal["auto"] | tuple[int, int, int] = Field(
        "auto", description="Output indices of the three aux layers; auto is [1, L//2-1, L-4]."
    )
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(
        {},
        description="Variables of the chat template that choose a mode, such as enable_thinking; part of the contract of data and head.",
    )
    cache_dir: str | None = Field(
        None, description="Where dequantised GGUF targets are kept; default $XDG_CACHE_HOME/eagle3."
    )


class FeaturesSection(Section):
    """Target states, computed once and stored."""

    batch_tokens: int = Field(
        2048, gt=0, description="Tokens of one packed forward; longer samples go alone."
    )
    shard_tokens: int = Field(
        16384,
        gt=0,
        description="A shard is closed once it holds this many tokens: the unit of commit and resume.",
    )
    encoding: Literal["bf16", "fp8", "int8"] = Field(
        "int8",
        description="Storage type of aux and final states; docs/states-format.md has the size, the error and the cost in τ of each.",
    )
    format: Literal[2] = Field(
        2,
        description="Version of the states format; part of the configuration, so that older states are not taken for these.",
    )
    self_check_tolerance: float = Field(
        64,
        ge=0,
        description="A sample of each shard is computed again alone; its states may differ by this many steps (eps) of target.dtype. 0: no check.",
    )
    device_map: Literal["auto", "balanced"] | dict[str, int | str] | None = Field(
        None,
        description="Spread the target's layers over devices, as transformers' device_map; needs accelerate. None: all on target.device.",
    )


class EvalSection(Section):
    """Acceptance and speed of a head."""

    head: str | None = Field(None, description="Head directory; None takes the run's own.")
    prompts: str | None = Field(
        None, description="JSONL file with `turns`; replaces `sources` when set."
    )
    sources: tuple[SourceSpec, ...] = Field((), description="Evaluation prompts.")
    max_prompts: int | None = Field(
        None, gt=0, description="At most this many prompts, drawn evenly over categories."
    )
    max_turns: int = Field(
        1,
        gt=0,
        description="Turns decoded per prompt, each in the context of the target's own earlier replies.",
    )
    max_new_tokens: int = Field(64, gt=0, description="Length limit of one response.")
    tree: TreeSection = Field(TreeSection(), description="Draft tree.")
    hf_prompts: int = Field(
        8,
        ge=0,
        description="Prompts also timed with Hugging Face `generate`, spread over categories.",
    )
    system_prompt: str | None = Field(
        None, description="System message; None keeps the template's own default, as in synth."
    )


class RunConfig(Section):
    """All of a run. `eagle3 schema` prints the JSON schema, `eagle3 show` the resolved values."""

    run: RunSection = Field(RunSection(), description="Where the run lives.")
    target: TargetSection = Field(description="The model to accelerate.")
    synth: SynthSection | None = Field(None, description="Prompts to samples.")
    features: FeaturesSection = Field(FeaturesSection(), description="Samples to states.")
    train: TrainSection = Field(TrainSection(), description="States to head.")
    eval: EvalSection = Field(EvalSection(), description="Head to report.")

    def section_hash(self, stage: Stage) -> str:
        """Hash of the sections that decide `stage`'s output: those of the target, the seed and its own."""
        target = self.target.model_dump(mode="json", exclude={"cache_dir"})
        own = getattr(self, stage)
        return digest(
            {
                "seed": self.run.seed,
                "target": target,
                stage: own.model_dump(mode="json", exclude=_NOT_IN_THE_OUTPUT.get(stage))
                if own
                else None,
            }
        )

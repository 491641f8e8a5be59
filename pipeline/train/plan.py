"""What training would do, from the states' manifest alone: no torch, no state is read."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig
from pipeline.records import Manifest, Plan
from pipeline.store.stage_run import find_manifest, stage_location

#: Sustained rate of one CPU thread over a whole training step; measured with SmolLM2-135M on two cores with AVX-512 bf16.
_FLOPS_PER_THREAD = {"bfloat16": 150e9, "float32": 90e9}
#: The interpreter with torch, transformers and deepspeed imported.
_INTERPRETER_BYTES = 900 << 20
_LOADING_SECONDS = 15.0
#: Weights and gradient in compute type, master, and two moments of AdamW.
_BYTES_PER_PARAMETER = {"bfloat16": 2 + 2 + 4 + 4 + 8, "float32": 4 + 4 + 8}
#: A decoded round is short and runs at a smaller share of the rate above; measured likewise, with replies as below.
_DECODING_SHARE = 0.75
#: Kept for the backward pass, in multiples of the hidden size, per token and step of the unroll.
_ACTIVATIONS = 40


def plan(config: RunConfig) -> Plan:
    """Records, tokens, storage, time and peak memory of training for this run."""
    parent = find_manifest(config.run.uri, "features")
    if parent is None:
        nothing = ("the states do not exist yet: run `eagle3 features` first",)
        return Plan(
            stage="train",
            state="waiting for features",
            records=0,
            tokens=0,
            storage_bytes=0,
            seconds=0,
            peak_memory_bytes=0,
            basis=nothing,
        )
    section, hidden = config.train, parent.contract.hidden_size
    width = 4 if section.dtype == "float32" else 2
    parameters = _parameters(config, hidden)
    epochs_tokens = parent.tokens * section.epochs
    tokens = (
        min(epochs_tokens, section.max_steps * section.batch_tokens * section.accumulate)
        if section.max_steps
        else epochs_tokens
    )
    rate = _FLOPS_PER_THREAD[section.dtype] * config.run.threads
    flops = (
        6 * (parameters - 3 * hidden * hidden) * section.ttt_steps
        + 6 * 3 * hidden * hidden
        + 2 * hidden * section.head.draft_vocab_size
    )
    state_bytes = parameters * _BYTES_PER_PARAMETER[section.dtype]
    activations = section.batch_tokens * section.ttt_steps * _ACTIVATIONS * hidden * width
    frozen = (parent.contract.vocab_size + section.head.draft_vocab_size) * hidden * width
    evaluation = _evaluation(config, parent, tokens)
    evaluating = (evaluation.basis,) if evaluation.basis else ()
    return Plan(
        stage="train",
        state=_state(config, parent),
        records=parent.rows * section.epochs,
        tokens=tokens,
        storage_bytes=section.keep_checkpoints * (parameters * 14 + evaluation.storage_bytes)
        + 2 * 2 * parameters,
        seconds=_LOADING_SECONDS
        + flops * tokens / rate
        + evaluation.flops / (rate * _DECODING_SHARE),
        peak_memory_bytes=_INTERPRETER_BYTES
        + state_bytes
        + activations
        + frozen
        + evaluation.memory_bytes,
        basis=(
            f"head: at most {parameters:,} parameters ({parameters / parent.contract.parameters:.1%} of the target), "
            f"with as many key as query heads and MLP width {_width(config, hidden):,}",
            f"storage: {section.keep_checkpoints} checkpoints of 14 bytes a parameter, and the head twice in bfloat16",
            f"time: {flops / 1e6:,.0f} MFLOP a token at {rate / 1e9:,.0f} GFLOP/s ({config.run.threads} CPU threads), as if every token were supervised",
            "memory: the interpreter, optimiser state, the target's embedding and one unroll's activations",
            *evaluating,
        ),
    )


class _Evaluation(NamedTuple):
    """What decoding on the way adds."""

    flops: float = 0.0
    memory_bytes: int = 0
    storage_bytes: int = 0  # of one best head
    basis: str = ""


def _evaluation(config: RunConfig, parent: Manifest, tokens: int) -> _Evaluation:
    """As if a round emitted one token: an untrained head is what the first evaluations see."""
    section, contract = config.train, parent.contract
    if not section.evaluate_every:
        return _Evaluation()
    steps = max(1, tokens // (section.batch_tokens * section.accumulate))
    count = -(-steps // section.evaluate_every)
    prompt = parent.tokens // max(
        1, parent.rows
    )  # a whole sample's length: its prompt is not longer
    read = section.evaluate_prompts * (
        prompt + section.evaluate_tokens * section.evaluate_tree.nodes
    )
    width = 4 if contract.dtype == "float32" else 2
    return _Evaluation(
        flops=2.0 * contract.parameters * read * count,
        memory_bytes=contract.parameters * width,
        storage_bytes=_parameters(config, contract.hidden_size)
        * (4 if section.dtype == "float32" else 2),
        basis=f"evaluation: {count:,} times {section.evaluate_prompts} replies of {section.evaluate_tokens} tokens, as if a round emitted one token; "
        f"the target of {contract.parameters:,} parameters stays in memory beside the head",
    )


def _width(config: RunConfig, hidden: int) -> int:
    """MLP width; a manifest does not hold the target's own, 8/3 of the hidden size is the Llama family's."""
    return config.train.head.intermediate_size or 8 * hidden // 3


def _parameters(config: RunConfig, hidden: int) -> int:
    """fc, attention on 2H with as many key as query heads at most, MLP and lm_head."""
    return (
        3 * hidden * hidden
        + 7 * hidden * hidden
        + 3 * hidden * _width(config, hidden)
        + hidden * config.train.head.draft_vocab_size
    )


def _state(config: RunConfig, parent: Manifest) -> str:
    """What is on storage for this config and parent."""
    manifest = find_manifest(config.run.uri, "train")
    if manifest:
        same = (manifest.config_hash, manifest.parent_hash) == (
            config.section_hash("train"),
            parent.content_hash,
        )
        return "complete" if same else "complete for another config or parent"
    markers = [
        name
        for name in stage_location(config.run.uri, "train").child("checkpoints").names()
        if name.endswith(".json")
    ]
    return f"checkpoint {markers[-1].removesuffix('.json')}" if markers else "not started"

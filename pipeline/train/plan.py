"""What training would do, from the states' manifest alone: no torch, no state is read."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig
from pipeline.records import Manifest, Plan, TargetContract
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.target.arithmetic import decoder_weight_bytes, train_dtype

#: Sustained rate of one CPU thread over a whole training step; measured with SmolLM2-135M on two
#: cores with AVX-512 bf16.
_FLOPS_PER_THREAD = {"bfloat16": 150e9, "float32": 90e9}
#: The interpreter with torch, transformers and deepspeed imported.
_INTERPRETER_BYTES = 900 << 20
_LOADING_SECONDS = 15.0
#: Weights and gradient in compute type, master, and two moments of AdamW.
_BYTES_PER_PARAMETER = {"bfloat16": 2 + 2 + 4 + 4 + 8, "float32": 4 + 4 + 8}
#: A decoded round is short and runs at a smaller share of the rate above; measured likewise, with
#: replies as below.
_DECODING_SHARE = 0.75
#: Kept for the backward pass, in multiples of the hidden size, per token and step of the unroll.
_ACTIVATIONS = 40


def plan(config: RunConfig) -> Plan:
    """Records, tokens, storage, time and peak memory of training for this run."""
    parent = find_manifest(config.run.uri, "features")
    if parent is None:
        return Plan(
            stage="train",
            state="waiting for features",
            records=0,
            tokens=0,
            storage_bytes=0,
            seconds=0,
            peak_memory_bytes=0,
            basis=("the states do not exist yet: run `eagle3 features` first",),
        )
    section, contract = config.train, parent.contract
    parameters = _parameters(config, contract.hidden_size)
    tokens = parent.tokens * section.epochs
    if section.max_steps:
        tokens = min(tokens, section.max_steps * section.batch_tokens * section.accumulate)
    flops, rate = _flops(config, contract.hidden_size), _rate(config)
    evaluation = _evaluation(config, parent, tokens)
    checkpoint = parameters * 14 + evaluation.storage_bytes
    decoding_seconds = evaluation.flops / (rate * _DECODING_SHARE)
    share, width = parameters / contract.parameters, _width(config, contract.hidden_size)
    threads = f"{config.run.threads} CPU threads"
    return Plan(
        stage="train",
        state=_state(config, parent),
        records=parent.rows * section.epochs,
        tokens=tokens,
        storage_bytes=section.keep_checkpoints * checkpoint + 2 * 2 * parameters,
        seconds=_LOADING_SECONDS + flops * tokens / rate + decoding_seconds,
        peak_memory_bytes=_memory_bytes(config, contract) + evaluation.memory_bytes,
        basis=(
            f"head: at most {parameters:,} parameters ({share:.1%} of the target), "
            f"with as many key as query heads and MLP width {width:,}",
            f"storage: {section.keep_checkpoints} checkpoints of 14 bytes a parameter, "
            "and the head twice in bfloat16",
            f"time: {flops / 1e6:,.0f} MFLOP a token at {rate / 1e9:,.0f} GFLOP/s "
            f"in {_dtype(config)} ({threads}), "
            "as if every token were supervised",
            "memory: the interpreter, optimiser state, the target's embedding and "
            "one unroll's activations",
            *evaluation.basis,
        ),
    )


class _Evaluation(NamedTuple):
    """What decoding on the way adds."""

    flops: float = 0.0
    memory_bytes: int = 0
    storage_bytes: int = 0  # of one best head
    basis: tuple[str, ...] = ()


def _evaluation(config: RunConfig, parent: Manifest, tokens: int) -> _Evaluation:
    """As if a round emitted one token: the first evaluations decode with an untrained head."""
    section, contract = config.train, parent.contract
    if not section.evaluate_every:
        return _Evaluation()
    steps = max(1, tokens // (section.batch_tokens * section.accumulate))
    count = -(-steps // section.evaluate_every)
    # A whole sample's length: its prompt is not longer.
    prompt = parent.tokens // max(1, parent.rows)
    verified = section.evaluate_tokens * section.evaluate_tree.nodes
    read = section.evaluate_prompts * (prompt + verified)
    replies = f"{section.evaluate_prompts} replies of {section.evaluate_tokens} tokens"
    return _Evaluation(
        flops=2.0 * contract.parameters * read * count,
        memory_bytes=contract.parameters * decoder_weight_bytes(config.target),
        storage_bytes=_parameters(config, contract.hidden_size) * _bytes_of(_dtype(config)),
        basis=(
            f"evaluation: {count:,} times {replies}, as if a round emitted one token; the target "
            f"of {contract.parameters:,} parameters stays in memory beside the head",
        ),
    )


def _flops(config: RunConfig, hidden: int) -> int:
    """Of a supervised token's training: `fc` and the teacher once, all else in every step."""
    section, fc = config.train, 3 * hidden * hidden
    unrolled = 6 * (_parameters(config, hidden) - fc) * section.ttt_steps
    return unrolled + 6 * fc + 2 * hidden * section.head_config.draft_vocab_size


def _rate(config: RunConfig) -> float:
    return _FLOPS_PER_THREAD[_dtype(config)] * config.run.threads


def _memory_bytes(config: RunConfig, contract: TargetContract) -> int:
    """Of the training process, without evaluation."""
    section, hidden, dtype = config.train, contract.hidden_size, _dtype(config)
    width = _bytes_of(dtype)
    optimiser = _parameters(config, hidden) * _BYTES_PER_PARAMETER[dtype]
    activations = section.batch_tokens * section.ttt_steps * _ACTIVATIONS * hidden * width
    frozen = (contract.vocab_size + section.head_config.draft_vocab_size) * hidden * width
    return _INTERPRETER_BYTES + optimiser + activations + frozen


def _dtype(config: RunConfig) -> str:
    return train_dtype(config.train, config.target)


def _bytes_of(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _width(config: RunConfig, hidden: int) -> int:
    """MLP width.

    A manifest does not hold the target's own, 8/3 of the hidden size is the Llama family's.
    """
    return config.train.head_config.intermediate_size or 8 * hidden // 3


def _parameters(config: RunConfig, hidden: int) -> int:
    """fc, attention on 2H with as many key as query heads at most, MLP and lm_head."""
    return (
        3 * hidden * hidden
        + 7 * hidden * hidden
        + 3 * hidden * _width(config, hidden)
        + hidden * config.train.head_config.draft_vocab_size
    )


def _state(config: RunConfig, parent: Manifest) -> str:
    """What is on storage for this config and parent."""
    manifest = find_manifest(config.run.uri, "train")
    if manifest:
        wanted = config.section_hash("train"), parent.content_hash
        same = (manifest.config_hash, manifest.parent_hash) == wanted
        return "complete" if same else "complete for another config or parent"
    names = stage_location(config.run.uri, "train").child("checkpoints").names()
    markers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return f"checkpoint {markers[-1]}" if markers else "not started"

"""What training would do, from the states' manifest or from the plan of features: no torch, no
state is read.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig, TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.registry import algorithm
from pipeline.planning.devices import (
    LINK_BYTES,
    TRAIN_SHARE,
    Device,
    described,
    device_of,
    dtype_on,
    store_seconds,
)
from pipeline.planning.heads import HeadSize
from pipeline.planning.targets import TargetShape, known_shape, shape_of
from pipeline.planning.training import (
    ZERO_STAGES,
    start_bytes,
    start_flops,
    step_traffic,
    zero_memory,
)
from pipeline.records import Manifest, Plan, ZeroMemory
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.target.arithmetic import decoder_weight_bytes

#: Sustained rate of one CPU thread over a whole training step; measured with SmolLM2-135M on two
#: cores with AVX-512 bf16.
_FLOPS_PER_THREAD = {"bfloat16": 150e9, "float32": 90e9}
#: The interpreter with torch, transformers and deepspeed imported.
_INTERPRETER_BYTES = 900 << 20
_LOADING_SECONDS = 15.0
#: Master and two moments of AdamW; with averages these, too.
_CHECKPOINT_BYTES, _AVERAGE_BYTES = 12, 4
#: A decoded round is short and runs at a smaller share of the rate above; measured likewise, with
#: replies as below.
_DECODING_SHARE = 0.75
#: begin.json, manifest.json, metrics.jsonl; the head's three files, and as shards with entries.
_OBJECTS = 3 + 3 + 3 * 2
_HEAD_FILES = 3
#: Parameters that a target has, over those that its shape tells: at most.
_COUNTED = 1.03
#: Of one checkpoint: weights, moments, the metrics so far, the marker.
_CHECKPOINT_FILES = 4


class _States(NamedTuple):
    """What features has stored, or would store."""

    rows: int
    tokens: int
    bytes: int

    @classmethod
    def of(cls, parent: Manifest | Plan) -> _States:
        if isinstance(parent, Plan):
            return cls(parent.records, parent.tokens, parent.storage_bytes)
        return cls(parent.rows, parent.tokens, sum(shard.bytes for shard in parent.shards))

    def drawn(self, tokens: int | None) -> _States:
        """What `train.data_tokens` takes of them, as if all samples were as long."""
        if tokens is None or tokens >= self.tokens:
            return self
        share = tokens / self.tokens
        return _States(round(self.rows * share), tokens, round(self.bytes * share))


class _Work(NamedTuple):
    """One training: what is trained, on what, with what."""

    config: RunConfig
    device: Device
    target: TargetShape
    head: HeadSize
    states: _States

    @property
    def dtype(self) -> str:
        return dtype_on(self.config, self.config.train.dtype, self.device)

    @property
    def rate(self) -> float:
        """FLOP/s of one worker."""
        if self.device.is_cuda:
            return self.device.flops(self.dtype) * TRAIN_SHARE
        return _FLOPS_PER_THREAD[self.dtype] * self.config.run.threads

    @property
    def step_tokens(self) -> int:
        section = self.config.train
        return section.batch_tokens * section.accumulate * self.config.plan.workers

    @property
    def tokens(self) -> int:
        """Trained on, over all passes."""
        section, tokens = self.config.train, self.states.tokens * self.config.train.epochs
        return min(tokens, section.max_steps * self.step_tokens) if section.max_steps else tokens

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.step_tokens)

    @property
    def flops(self) -> int:
        """Of a token."""
        section = self.config.train
        checkpointing = section.activation_checkpointing
        return self.head.training_flops(section.ttt_steps, checkpointing=checkpointing)


class _Evaluation(NamedTuple):
    """What decoding on the way adds."""

    flops: float = 0.0
    memory_bytes: int = 0
    storage_bytes: int = 0  # of one best head
    basis: tuple[str, ...] = ()


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Records, tokens, storage, time and peak memory of training for this run.

    `parent` is the plan of features, for a run whose states do not exist yet.
    """
    manifest = find_manifest(config.run.uri, "features")
    states = manifest or parent
    if states is None:
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
    section, target = config.train, shape_of(config, manifest.contract if manifest else None)
    head = HeadSize.of(section, target)
    drawn = _States.of(states).drawn(section.data_tokens)
    work = _Work(config, device_of(config), target, head, drawn)
    evaluation, zero = _evaluation(work), _zero(work)
    memory = _memory(work, zero[section.zero_stage], evaluation)
    parameters = head.parameters
    each = _CHECKPOINT_BYTES + (_AVERAGE_BYTES if section.ema_decay else 0)
    checkpoint = parameters * each + evaluation.storage_bytes
    decoding_seconds = evaluation.flops / (work.rate * _DECODING_SHARE)
    workers_said = described(config, work.device)
    return Plan(
        stage="train",
        state=_state(config, manifest) if manifest else "waiting for features",
        records=work.states.rows * section.epochs,
        tokens=work.tokens,
        storage_bytes=section.keep_checkpoints * checkpoint + 2 * 2 * parameters,
        shards=_HEAD_FILES,
        objects=_OBJECTS + section.keep_checkpoints * _CHECKPOINT_FILES,
        device=workers_said,
        seconds=_LOADING_SECONDS + _start_seconds(work) + _seconds(work) + decoding_seconds,
        peak_memory_bytes=max(sum(memory.values()), _start_bytes(work)),
        memory=memory | {"before that, a start by least squares": _start_bytes(work)},
        zero=zero if work.device.is_cuda or config.plan.workers > 1 else (),
        problems=_problems(work, sum(memory.values())),
        basis=(
            f"head: {parameters:,} parameters ({parameters / target.parameters:.1%} of the "
            f"target), MLP width {head.intermediate:,}; the target's shape: {target.origin}",
            f"storage: {section.keep_checkpoints} checkpoints of "
            f"{each} bytes a parameter, and the head twice in bfloat16",
            f"time: {work.flops / 1e6:,.0f} MFLOP a token at {work.rate / 1e9:,.0f} GFLOP/s "
            f"in {work.dtype} ({workers_said}), as if every token were supervised; "
            f"{work.steps:,} steps of {work.step_tokens:,} tokens; "
            f"{_start_seconds(work):,.0f} s for a start by least squares, on one worker",
            "memory: optimiser state, the target's embedding and one unroll's activations",
            *evaluation.basis,
        ),
    )


def check_size(config: RunConfig) -> None:
    """Raise ConfigError where the target's size is known and training will refuse the head for it:
    when training looks, replies and states have been paid for."""
    target, section = known_shape(config), config.train
    if target and (refusal := _refusal(section, HeadSize.of(section, target), target, _COUNTED)):
        raise refusal


def _refusal(
    section: TrainSection, head: HeadSize, target: TargetShape, tolerance: float = 1.0
) -> ConfigError | None:
    """What training will say of a new head that is above its limit by more than `tolerance`."""
    settings = algorithm(section).settings(section)
    name, limit = settings.key, settings.max_share
    share = head.parameters / target.parameters
    if section.start_from or share <= limit * tolerance:
        return None
    return ConfigError(
        f"the head has {share:.1%} of the target's parameters, above the limit of {limit:.1%}",
        where=f"{name}.max_share_of_target",
        fix=f"lower {name}.draft_vocab_size or intermediate_size, or raise the limit",
    )


def _seconds(work: _Work) -> float:
    """Arithmetic and collectives one after the other; reading the states goes on beside them."""
    config, workers = work.config, work.config.plan.workers
    traffic = step_traffic(work.head, ranks=workers)
    computing = work.flops * work.tokens / (work.rate * workers)
    share_read = work.tokens / max(1, work.states.tokens)
    reading = store_seconds(config, work.states.bytes * share_read)
    return max(computing + work.steps * traffic / LINK_BYTES, reading)


def _start_seconds(work: _Work) -> float:
    """Of the first process, which solves for all, in float32."""
    device, threads = work.device, work.config.run.threads
    rate = _FLOPS_PER_THREAD["float32"] * threads
    if device.is_cuda:
        rate = device.flops("float32") * TRAIN_SHARE
    return start_flops(work.config.train, work.head, work.states.tokens) / rate


def _zero(work: _Work) -> tuple[ZeroMemory, ...]:
    """Memory of a process for each stage that could be set."""
    return tuple(
        zero_memory(
            work.config.train,
            work.head,
            work.target,
            stage=stage,
            ranks=work.config.plan.workers,
            bf16=work.dtype == "bfloat16",
        )
        for stage in ZERO_STAGES
    )


def _memory(work: _Work, zero: ZeroMemory, evaluation: _Evaluation) -> dict[str, int]:
    """Of one process, of the first one where training evaluates."""
    own = {} if work.device.is_cuda else {"interpreter": _INTERPRETER_BYTES}
    decoded = {"target, to decode": evaluation.memory_bytes} if evaluation.memory_bytes else {}
    return {
        **own,
        "weights": zero.weights,
        "gradients": zero.gradients,
        "optimiser": zero.optimiser,
        "buffers": zero.buffers,
        "frozen": zero.frozen,
        "activations": max(zero.activations, zero.stepping),
        **decoded,
    }


def _start_bytes(work: _Work) -> int:
    """Of the process while it solves the start, with the head in float32."""
    start = start_bytes(work.config.train, work.head, work.target)
    own = 0 if work.device.is_cuda else _INTERPRETER_BYTES
    return own + 4 * work.head.parameters + start if start else 0


def _problems(work: _Work, needed: int) -> tuple[str, ...]:
    dflash = work.config.train.algorithm == "dflash"
    key = "dflash.init_layers" if dflash else "head_config.init_layer"
    sizes = {
        ("training", "raise train.zero_stage, or lower train.batch_tokens"): needed,
        ("a start by least squares", f"set train.{key}=target_last"): _start_bytes(work),
    }
    unfit = tuple(
        f"{what} does not fit: {work.device.share_of(size)}; {mend}"
        for (what, mend), size in sizes.items()
        if not work.device.holds(size)
    )
    refusal = _refusal(work.config.train, work.head, work.target)
    return (*([f"{refusal.where}: {refusal.problem}; {refusal.fix}"] if refusal else []), *unfit)


def _evaluation(work: _Work) -> _Evaluation:
    """As if a round emitted one token: the first evaluations decode with an untrained head."""
    section, target = work.config.train, work.target
    if not section.evaluate_every:
        return _Evaluation()
    count = -(-work.steps // section.evaluate_every) + 1  # the last with samples that report
    # A whole sample's length: its prompt is not longer.
    prompt = work.states.tokens // max(1, work.states.rows)
    verified = section.evaluate_tokens * section.evaluate_tree.nodes
    read = section.evaluate_prompts * (prompt + verified)
    replies = f"{section.evaluate_prompts} replies of {section.evaluate_tokens} tokens"
    dtype = dtype_on(work.config, work.config.target.dtype, work.device)
    on_gpu = 4 if dtype == "float32" else 2
    width = on_gpu if work.device.is_cuda else decoder_weight_bytes(work.config.target)
    return _Evaluation(
        flops=2.0 * target.parameters * read * count,
        memory_bytes=target.parameters * width,
        storage_bytes=work.head.parameters * (2 if work.dtype == "bfloat16" else 4),
        basis=(
            f"evaluation: {count:,} times {replies}, as if a round emitted one token; the target "
            f"of {target.parameters:,} parameters stays in memory beside the head",
        ),
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
    newest = max(markers, key=lambda name: (len(name), name), default=None)
    return f"checkpoint {newest}" if newest else "not started"

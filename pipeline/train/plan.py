"""What training would make, from the states' manifest or from the plan of features: no torch, no
state is read.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig, TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.registry import algorithm, solves_least_squares
from pipeline.planning.heads import ZERO_STAGES, HeadSize, init_bytes, zero_memory
from pipeline.planning.targets import TargetShape, known_shape, shape_of
from pipeline.records import Manifest, Plan, ZeroMemory
from pipeline.store.manifest import find_manifest, finished_state, stage_location
from pipeline.store.parts import window_of
from pipeline.target.arithmetic import decoder_weight_bytes, planned_dtype

#: Master and two moments of AdamW.
_CHECKPOINT_BYTES = 12
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


class _Training(NamedTuple):
    """What is trained, and on what."""

    config: RunConfig
    target: TargetShape
    head: HeadSize
    states: _States

    @property
    def dtype(self) -> str:
        return planned_dtype(self.config.train.dtype, self.config.target.device)

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


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Records, tokens, storage and memory of training for this run.

    `parent` is the plan of features, for a run whose states do not exist yet.
    """
    manifest = find_manifest(config.states_uri, "features")
    states = manifest or parent
    if states is None:
        return Plan(
            stage="train",
            state="waiting for features",
            records=0,
            tokens=0,
            storage_bytes=0,
            peak_memory_bytes=0,
            basis=("the states do not exist yet: run `eagle3 features` first",),
        )
    section, target = config.train, shape_of(config, manifest.contract if manifest else None)
    head = algorithm(section).size(section, target)
    drawn = _States.of(states).drawn(section.data_tokens)
    training = _Training(config, target, head, drawn)
    zero, initialising = _zero(training), _initialising_bytes(training)
    memory = _memory(training, zero[section.zero_stage])
    refusal = _refusal(section, head, target)
    best = (2 if training.dtype == "bfloat16" else 4) if section.evaluate_every else 0
    return Plan(
        stage="train",
        state=_state(config, manifest) if manifest or section.follow else "waiting for features",
        records=drawn.rows * section.epochs,
        tokens=training.tokens,
        storage_bytes=(section.keep_checkpoints * (_CHECKPOINT_BYTES + best) + 2 * 2)
        * head.parameters,
        shards=_HEAD_FILES,
        objects=_OBJECTS + section.keep_checkpoints * _CHECKPOINT_FILES,
        parameters=head.parameters,
        peak_memory_bytes=max(sum(memory.values()), initialising),
        memory=memory | {"before that, least-squares initialisation": initialising},
        zero=zero if config.plan.workers > 1 else (),
        problems=(f"{refusal.where}: {refusal.problem}; {refusal.fix}",) if refusal else (),
        basis=(
            f"head: {head.parameters:,} parameters ({head.parameters / target.parameters:.1%} of "
            f"the target), MLP width {head.intermediate:,}; the target's shape: {target.origin}"
            + ("; that of train.start_from keeps its own" if section.start_from else ""),
            f"storage: {section.keep_checkpoints} checkpoints of "
            f"{_CHECKPOINT_BYTES} bytes a parameter, and the head twice in bfloat16",
            f"{training.steps:,} steps of {training.step_tokens:,} tokens in {training.dtype}",
            "memory: optimiser state, the target's embedding and one unroll's activations",
            *_following(config, states),
        ),
    )


def _following(config: RunConfig, states: Manifest | Plan) -> tuple[str, ...]:
    if not (keep := config.features.keep_shards):
        return ()
    shards = states.shards if isinstance(states, Plan) else len(states.shards)
    window = window_of(keep, shards)
    count = -(-shards // window)
    text = f"windows: {count:,} of {window:,} shards; after each a checkpoint, and it is deleted"
    return (text,)


def check_size(config: RunConfig) -> None:
    """Raise ConfigError where the target's size is known and training will refuse the head for it:
    when training looks, replies and states have been paid for."""
    target, section = known_shape(config), config.train
    if target and (
        refusal := _refusal(section, algorithm(section).size(section, target), target, _COUNTED)
    ):
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


def _zero(training: _Training) -> tuple[ZeroMemory, ...]:
    """Memory of a process for each stage that could be set."""
    return tuple(
        zero_memory(
            training.config.train,
            training.head,
            training.target,
            stage=stage,
            ranks=training.config.plan.workers,
            bf16=training.dtype == "bfloat16",
        )
        for stage in ZERO_STAGES
    )


def _memory(training: _Training, zero: ZeroMemory) -> dict[str, int]:
    """Of one process, of rank 0 where training evaluates."""
    config, target = training.config, training.target
    decoding = target.parameters * decoder_weight_bytes(config.target)
    return {
        "weights": zero.weights,
        "gradients": zero.gradients,
        "optimiser": zero.optimiser,
        "buffers": zero.buffers,
        "frozen": zero.frozen,
        "activations": max(zero.activations, zero.stepping),
        **({"target, to decode": decoding} if config.train.evaluate_every else {}),
    }


def _initialising_bytes(training: _Training) -> int:
    """Of the process while it solves the least squares, with the head in float32."""
    solves = solves_least_squares(training.config.train)
    solving = init_bytes(training.head, training.target) if solves else 0
    return 4 * training.head.parameters + solving if solving else 0


def _state(config: RunConfig, parent: Manifest | None) -> str:
    """What is on storage for this config and parent."""
    if finished := finished_state(config, "train", parent):
        return finished
    names = stage_location(config.run.uri, "train").child("checkpoints").names()
    markers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    newest = max(markers, key=lambda name: (len(name), name), default=None)
    return f"checkpoint {newest}" if newest else "not started"

"""What crosses a door between stages. No torch here: a login node can read all of it.

Prompt   written by prompts/      read by synth, serve_eval
Sample   written by synth/        read by features
Shard    written by store/        listed in every Manifest
Manifest written by every stage   read by the next one
TargetContract written by synth   copied into every later manifest and into the head
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pipeline.documents import BrokenDocument, parse_json
from pipeline.errors import ContractMismatch, CorruptShard

SCHEMA_VERSION = 5
#: The oldest that is still read: schema 2 has no `arithmetic`, 4 no `files` and no checksum.
OLDEST_SCHEMA = 2
#: The first whose manifests carry a checksum of themselves.
SEALED_SCHEMA = 5
#: Of the states on disk, which docs/states-format.md describes; raised with every change that an
#: older reader would misread.
STATES_FORMAT = 3

#: Layer id `i` names the residual stream *after* decoder layer `i` (0-based). SafeAILab calls the
#: same tensor "entering layer i+1"; vLLM and speculators write `i+1`.
CAPTURE_CONVENTION = "output-of-layer"

#: A file in a directory, and nothing above or outside of it: manifests may come from strangers.
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
#: Likewise, in a directory or below it.
FILE_PATH = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"

#: Bytes and SHA-256 of a file.
StoredFile = tuple[int, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]

Stage = Literal["synth", "features", "train", "eval"]
STAGES: tuple[Stage, ...] = ("synth", "features", "train", "eval")


def canonical_json(value: Any) -> str:
    """The one JSON spelling that hashes are taken over: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def stored_file(data: bytes) -> StoredFile:
    """Of a file that holds `data`."""
    return len(data), hashlib.sha256(data).hexdigest()


#: Key of a sealed file's checksum.
CHECKSUM = "checksum"


def sealed_json(fields: dict[str, Any]) -> bytes:
    """A JSON file that holds under `checksum` the SHA-256 of itself without that line.

    Every changed byte shows. It is a checksum and no signature: whoever rewrites the file can
    compute it again.
    """
    checksum = hashlib.sha256(_file_json(fields)).hexdigest()
    return _file_json({**fields, CHECKSUM: checksum})


def json_object(data: bytes, *, where: str, fix: str) -> dict[str, Any]:
    """The fields of the JSON file `data`. Raises CorruptShard for anything but a JSON object."""
    try:
        fields = parse_json(data)
    except BrokenDocument as error:
        where = f"{where}: {error.key}" if error.key else where
        raise CorruptShard(error.problem, where=where, fix=fix) from None
    if isinstance(fields, dict):
        return fields
    raise CorruptShard("is not a JSON object", where=where, fix=fix)


def take_checksum(fields: dict[str, Any], data: bytes, *, where: str, fix: str) -> bool:
    """Take the checksum out of the `fields` of a file; whether there was one.

    Files of earlier versions have none. Raises CorruptShard where the file's `data` are not what
    `sealed_json` wrote.
    """
    sealed = fields.pop(CHECKSUM, None) is not None
    if sealed and sealed_json(fields) != data:
        problem = f"is not what was written: its {CHECKSUM} is not that of its content"
        raise CorruptShard(problem, where=where, fix=fix)
    return sealed


def _file_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def sealed_page(text: str) -> bytes:
    """HTML or Markdown that ends with a comment: the SHA-256 of all before it."""
    body = text.encode()
    return body + _seal(body)


def is_sealed_page(data: bytes) -> bool:
    """Whether it is as `sealed_page` wrote it."""
    body = data[: -len(_seal(b""))]
    return data == body + _seal(body)


def _seal(body: bytes) -> bytes:
    return f"<!-- SHA-256 of all above: {hashlib.sha256(body).hexdigest()} -->\n".encode()


class Record(BaseModel):
    """Frozen and strict: unknown fields on disk are an error, not a surprise.

    A text below a field is its description, which docs/report-schema.json shows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def parse(cls, data: bytes, *, where: str, fix: str) -> Self:
        """The record in the JSON `data` of the file `where`.

        Raises CorruptShard, which names the field, for anything else.
        """
        return cls.from_fields(json_object(data, where=where, fix=fix), where=where, fix=fix)

    @classmethod
    def from_fields(cls, fields: Any, *, where: str, fix: str) -> Self:
        """As `parse`, of what was read of a JSON file."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        words = re.sub("(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()
        problem = f"not a {words}: {first['msg']}"
        raise CorruptShard(problem, where=f"{where}: {field}" if field else where, fix=fix)


def _check_json(text: str) -> str:
    try:
        json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return text


#: JSON as text.
_Json = Annotated[str, AfterValidator(_check_json)]


class SamplingOverride(Record):
    """What a source asks for instead of the run's sampling; None keeps the run's value."""

    temperature: float | None = Field(None, ge=0)  # 0 is greedy
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0: no limit


class Prompt(Record):
    """What a user asks: turns of one conversation, without any reply of a model."""

    sample_id: str  # unique within its source
    source: str  # data set or package it comes from
    license: str  # SPDX identifier, "unknown" when the source does not say
    category: str  # groups the evaluation, e.g. "writing"
    turns: tuple[str, ...]  # in order; the target answers each
    tool_turns: tuple[int, ...] = ()  # which of them are answers of tools
    tools: _Json | None = None  # list of the tools that the target may call
    system: str | None = None  # the record's own system prompt; None takes the run's
    sampling: SamplingOverride | None = None  # its source's; None takes the run's


class Span(Record):
    """Half-open token range [start, end)."""

    start: int
    end: int


class Message(Record):
    """One chat message, as the chat template receives it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SamplingParams(Record):
    """How a reply was drawn. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int  # 0: no limit
    max_new_tokens: int


class Sample(Record):
    """One conversation with the exact token ids that the target read and generated.

    token_ids     <sys>… <user> What is 2+2? <assistant> 4 <end> <user> Why? <assistant> … <end>
    supervised                                           └────┘                          └────┘
    """

    sample_id: str
    source: str
    license: str
    category: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    supervised: tuple[Span, ...]  # one per assistant turn: the generated ids, end token included
    finish_reason: Literal["stop", "length"]  # of the last turn
    sampling: SamplingParams
    seed: int
    generator: str  # what produced the replies, with its version
    variant: str | None = None  # of `synth.mix`
    tools: _Json | None = None  # list of the tools that the target could call


class TargetContract(Record):
    """Everything that must be equal between data, head and target for a head to work."""

    source: str
    """As the user wrote it in target.source."""
    revision: str
    """Hub commit, package version, or local."""
    fingerprint: str
    """SHA-256 over every byte of the weights, as `sha256:…`; without that of sampled blocks, which
    is what earlier versions wrote."""
    sampled_fingerprint: str = ""
    """What those versions would have written, to know their heads and runs by."""
    dtype: str
    """Type that its weights are stored in; what computes with them is in Arithmetic."""
    hidden_size: int
    """Of its states."""
    num_layers: int
    """Decoder layers."""
    vocab_size: int
    """Rows of its embedding."""
    rope: dict[str, Any]
    """As transformers' rope_parameters: rope_theta, rope_type, …"""
    capture_layers: tuple[int, ...]
    """Output indices of the aux layers, low to high."""
    capture_convention: str = CAPTURE_CONVENTION
    """What a layer's index means."""
    final_state_normed: bool = True
    """Final states are taken after the target's last norm."""
    tokenizer_hash: str
    """SHA-256 over the tokenizer."""
    chat_template_hash: str
    """SHA-256 over the chat template."""
    chat_template: str | None = None
    """Its text where the configuration gave it; None for the target's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the template, such as enable_thinking."""
    parameters: int
    """Of the target, tied weights counted once."""

    def has_weights_of(self, other: TargetContract) -> bool:
        """Whether both are of the same weights.

        By every byte; by sampled blocks where one of the two was made before all bytes were read.
        """
        ours, theirs = self.fingerprint, other.fingerprint
        return ours in (theirs, other.sampled_fingerprint) or theirs == self.sampled_fingerprint


#: Fields that may differ between stages: where a target was found, the type of weights whose bytes
#: the fingerprint covers (heads of schema 2 name the type they were computed in), and the figure
#: by which older ones are known.
CONTRACT_LABELS = frozenset({"source", "revision", "dtype", "sampled_fingerprint"})
#: Fields that may also differ between a target and its fine-tune, whose weights may be stored tied
#: or not: a head for the one can go on as one for the other.
TUNED_FIELDS = frozenset(
    {"fingerprint", "parameters", "chat_template_hash", "chat_template_kwargs"}
)


class Arithmetic(Record):
    """What numbers were computed with. It makes no two runs differ, but a result rests on it."""

    dtype: str
    """float32, bfloat16 or float16; "unknown" for a server's."""
    kernels: str
    """torch, triton, an ISA level of our own CPU kernels, or the kind of server."""
    device: Literal["cpu", "cuda", "server"]
    """Where it was computed."""
    processor: str
    """The highest ISA level, or CUDA capability as sm_90: torch picks its kernels by it."""
    threads: int
    """Threads of torch; 0 for a server's."""
    repeatable: Literal["always", "per thread count", "no"]
    """Whether the same command repeats its result on such a machine: always, with as many threads,
    or not for certain."""

    def __str__(self) -> str:
        """As a notice says it."""
        return f"{self.dtype}, kernels {self.kernels}"

    def agrees(self, other: Arithmetic) -> bool:
        """Whether both give the same result for the same input."""
        ours, theirs = self, other
        if self.repeatable == "always":
            anywhere = {"threads": 0, "processor": ""}
            ours, theirs = (one.model_copy(update=anywhere) for one in (self, other))
        return self.repeatable != "no" and ours == theirs


class Shard(Record):
    """One committed file. `rejected` counts the input records that it consumed and left out.

    Two that hold the same are equal, whatever the files are called that hold it.
    """

    name: str = Field(pattern=FILE_NAME)
    #: The file with its bytes. Each attempt at a shard has one of its own, so that writers never
    #: touch each other's; schemas before 4 had none but `name`.
    file: str | None = Field(None, pattern=FILE_NAME)
    rows: int
    tokens: int
    bytes: int
    sha256: str
    rejected: dict[str, int] = {}

    @property
    def path(self) -> str:
        """Its file's name in the directory of the shards."""
        return self.file or self.name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shard):
            return NotImplemented
        return self.model_dump(exclude={"file"}) == other.model_dump(exclude={"file"})

    __hash__ = None  # type: ignore[assignment]


class Manifest(Record):
    """A finished stage. Written last and atomically: a directory without it is not finished."""

    stage: Stage
    schema_version: int = SCHEMA_VERSION
    config_hash: str  # of the sections that decide this stage's output
    parent_uri: str | None  # directory of the stage read from
    parent_hash: str | None  # `content_hash` of its manifest
    contract: TargetContract
    shards: tuple[Shard, ...]
    rejected: dict[str, int]  # reason → records, over the whole stage
    licenses: dict[str, int]  # SPDX id → records that went in, inherited down the chain
    sources: dict[str, int]  # source → records that went in, inherited down the chain
    details: dict[str, Any] = {}  # stage-specific facts: coverage, head size, PII policy, …
    software: dict[str, str]  # package → version
    #: All that had a part in it; several when it was continued on another kind of machine.
    arithmetic: tuple[Arithmetic, ...] = ()
    wall_seconds: float
    #: Everything else that the stage wrote and that somebody reads: path below the stage's
    #: directory → bytes and SHA-256. Schemas before 5 have none.
    files: dict[Annotated[str, Field(pattern=FILE_PATH)], StoredFile] = {}

    @property
    def content_hash(self) -> str:
        """Hash of what the stage produced; equal for equal bytes, however they were computed."""
        volatile: dict[str, Any] = dict.fromkeys(
            ("software", "arithmetic", "wall_seconds", "files"), True
        )
        places = {"parent_uri": True, "shards": {"__all__": {"file"}}}
        # Said by other fields of the contract, and unknown to earlier versions, whose runs go on.
        repeated = {"contract": {"chat_template", "sampled_fingerprint"}}
        return digest(self.model_dump(mode="json", exclude=volatile | places | repeated))

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


ZeroStage = Literal[0, 1]


class ZeroMemory(Record):
    """Bytes of one training process under a stage of ZeRO."""

    stage: ZeroStage
    weights: int
    gradients: int
    optimiser: int
    stepping: int  # while the optimiser steps and no activations are held
    buffers: int  # for collectives
    frozen: int  # the target's embedding, and its output rows of the draft vocabulary
    activations: int

    @property
    def total(self) -> int:
        """At the peak."""
        always = self.weights + self.gradients + self.optimiser + self.buffers + self.frozen
        return always + max(self.stepping, self.activations)


class Plan(Record):
    """What a stage would make, printed by `--plan`: what follows from shapes and counts."""

    stage: Stage
    state: str  # "not started", "12 of 40 shards committed", "complete"
    records: int
    tokens: int
    supervised_tokens: int = 0
    storage_bytes: int
    shards: int = 0
    objects: int = 0  # that the finished stage has on the store, those of shards among them
    parameters: int = 0  # of the head, in training's plan
    peak_memory_bytes: int  # tensors of one process, libraries not included
    memory: dict[str, int] = {}  # of it, by what it is for
    zero: tuple[ZeroMemory, ...] = ()  # of training, by stage
    problems: tuple[str, ...] = ()  # why the stage would refuse
    basis: tuple[str, ...]  # one line an assumption


def match_contracts(
    target: TargetContract, other: TargetContract, *, where: str, tuned: bool = False
) -> None:
    """Raise ContractMismatch on the first field in which `other` differs from this run's target.

    `other` is the contract of the artefact at `where`. CONTRACT_LABELS may differ, and TUNED_FIELDS
    where the target may be a fine-tune of the one that the artefact was made for.
    """
    may_differ = CONTRACT_LABELS | TUNED_FIELDS if tuned else CONTRACT_LABELS
    by_hash = {"chat_template"}
    ours, theirs = (each.model_dump(mode="json", exclude=by_hash) for each in (target, other))
    for field, value in ours.items():
        if field in may_differ or theirs[field] == value:
            continue
        if field == "fingerprint" and target.has_weights_of(other):
            continue
        made_for, has = canonical_json(theirs[field]), canonical_json(value)
        raise ContractMismatch(
            f"made for a target with {field} {made_for}, this one has {has}",
            where=f"{where}: contract.{field}",
            fix=f"set target.source to the target it was made for ({other.source}), "
            "or make it again for this one under another run.uri",
        )

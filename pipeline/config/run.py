"""The whole configuration: one section a stage, and what all stages share.

What holds for a whole process and shapes no output comes from `run` and from the environment:

    run.cache_dir, else XDG_CACHE_HOME (its folder eagle3)   ~/.cache/eagle3
    EAGLE3_STORE_RETRY_SECONDS                               300
    EAGLE3_STORE_TIMEOUT_SECONDS                             60
    EAGLE3_CPU_KERNELS (0: off)                              on

Every stage begins with `prepare_process`, or with `take_settings` where torch may not be needed;
commands without a configuration take the environment's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python

from pipeline.config.credentials import VariableName, check_endpoint
from pipeline.config.drafter import ALL_SETTINGS, DrafterSection
from pipeline.config.evaluation import EvalSection, RivalSection
from pipeline.config.section import Place, Section
from pipeline.config.server import ServeSection
from pipeline.config.synth import TRANSPORT_KEYS, SynthSection
from pipeline.config.train import TrainSection
from pipeline.documents import LARGEST_YAML, local_path, read_file
from pipeline.errors import ConfigError
from pipeline.records import STATES_FORMAT, Stage, digest

_OBJECT = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"  # a Kubernetes name
#: What of a section may change between two attempts at a stage, or between the machines that share
#: one run: it says how the stage is computed and watched, not what comes out.
_NOT_IN_THE_OUTPUT: dict[str, Any] = {
    "target": {"dtype", "device"},
    "synth": {
        "batch_size": True,
        "head": True,  # drafted replies are the target's own
        "tree": True,
        "drafter": True,
        "generator": TRANSPORT_KEYS,
        "max_rejected": True,
        "parallel": True,
        "screening_processes": True,
        "dlp": {"endpoint"},
    },
    "features": {
        "engine",
        "batch_tokens",
        "self_check_tolerance",
        "reply_tolerance",
        "device_map",
        "parallel",
    },
    "train": {
        "dtype",
        "activation_checkpointing",
        "compile",
        "checkpoint_every",
        "keep_checkpoints",
        "grace_seconds",
        "timeout_minutes",
        "states",  # by their manifest's hash
        "wandb",
        "wandb_project",
    },
    "eval": {"server", "parallel"},
}
#: Likewise of a training that evaluates nothing.
_ONLY_EVALUATED = {"evaluate_prompts", "evaluate_tokens", "evaluate_tree"}
#: glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, the last two at most what they can be.
_MALLOC = {-1: 2**31 - 1, -2: 64 << 20, -3: 32 << 20}


class StageJobSection(Section):
    """What the job of one stage gets; all but `workers` and `hours` is for each worker."""

    workers: int = Field(1, gt=0)
    """Pods, or tasks of the array, that make synth's or features' shards; for train the nodes."""
    gpus: int = Field(1, ge=0)
    """GPUs; training and stages with `parallel: tensor` start a process on each."""
    cpus: int = Field(8, gt=0)
    """CPU cores, and threads of torch, which the processes of a worker share."""
    memory_gib: int = Field(32, gt=0)
    """Main memory."""
    hours: float = Field(24, gt=0, le=100_000)
    """Kubernetes: the stage fails after so long, all attempts together. Slurm: limit of one
    attempt, after which the next continues."""


class JobsSection(Section):
    """Jobs of a cluster. Nothing here shapes what a stage makes."""

    image: str | None = Field(None, pattern=r"^\S+$")
    """Kubernetes: container image with this package, as Dockerfile builds it."""
    service_account: str | None = Field(None, pattern=_OBJECT)
    """Kubernetes: service account that may read and write the bucket."""
    volume_claim: str | None = Field(None, pattern=_OBJECT)
    """Kubernetes: ReadWriteMany claim for a run that is in no bucket, mounted at run.uri's
    parent."""
    stages: dict[Stage, StageJobSection] = Field({})
    """What single stages get, such as {train: {gpus: 8}}; the others get the defaults."""

    @model_validator(mode="after")
    def _evaluates_once(self) -> JobsSection:
        if self.of("eval").workers > 1:
            raise ValueError("eval measures on one machine; set stages.eval.workers to 1")
        return self

    def of(self, stage: Stage) -> StageJobSection:
        """What the job of a stage gets."""
        return self.stages.get(stage, StageJobSection())


class RaySection(Section):
    """Synth and features in the actors of the Ray cluster at $RAY_ADDRESS, or of a local one."""

    workers: int | None = Field(None, gt=0)
    """Actors, each a process with the model. None: as many as the cluster holds."""
    cpus: float = Field(1, ge=0)
    """CPUs that Ray keeps free for an actor; run.threads says how many it uses."""
    gpus: float = Field(0, ge=0)
    """GPUs of an actor."""


class RunSection(Section):
    """Where the run lives and what all its stages share."""

    uri: Place = "runs/run"
    """Directory, file://, gs:// or s3:// that holds one folder a stage (docs/storage.md)."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice in the run."""
    threads: int = Field(0, ge=0)
    """CPU threads of torch; 0 takes the cores this process may use. Where other jobs hold some of
    them, give the number that is free: threads that wait for a core are many times slower."""
    cache_dir: str | None = None
    """Where this machine keeps what can be made again: copies of remote shards, dequantised
    targets, compiled kernels, the workspace of a remote run. None: $XDG_CACHE_HOME/eagle3."""
    cache_bytes: int = Field(20_000_000_000, ge=0)
    """Limit of the copies of remote shards. Where it cannot hold 64 shards, samples are read by
    byte range."""
    shard: str | None = Field(None, pattern=r"^\d+/[1-9]\d*$")
    """i/n: of synth's and features' shards this process makes every n-th, from number i on (0/4 …
    3/4). Whoever finds all of them committed finishes the stage (`--shard`)."""
    runtime: Literal["local", "ray"] = "local"
    """What runs synth and features: this process, or actors on Ray."""
    ray: RaySection = RaySection()
    """The actors."""
    claim_seconds: float = Field(60, gt=0)
    """A shard of synth or features that another process has claimed is taken over once the claim
    has not been renewed for so long, by the store's clock; claims are renewed four times as
    often."""
    force: bool = False
    """Discard a stage's earlier output when it belongs to another config (`--force`)."""
    metrics_dir: str | None = None
    """Local directory in which each process keeps a Prometheus text file of what it does, as
    node_exporter's textfile collector reads it (docs/fleet.md). None: no file."""

    @field_validator("shard")
    @classmethod
    def _is_a_part(cls, value: str | None) -> str | None:
        if value is not None:
            index, count = map(int, value.split("/"))
            if index >= count:
                raise ValueError(f"there is no part {index} of {count}; parts are 0 … {count - 1}")
        return value

    def owns(self, index: int) -> bool:
        """Whether shard number `index` is this process's to make."""
        part, parts = map(int, (self.shard or "0/1").split("/"))
        return index % parts == part


class TargetSection(Section):
    """The model to accelerate."""

    source: str
    """Hub id, local directory, GGUF file, or package:NAME for a pip package that carries a GGUF
    file."""
    revision: str | None = None
    """Hub revision; ignored for local sources."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Compute type of the target in every stage; its weights keep the type they are stored in.
    auto: bfloat16 where this machine multiplies it (AVX512-BF16, AMX, ARM bf16, CUDA 8.0), else
    float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the target and the head run; auto takes CUDA when present."""
    capture_layers: Literal["auto"] | Annotated[tuple[int, ...], Field(min_length=1)] = "auto"
    """Output indices of the aux layers, low to high; auto is [1, L//2-1, L-4]. A head reads as many
    as it was made for: three but for imported ones."""
    chat_template: str | None = None
    """A Jinja chat template in place of the target's own, for base models that have none: the path
    of a file, which is read with the configuration, or the text itself. Part of the contract of
    data and head."""
    chat_template_kwargs: dict[str, str | int | float | bool] = Field({})
    """Variables of the chat template that choose a mode, such as enable_thinking; part of the
    contract of data and head."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, value: str | None) -> str | None:
        """The text: what was read is hashed, and other machines need no file."""
        if value is None or _is_template(value):
            return value
        try:
            text = read_file(Path(value).expanduser(), most=LARGEST_YAML).decode()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or getattr(error, "problem", "not UTF-8")
            raise ValueError(f"cannot be read: {reason}") from None
        if not _is_template(text):
            raise ValueError("is not a Jinja template: it holds neither {{ nor {%")
        return text

    def output_indices(self, num_layers: int) -> tuple[int, ...]:
        """Of the aux layers of a target with so many, low to high.

        Raises ConfigError when a layer does not exist or they are not ascending.
        """
        auto = (1, num_layers // 2 - 1, num_layers - 4)
        layers = auto if self.capture_layers == "auto" else self.capture_layers
        if not all(low < high for low, high in pairwise((-1, *layers, num_layers))):
            those = f"ascending layers of a target that has {num_layers} (0…{num_layers - 1})"
            problem = f"{list(layers)} do not name {those}"
            fix = "choose existing output indices, low to high; most heads read three"
            raise ConfigError(problem, where="target.capture_layers", fix=fix)
        return layers


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


Supervise = Literal["replies", "all"]


class EngineSection(Section):
    """A vLLM that computes the states: servers, or one in the process of the stage."""

    endpoints: tuple[str, ...] = Field((), repr=False)
    """Base URLs of servers, for example http://localhost:8000/v1; they must run with our connector
    (docs/capture.md). None: vLLM runs in this process, and must be installed beside this
    package."""
    model: str | None = None
    """Name by which the servers know the target; None takes the one that they list."""
    api_key_env: VariableName | None = Field(None, repr=False)
    """Name, in capitals, of the environment variable that holds the servers' API key."""
    allow_plain_http: bool = False
    """Send that key to other machines over http:// too, where everybody between can read it."""
    directory: str = "/dev/shm/eagle3-states"
    """Where the servers put states and this process takes them, by its path here: memory that looks
    like a disk, or a file system that both see."""
    concurrency: int = Field(64, gt=0)
    """Requests under way over all endpoints."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Longest wait for one sample's states."""
    outage_seconds: float = Field(300.0, gt=0)
    """The stage stops when no endpoint has answered for this long; the same command continues
    it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vllm.LLM where it runs in this process, for example
    {tensor_parallel_size: 8}."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> EngineSection:
        for url in self.endpoints:
            check_endpoint(url, with_key=bool(self.api_key_env) and not self.allow_plain_http)
        if self.endpoints and self.options:
            raise ValueError("options are for vLLM in this process; start the servers with them")
        return self


class FeaturesSection(Section):
    """Target states, computed once and stored."""

    backend: Literal["local", "vllm"] = "local"
    """Who computes them: transformers in this process, or a vLLM, with the arithmetic of the server
    that will serve the target (docs/capture.md)."""
    engine: EngineSection = EngineSection()
    """That vLLM."""

    batch_tokens: int | None = Field(None, gt=0)
    """Tokens of one packed forward; longer samples go alone. None: 8,192 on a GPU, else 2,048. A
    vLLM is asked for a whole shard."""
    shard_tokens: int = Field(16384, gt=0)
    """A shard is closed once it holds this many tokens: the unit of commit and resume."""
    encoding: Literal["bf16", "fp8", "int8"] = "int8"
    """Storage type of aux and final states; docs/states-format.md has the size, the error and the
    cost in τ of each."""
    keep_shards: int | None = Field(None, ge=2)
    """At most so many shards of states lie in the run at one time, while training follows
    (train.follow): it trains on half of them, or on all if they are no more, as the next half is
    made, and deletes those that a checkpoint is past. None: all stay."""
    supervise: Supervise = "replies"
    """Tokens whose teacher, the final state before them, is stored, and that training learns from:
    those that the target generated, or prompts too."""
    alternatives: int = Field(0, ge=0, le=16)
    """Other tokens in place of each whose final state is stored, drawn from the target's own
    distribution there, that training learns from as well (docs/training.md): each costs a token of
    the target's forward and a final state more. It needs the target in this process."""
    self_check_tolerance: float = Field(64, ge=0)
    """A sample of each shard is computed again alone; its states may differ by this many steps
    (eps) of the compute type. 0: no check."""
    reply_tolerance: float | None = Field(None, ge=0, le=1)
    """Share of the scored reply tokens that may lie further from the teacher than arithmetic
    explains (docs/targets.md). None: 0.005, of a mixture of experts 0.15. 1: the figures are kept,
    and judge nothing, for servers that are known to quantise."""
    device_map: Literal["auto", "balanced"] | dict[str, int | str] | None = None
    """Spread the target's layers over devices, as transformers' device_map; needs accelerate. None:
    all on target.device."""
    parallel: Literal["none", "tensor"] = "none"
    """tensor: split every layer over the processes of a launcher, which compute the same shards
    together, for a target that fits no single device (`torchrun --nproc-per-node N -m pipeline.cli
    features …`)."""

    def forward_tokens(self, device: str) -> int:
        """`batch_tokens` on a device of that type."""
        return self.batch_tokens or (8192 if device == "cuda" else 2048)

    @model_validator(mode="after")
    def _is_split_one_way(self) -> FeaturesSection:
        if self.parallel == "tensor" and self.device_map is not None:
            raise ValueError(
                "a device_map places whole layers and parallel=tensor splits each one; choose one"
            )
        if self.backend != "local" and (self.parallel == "tensor" or self.device_map is not None):
            raise ValueError(
                "device_map and parallel place the target in our own processes; set "
                "engine.options.tensor_parallel_size, or start the servers so"
            )
        if self.backend == "local" and self.engine != EngineSection():
            raise ValueError("engine is set, but backend is local; set features.backend=vllm")
        if self.alternatives and (self.backend != "local" or self.parallel == "tensor"):
            raise ValueError(
                "alternatives need the target in one process of ours; set alternatives: 0, or "
                "backend: local and parallel: none (device_map spreads a large target)"
            )
        return self


class PlanSection(Section):
    """What `--plan` assumes of what it cannot read; shapes no output, part of no hash."""

    workers: int = Field(1, gt=0)
    """Training processes, over which ZeRO splits the optimiser's state (`--workers`)."""
    ranks: int = Field(1, gt=0)
    """Processes that share the target in stages with `parallel: tensor`."""
    target_config: str | None = None
    """config.json, or its directory, of a target that is not on this disk."""
    prompts: int | None = Field(None, gt=0)
    """Prompts assumed where sources cannot be counted here; synth.max_prompts still limits them."""
    prompt_tokens: int = Field(200, gt=0)
    """Length assumed of a prompt that cannot be read here; one turn."""

    def sharing(self, parallel: Literal["none", "tensor"]) -> tuple[int, str]:
        """Processes that share the target of such a stage, and of what memory is, for people."""
        if parallel == "none":
            return 1, "memory"
        return self.ranks, f"memory of each of {self.ranks:,} processes (plan.ranks)"


class RefreshSection(Section):
    """Going on with the head of an earlier run after its target was fine-tuned."""

    run: Place
    """The earlier run. Its head and manifests are read, nothing of it is written."""

    @property
    def head(self) -> str:
        """Where the earlier head is."""
        return f"{self.run.rstrip('/')}/train/head"


#: What a refresh compares its head with: the earlier run's, and one that is trained from scratch.
OLD, SCRATCH = "old", "scratch"


class RunConfig(Section):
    """All of a run. `eagle3 schema` prints the JSON schema, `eagle3 show` the resolved values."""

    run: RunSection = RunSection()
    """Where the run lives."""
    target: TargetSection
    """The model to accelerate."""
    synth: SynthSection | None = None
    """Prompts to samples."""
    features: FeaturesSection = FeaturesSection()
    """Samples to states."""
    train: TrainSection = TrainSection()
    """States to head."""
    eval: EvalSection = EvalSection()
    """Head to report."""
    serve: ServeSection = ServeSection()
    """The reference server; part of no hash."""
    jobs: JobsSection = JobsSection()
    """What a cluster gives to the stages; part of no hash."""
    plan: PlanSection = PlanSection()
    """What `--plan` reckons with."""
    refresh: RefreshSection | None = None
    """The earlier run of `eagle3 refresh` (docs/refresh.md). It sets train.start_from, and adds two
    heads to eval.compare."""

    @model_validator(mode="after")
    def _is_followed_where_shards_are_deleted(self) -> RunConfig:
        keep, follows = self.features.keep_shards, self.train.follow
        if keep is not None and not follows:
            raise ValueError(
                "features.keep_shards waits for training to make room; set train.follow=true"
            )
        if follows and keep is None:
            raise ValueError(
                "train.follow needs to know how many shards stay; set features.keep_shards"
            )
        return self

    @model_validator(mode="after")
    def _goes_on_from_the_earlier_head(self) -> RunConfig:
        """With what a refresh sets of training and evaluation."""
        if self.refresh is None:
            return self
        head = self.refresh.head
        if _place(self.run.uri) == _place(self.refresh.run):
            raise ValueError(
                "run.uri and refresh.run are one run; set run.uri to a new one, beside it"
            )
        if self.train.follow:
            raise ValueError(
                "a refresh trains two heads on the same states; set train.follow=false, and leave "
                "features.keep_shards out"
            )
        if self.train.start_from not in (None, head):
            raise ValueError("a refresh starts from refresh.run; leave train.start_from out")
        if self.eval.head is not None or not self.eval.drafter.needs_head:
            raise ValueError(
                "a refresh evaluates its own head; leave eval.head out, and set eval.drafter.name "
                "to one that needs a head"
            )
        rivals = {
            name: RivalSection(name=name, head=at, drafter=self.eval.drafter, tree=None)
            for name, at in ((OLD, head), (SCRATCH, f"{self.scratch_uri}/train/head"))
        }
        if any(rivals.get(each.name, each) != each for each in self.eval.compare):
            raise ValueError(
                f"eval.compare: a refresh adds rivals {OLD} and {SCRATCH}; rename yours"
            )
        others = [each for each in self.eval.compare if each.name not in rivals]
        compare = (*others, *rivals.values())
        return self.model_copy(
            update={
                "train": self.train.model_copy(update={"start_from": head}),
                "eval": self.eval.model_copy(update={"compare": compare}),
            }
        )

    @property
    def scratch_uri(self) -> str:
        """The run of the head from scratch, inside that of a refresh."""
        return f"{self.run.uri.rstrip('/')}/{SCRATCH}"

    @property
    def from_scratch(self) -> RunConfig:
        """Of a refresh: the same training on the same states, of a new head."""
        train = {"start_from": None, "states": self.run.uri}
        return self.model_copy(
            update={
                "run": self.run.model_copy(update={"uri": self.scratch_uri}),
                "train": self.train.model_copy(update=train),
                "refresh": None,
            }
        )

    @property
    def states_uri(self) -> str:
        """The run that holds the states to train on."""
        return self.train.states or self.run.uri

    def in_turn(self, stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
        """`stages` one by one, but features together with a training that follows it."""
        turns: list[tuple[Stage, ...]] = []
        for stage in stages:
            if self.train.follow and stage == "train" and turns[-1:] == [("features",)]:
                turns[-1] = ("features", "train")
            else:
                turns.append((stage,))
        return turns

    def section_hash(self, stage: Stage) -> str:
        """Hash of `shaping`."""
        return digest(self.shaping(stage))

    def shaping(self, stage: Stage) -> dict[str, Any]:
        """What decides `stage`'s output: the target, the seed and its own section."""
        section: Section | None = getattr(self, stage)
        target = self.target.model_dump(mode="json", exclude=_NOT_IN_THE_OUTPUT["target"])
        left_out = _NOT_IN_THE_OUTPUT.get(stage, set())
        if stage == "train" and not self.train.evaluate_every:
            left_out = left_out | _ONLY_EVALUATED
        own = section and section.model_dump(mode="json", exclude=left_out)
        if own and stage == "features":
            own["format"] = STATES_FORMAT  # states of an older version are not taken for these
        return {"seed": self.run.seed, "target": target, stage: own}

    def default(self, keys: Sequence[str]) -> Any:
        """The default of a key of `shaping`, as it is there; None where there is none."""
        section: Any = self
        for key in keys[:-1]:
            section = getattr(section, key, None)
        fields = dict(type(section).model_fields) if isinstance(section, BaseModel) else {}
        if isinstance(section, DrafterSection):
            fields |= ALL_SETTINGS
        if keys[-1] not in fields:
            return None
        return to_jsonable_python(fields[keys[-1]].get_default(call_default_factory=True))


def _place(uri: str) -> str:
    """One spelling of a run's URI."""
    path = local_path(uri)
    return uri.rstrip("/") if path is None else os.path.realpath(path)


_run = RunSection()


def take_settings(run: RunSection) -> None:
    """Take the settings of `run` for this process, all but the threads of torch."""
    global _run
    _run = run


def prepare_process(run: RunSection) -> None:
    """Take the settings of `run` for this process, the threads of torch among them."""
    take_settings(run)
    if run.threads:
        import torch

        torch.set_num_threads(run.threads)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for what is allocated next; other C libraries do as they do.

    By itself it returns what a training step frees to the system, which gives the next step fresh
    pages, each of which it has to fill with zeros: a tenth of a small head's step. What is kept is
    no more than there was at once, and at most 2 GB; blocks above 32 MB are returned all the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def cache_directory() -> Path:
    """Where this machine keeps what can be made again: targets, kernels, shards, remote runs."""
    if _run.cache_dir:
        return Path(_run.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle3"


def store_retry_seconds() -> float:
    """How long one operation on a remote store is tried. Raises ConfigError."""
    return _seconds("EAGLE3_STORE_RETRY_SECONDS", 300.0)


def store_timeout_seconds() -> float:
    """How long a connection may be silent before it counts as dropped. Raises ConfigError."""
    return _seconds("EAGLE3_STORE_TIMEOUT_SECONDS", 60.0)


def cpu_kernels() -> bool:
    """Whether the decoder may use the C++ kernels where this machine can run them."""
    return os.environ.get("EAGLE3_CPU_KERNELS") != "0"


def rank() -> int:
    """Number of this process among those that a launcher (torchrun, deepspeed) has started."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_launched() -> bool:
    """Whether a launcher has started this process, alone or with others."""
    return "RANK" in os.environ


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            f"{text!r} is not a number of seconds",
            where=f"environment: {variable}",
            fix=f"set it to a number of at least 0, or unset it for {default:.0f}",
        )
    return value

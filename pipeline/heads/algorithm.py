"""What an algorithm must provide to be trained, decoded with, stored and exported.

An algorithm is a package. Its `__init__` holds one `HeadAlgorithm` and imports no torch, for
`--plan` reads it; its other files are imported when they are needed:

    shape.py        SHAPE, HEAD                                what it is
    init.py         choose_shape ─► new_head ─► init_least_squares       its first weights
    ttt.py          trained_model                              its objective, under any name
    drafter.py      make_drafter, drafter_factory              how it drafts
    checkpoint.py   head_config ◄─► read_config; read_foreign, export    how it is stored

The protocols below say what each function takes and gives; `section` is always `train`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from pipeline.config import DrafterSection, Section, TrainSection
from pipeline.errors import ConfigError, HeadError
from pipeline.planning.heads import HeadSize
from pipeline.planning.targets import TargetShape

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from pipeline.decoder.drafter import Drafter, DrafterFactory, Trees
    from pipeline.decoder.model import DecoderModel
    from pipeline.heads.base import DraftingHead, DraftShape
    from pipeline.heads.checkpoint import ForeignHead, HeadCard
    from pipeline.heads.fields import Layers
    from pipeline.heads.init import DraftVocabulary
    from pipeline.heads.trained import TrainedModel
    from pipeline.learning.least_squares import BatchesOf
    from pipeline.records import TargetContract
    from pipeline.target.open import Target
    from pipeline.target.weights import TargetWeights


class HeadSettings(NamedTuple):
    """The section of the configuration that describes a head."""

    section: Section
    key: str  # where it stands: "train.head_config"
    #: Keys that decide tensors, and the shape's field for each. A fine-tuned head keeps its own.
    fixed: Mapping[str, str]
    max_share: float  # of the target's parameters
    least_squares: bool  # solve what is linear on the first batches, before training


class ServeCommand(NamedTuple):
    """How a server is started with an exported head, for the model card."""

    command: str
    chain: int  # tokens of the chain that the server drafts; 0: the tree of the evaluation
    other: str  # which format another server reads
    tried: str = ""  # which server ran the command with a head of this kind, and when


class Export(NamedTuple):
    """What an export was asked for."""

    format: str  # one of the algorithm's `formats`
    target: Callable[[], Target]  # opens it: not every format needs its weights
    verifier: str | None = None  # path or id under which a server finds it; None: its source's name


class ShapeFile(Protocol):
    SHAPE: type[DraftShape]
    HEAD: type[DraftingHead]  # constructed from a shape


class InitFile(Protocol):
    """Raises ConfigError for a shape that cannot be, or contradicts the head to go on with."""

    def choose_shape(
        self, section: TrainSection, target_directory: Path, contract: TargetContract
    ) -> DraftShape: ...

    def continue_shape(self, section: TrainSection, head: Any, where: str) -> DraftShape:
        """Of an earlier head, at `where`, that training goes on with."""

    def new_head(
        self,
        section: TrainSection,
        shape: Any,
        vocabulary: DraftVocabulary,
        weights: TargetWeights,
        *,
        num_layers: int,  # of the target
        seed: int,
    ) -> DraftingHead:
        """In float32."""

    def init_least_squares(
        self, section: TrainSection, head: Any, target: Target, batches: BatchesOf, seed: int
    ) -> list[str]:
        """Solve what is linear in `head`, in place; → lines for the log."""


class ObjectiveFile(Protocol):
    def trained_model(
        self,
        section: TrainSection,
        head: Any,
        embedding: Tensor,  # [V, H], the target's
        lm_head: Tensor,  # [V, H], the target's
        *,
        max_length: int,
        dtype: torch.dtype,
        seed: int,
    ) -> TrainedModel[Any]: ...


class DrafterFile(Protocol):
    """Raises HeadError where head and target do not fit, ConfigError for impossible trees."""

    def make_drafter(self, head: Any, model: DecoderModel, trees: Trees) -> Drafter:
        """With the settings that the head was trained with."""

    def drafter_factory(
        self, section: DrafterSection, head: Any, model: DecoderModel
    ) -> DrafterFactory:
        """With the settings of `section`, for any trees."""


class CheckpointFile(Protocol):
    """Raises HeadError with file, field and fix."""

    def head_config(self, shape: Any, contract: TargetContract) -> dict[str, Any]:
        """config.json of a head's directory."""

    def read_config(
        self, body: dict[str, Any], where: str, tensors: Callable[[], Mapping[str, Tensor]]
    ) -> tuple[DraftShape, Layers | None]:
        """Shape and aux layers of a config.json; `tensors()` reads the weights beside it."""

    def read_foreign(self, directory: Path) -> ForeignHead | None:
        """A head that another trainer wrote; None: it is not of this algorithm."""

    def export(self, folder: Path, head: Any, card: HeadCard, request: Export) -> None:
        """Write the head in another system's format."""


@dataclass(frozen=True)
class HeadAlgorithm:
    """One algorithm, as a registry knows it."""

    name: str  # value of train.algorithm
    architecture: str  # in config.json
    package: str  # that holds the files above
    objective: str  # its objective's file
    settings: Callable[[TrainSection], HeadSettings]
    size: Callable[[TrainSection, TargetShape], HeadSize]  # for --plan
    describe: Callable[[Any], str]  # head → "an EAGLE-3 draft head", for the model card
    #: Whether a head of `head_type` is of this algorithm, by its shape: several may share a class.
    owns: Callable[[Any], bool] = lambda _shape: True
    is_unrolled: bool = False  # a draft of γ tokens reads all of the head γ times
    drafter_name: str = ""  # value of drafter.name that drafts with such a head; "": `name`
    formats: tuple[str, ...] = ()  # that `export` writes
    #: Why a format of other algorithms has no place for such a head.
    refusals: Mapping[str, str] = field(default_factory=dict)
    #: (head, format) → fields of the head that the format's readers do not know, or misread
    unread: Callable[[Any, str], Sequence[str]] = lambda *_: ()
    #: (shape, format, target, (steps, top_k, nodes), tokens) → for the model card
    serve_command: Callable[[Any, str, str, tuple[int, int, int], int], ServeCommand | None] = (
        lambda *_: None
    )

    def __post_init__(self) -> None:
        if not self.drafter_name:
            object.__setattr__(self, "drafter_name", self.name)

    @property
    def head_type(self) -> type[DraftingHead]:
        return cast("ShapeFile", self._file("shape")).HEAD

    @property
    def shape_type(self) -> type[DraftShape]:
        return cast("ShapeFile", self._file("shape")).SHAPE

    @property
    def init(self) -> InitFile:
        return cast("InitFile", self._file("init"))

    @property
    def training(self) -> ObjectiveFile:
        return cast("ObjectiveFile", self._file(self.objective))

    @property
    def drafting(self) -> DrafterFile:
        return cast("DrafterFile", self._file("drafter"))

    @property
    def checkpoint(self) -> CheckpointFile:
        return cast("CheckpointFile", self._file("checkpoint"))

    def _file(self, name: str) -> object:
        return import_module(f"{self.package}.{name}")

    def check_format(self, format: str, *, where: str) -> None:
        """Raise HeadError for a format that has no place for such a head."""
        if format not in self.formats:
            fix = f"export with --format {self.formats[0]}" if self.formats else "use it as it is"
            problem = f"{format} has no place for a head of algorithm {self.name}"
            raise HeadError(self.refusals.get(format, problem), where=where, fix=fix)

    def check_fields(self, format: str, head: Any, *, where: str) -> None:
        """Raise HeadError where readers of a format would draft with other maths."""
        if unread := self.unread(head, format):
            problem = f"{format} has no place for {', '.join(unread)}, which this head has"
            others = [each for each in self.formats if not self.unread(head, each)]
            fix = f"export with --format {others[0]}" if others else "use it as it is"
            raise HeadError(problem, where=where, fix=fix)


def check_fixed(settings: HeadSettings, shape: DraftShape, where: str) -> None:
    """Raise ConfigError where the configuration contradicts the shape of the head at `where`.

    A default contradicts nothing.
    """
    fields = type(settings.section).model_fields
    for key, name in settings.fixed.items():
        default = fields[key].default
        requested, present = getattr(settings.section, key), getattr(shape, name, default)
        if requested not in (default, present):
            other = f"the head that training starts from has {present} ({where})"
            new = "without train.start_from a new head takes any value"
            raise ConfigError(
                f"{requested} is configured, but {other}",
                where=f"{settings.key}.{key}",
                fix=f"leave it out or set it to {present}; {new}",
            )

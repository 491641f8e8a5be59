"""A head without layers: a hidden state to which each drafted token adds (docs/heads.md)."""

from __future__ import annotations

from pydantic import Field

from pipeline.config import Section, TrainSection
from pipeline.heads.algorithm import HeadAlgorithm, HeadSettings
from pipeline.planning.heads import HeadSize
from pipeline.planning.targets import TargetShape


class ToySection(Section):
    """`train.options` of a toy head."""

    draft_vocab_size: int = Field(48, gt=0)
    """Target tokens that the head can propose."""


class ToySize(HeadSize):
    """The matrices `fc`, `token` and `lm_head`, and a norm."""

    @property
    def layer(self) -> int:
        return self.hidden**2

    @property
    def parameters(self) -> int:
        return self.fc + self.layer + self.lm_head + self.hidden


def settings(section: TrainSection) -> HeadSettings:
    options = ToySection.model_validate(section.options)
    fixed = {"draft_vocab_size": "draft_vocab_size"}
    return HeadSettings(options, "train.options", fixed, max_share=2.0, least_squares=False)


def size(section: TrainSection, target: TargetShape) -> HeadSize:
    vocabulary = ToySection.model_validate(section.options).draft_vocab_size
    return ToySize(target.hidden, 0, 0, 0, draft_vocabulary=vocabulary)


ALGORITHM = HeadAlgorithm(
    name="toy",  # value of train.algorithm
    architecture="ToyDraftModel",  # in config.json
    package=__name__,
    objective="ttt",
    settings=settings,  # train's section → HeadSettings
    size=size,  # for --plan
    describe=lambda head: "a toy head",
)

"""A head in numbers: parameters, and FLOP of its training."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import TrainSection
from pipeline.planning.targets import TargetShape


@dataclass(frozen=True)
class HeadSize:
    """A head's matrices. H hidden, I intermediate size, q and g widths of queries and of keys."""

    hidden: int  # H
    intermediate: int  # I
    queries: int  # q = heads · head size
    keys: int  # g = key/value heads · head size
    draft_vocabulary: int  # Vd
    fc_norm: bool = False

    @classmethod
    def of(cls, section: TrainSection, target: TargetShape) -> HeadSize:
        """As training would build it for `target`."""
        if section.algorithm == "dflash":
            return BlockHeadSize.of_blocks(section, target)
        asked = section.head_config
        if asked.heads > 1:
            return ChainedHeadSize.of_chain(section, target)
        return cls(
            hidden=target.hidden,
            intermediate=asked.intermediate_size or target.intermediate,
            queries=(asked.num_attention_heads or target.heads) * target.head_dim,
            keys=(asked.num_key_value_heads or target.groups) * target.head_dim,
            draft_vocabulary=asked.draft_vocab_size,
            fc_norm=asked.fc_norm,
        )

    @property
    def fc(self) -> int:
        """3H → H."""
        return 3 * self.hidden * self.hidden

    @property
    def layer(self) -> int:
        """q, k and v read 2H, o writes H; gate, up and down."""
        attention = 2 * self.hidden * (self.queries + 2 * self.keys) + self.queries * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def lm_head(self) -> int:
        return self.hidden * self.draft_vocabulary

    @property
    def parameters(self) -> int:
        """All that is trained: the matrices and four norms, seven with fc_norm."""
        norms = (7 if self.fc_norm else 4) * self.hidden
        return self.fc + self.layer + self.lm_head + norms

    def training_flops(self, steps: int, *, checkpointing: bool = False) -> int:
        """Of one supervised token: `fc` and the teacher once, all else in each of `steps` steps.

        Forward 2, backward 4 a parameter; with activation checkpointing the layer's forward twice.
        """
        step = (8 if checkpointing else 6) * self.layer + 6 * self.lm_head
        return steps * step + 6 * self.fc + 2 * self.lm_head


@dataclass(frozen=True)
class ChainedHeadSize(HeadSize):
    """Matrices of chained heads."""

    heads: int = 2
    reads_aux: bool = True

    @classmethod
    def of_chain(cls, section: TrainSection, target: TargetShape) -> ChainedHeadSize:
        """As training would build them for `target`."""
        asked = section.head_config
        return cls(
            hidden=target.hidden,
            intermediate=asked.intermediate_size or target.intermediate,
            queries=(asked.num_attention_heads or target.heads) * target.head_dim,
            keys=(asked.num_key_value_heads or target.groups) * target.head_dim,
            draft_vocabulary=asked.draft_vocab_size,
            heads=asked.heads,
            reads_aux=asked.chain_input == "aux",
        )

    @property
    def fc(self) -> int:
        """3H → H, where head 0 reads aux states."""
        return 3 * self.hidden * self.hidden * self.reads_aux

    @property
    def layer(self) -> int:
        """One of them: 2H → H before it; q, k and v read H, o writes H; gate, up and down."""
        attention = self.hidden * (self.queries + 2 * self.keys) + self.queries * self.hidden
        return 2 * self.hidden**2 + attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """The matrices and five norms a head."""
        return self.fc + self.heads * (self.layer + 5 * self.hidden) + self.lm_head


@dataclass(frozen=True)
class BlockHeadSize(HeadSize):
    """A block drafter's matrices; anchors are those of a micro-batch."""

    layers: int = 1
    head_dim: int = 64
    block: int = 8
    anchors_per_token: float = 1.0
    borrowed: bool = False  # lm_head is the target's, and not trained

    @classmethod
    def of_blocks(cls, section: TrainSection, target: TargetShape) -> BlockHeadSize:
        """As training would build it for `target`."""
        asked = section.dflash
        return cls(
            hidden=target.hidden,
            intermediate=asked.intermediate_size or target.intermediate,
            queries=(asked.num_attention_heads or target.heads) * target.head_dim,
            keys=(asked.num_key_value_heads or target.groups) * target.head_dim,
            draft_vocabulary=target.vocabulary if asked.target_lm_head else asked.draft_vocab_size,
            borrowed=asked.target_lm_head,
            layers=asked.layers,
            head_dim=target.head_dim,
            block=asked.block_size,
            anchors_per_token=min(1.0, asked.anchors / section.batch_tokens),
        )

    @property
    def layer(self) -> int:
        """All of them: q, k and v read H, o writes H; gate, up and down."""
        attention = self.hidden * (self.queries + 2 * self.keys) + self.queries * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """The matrices; two norms and those of queries and keys a layer, of context and output."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim) + 2 * self.hidden
        lm_head = 0 if self.borrowed else self.lm_head
        return self.fc + self.layer + lm_head + norms

    def training_flops(self, steps: int, *, checkpointing: bool = False) -> int:
        """Of one supervised token: `fc` and the context's keys and values, and its share of the
        blocks, each position of which has a teacher of its own."""
        del steps, checkpointing
        context = 6 * (self.fc + self.layers * 2 * self.keys * self.hidden)
        block = 6 * self.layer * self.block + (6 + 2) * self.lm_head * (self.block - 1)
        return context + round(self.anchors_per_token * block)

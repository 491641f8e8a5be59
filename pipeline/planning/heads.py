"""A head in numbers: its parameters, and the memory of one training process by ZeRO stage.

Memory is as DeepSpeed holds it for torch's AdamW. Muon holds one moment of a matrix where AdamW
holds two: the figures are then an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import TrainSection
from pipeline.planning.targets import TargetShape
from pipeline.records import ZeroMemory, ZeroStage

ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1)
#: Numbers in DeepSpeed's reduce bucket.
_BUCKET = 500_000_000
#: Logits held at one time on CUDA; learning/losses.py.
CHUNK_LOGITS = 128 << 20
#: Strengths of a ridge, and numbers that they are compared by at most; learning/least_squares.py.
RIDGE_STRENGTHS, RIDGE_COMPARED = 5, 1024


@dataclass(frozen=True)
class HeadSize:
    """A head's matrices. H hidden, I intermediate size, q and g widths of queries and of keys."""

    hidden: int  # H
    intermediate: int  # I
    queries: int  # q = heads · head size
    keys: int  # g = key/value heads · head size
    draft_vocabulary: int  # Vd
    fc_norm: bool = False
    aux_layers: int = 3  # L

    @classmethod
    def of(cls, section: TrainSection, target: TargetShape) -> HeadSize:
        """As training would build it for `target`."""
        settings = section.head_config
        return cls(
            hidden=target.hidden,
            intermediate=settings.intermediate_size or target.intermediate,
            queries=(settings.num_attention_heads or target.heads) * target.head_dim,
            keys=(settings.num_key_value_heads or target.groups) * target.head_dim,
            draft_vocabulary=settings.draft_vocab_size,
            fc_norm=settings.fc_norm,
            aux_layers=target.aux_layers,
        )

    @property
    def fc(self) -> int:
        """L·H → H."""
        return self.aux_layers * self.hidden * self.hidden

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
        """All that is trained: the matrices and four norms, with fc_norm one more an aux layer."""
        norms = (4 + self.aux_layers * self.fc_norm) * self.hidden
        return self.fc + self.layer + self.lm_head + norms


@dataclass(frozen=True)
class ChainedHeadSize(HeadSize):
    """Matrices of chained heads."""

    heads: int = 2
    reads_aux: bool = True

    @classmethod
    def of(cls, section: TrainSection, target: TargetShape) -> ChainedHeadSize:
        """As training would build them for `target`."""
        settings = section.head_config
        return cls(
            hidden=target.hidden,
            intermediate=settings.intermediate_size or target.intermediate,
            queries=(settings.num_attention_heads or target.heads) * target.head_dim,
            keys=(settings.num_key_value_heads or target.groups) * target.head_dim,
            draft_vocabulary=settings.draft_vocab_size,
            heads=settings.heads,
            reads_aux=settings.chain_input == "aux",
            aux_layers=target.aux_layers,
        )

    @property
    def fc(self) -> int:
        """L·H → H, where head 0 reads aux states."""
        return self.aux_layers * self.hidden * self.hidden * self.reads_aux

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
    vocabulary: int = 0  # the target's
    markov_rank: int = 0  # of the bias by the token before
    confidence: bool = False

    @property
    def predicted(self) -> int:
        """Tokens that a block predicts: with a Markov head, its root's position predicts too."""
        return self.block if self.markov_rank else self.block - 1

    @classmethod
    def of(cls, section: TrainSection, target: TargetShape) -> BlockHeadSize:
        """As training would build it for `target`."""
        settings = section.block
        own = settings.model_dump(include={"markov_rank", "confidence"})
        return cls(
            hidden=target.hidden,
            intermediate=settings.intermediate_size or target.intermediate,
            queries=(settings.num_attention_heads or target.heads) * target.head_dim,
            keys=(settings.num_key_value_heads or target.groups) * target.head_dim,
            draft_vocabulary=target.vocabulary
            if settings.target_lm_head
            else settings.draft_vocab_size,
            borrowed=settings.target_lm_head,
            layers=settings.layers,
            aux_layers=target.aux_layers,
            head_dim=target.head_dim,
            block=settings.block_size,
            vocabulary=target.vocabulary,
            **own,
            anchors_per_token=min(1.0, settings.anchors / section.batch_tokens),
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
        markov = self.markov_rank * (self.vocabulary + self.draft_vocabulary)
        confidence = self.confidence * (self.hidden + self.markov_rank + 1)
        return self.fc + self.layer + lm_head + norms + markov + confidence


def zero_memory(
    section: TrainSection,
    head: HeadSize,
    target: TargetShape,
    *,
    stage: ZeroStage,
    ranks: int,
    bf16: bool,
) -> ZeroMemory:
    """Of one of `ranks` processes.

    Weights, gradients and two moments of 4 bytes; in bf16 a copy of the weights and its gradients
    of 2 as well. ZeRO 1 splits the moments, and with them a second copy of the weights of 4 bytes
    and, while the optimiser steps, one of the gradients.
    """
    count, width = head.parameters, 2 if bf16 else 4
    copy = 2 if bf16 else 0
    share = count / ranks
    return ZeroMemory(
        stage=stage,
        weights=count * (4 + copy),
        gradients=count * (4 + copy),
        optimiser=round(share * 12) if stage else count * 8,
        stepping=round(share * 4) if stage else 0,
        buffers=min(count, _BUCKET) * 4 if stage else 0,
        frozen=(target.vocabulary + head.draft_vocabulary) * head.hidden * width,
        activations=activation_bytes(section, head, width=width),
    )


def activation_bytes(section: TrainSection, head: HeadSize, *, width: int) -> int:
    """Of a micro-batch, as if every token were supervised, until its backward pass is done.

    Each token and step holds: the layer's two inputs, their norms side by side (2H), queries, keys,
    values and what attention gives, the residual after it and its norm, gate, up and their
    product, the output; step k also its chain of k keys and values side by side. With activation
    checkpointing one step of these, of the others the two inputs, the output, and the keys and
    values. The loss holds three of H a token and step, a chunk of logits, and lm_head's gradient in
    float32. The backward pass holds a step's gradients, again in float32.
    """
    if isinstance(head, BlockHeadSize):
        return _block_activation_bytes(section.batch_tokens, head, width=width)
    hidden, steps, tokens = head.hidden, section.ttt_steps, section.batch_tokens
    step = 7 * hidden + 2 * head.queries + 2 * head.keys + 3 * head.intermediate
    every = steps * step + 2 * head.keys * steps * (steps - 1) // 2
    if section.activation_checkpointing:
        every = step + 2 * head.keys * (steps - 1) + steps * (3 * hidden + 2 * head.keys)
    every += steps * 2 * hidden if section.dropout else 0  # its factors, recomputed or not
    once = (head.aux_layers + 1) * hidden  # the aux states and fc's output
    loss = 3 * hidden * steps
    logits = min(CHUNK_LOGITS, tokens * steps * head.draft_vocabulary)
    saved = tokens * (every + once + loss) + logits
    return saved * width + tokens * step * 4 + 4 * head.lm_head


def _block_activation_bytes(tokens: int, head: BlockHeadSize, *, width: int) -> int:
    """Likewise of blocks, as if the micro-batch were one document.

    Each block token and layer holds its input and norms, queries, keys, values and what attention
    gives, gate, up and their product, and its scores and weights over the context; each token the
    context's state, keys and values. Every position of the loss keeps lm_head's gradient.
    """
    rows = round(tokens * head.anchors_per_token) * head.block
    scores = 2 * head.queries // head.head_dim * (tokens + head.block)
    layer = 6 * head.hidden + 3 * head.queries + 2 * head.keys + 3 * head.intermediate + scores
    context = (head.aux_layers + 2) * head.hidden + 4 * head.keys * head.layers
    logits = min(CHUNK_LOGITS, rows * head.draft_vocabulary // head.block)
    saved = rows * (layer * head.layers + 3 * head.hidden) + tokens * context + logits
    output = head.lm_head + head.markov_rank * head.draft_vocabulary
    return saved * width + 4 * output * head.predicted


def init_bytes(head: HeadSize, target: TargetShape) -> int:
    """Of least-squares initialisation.

    The embedding in the type it is stored in and in float32. Then, for the larger P of both
    regressions: sums of P by P and P by H in float32, the former factored in float64, a solution,
    and of the numbers that strengths are compared by one for each, and a block in float64.
    """
    hidden = head.hidden
    # The second regression reads the MLP, or what a block drafter's attention gives.
    second = head.queries if isinstance(head, BlockHeadSize) else head.intermediate
    most = max((head.aux_layers + 1) * hidden, second)
    sums = 12 * most**2 + 8 * most * hidden
    sums += (4 * RIDGE_STRENGTHS + 8) * most * min(hidden, RIDGE_COMPARED)
    return (2 + 4) * target.vocabulary * hidden + sums

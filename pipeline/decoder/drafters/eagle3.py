"""Drafting with an EAGLE-3 head (arXiv:2503.01840): extend on real states, then unroll on its own.

A row with L committed tokens x0…x(L-1) and root xL has L entries in the head's cache. Entry i was
made from (embedding of x(i+1), fc(aux i)) at position i:

    entry        0      1     …    L-1                 its output predicts x(L+1): depth 1
    token        x1     x2    …    xL (root)           and is kept in drafter_state
    state        g0     g1    …    g(L-1)

Draft step s = 1…steps-1 reads one token of depth s with the output that proposed it, at position
L-1+s; it sees all L entries, then its own ancestors among the drafted ones:

    entries   0 … L-1 | depth 1: k | depth 2: k | …      k beams a step, written anew every round
    bits                0 … k-1      k … 2k-1            of the mask

The head is loaded into the same form as a layer of the target, so a draft step is the operations of
`Eagle3Drafter.step`, `logits`, `propose` and `select_beams`, and nothing between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState, TokenRows
from pipeline.decoder.kv import Planes, PlaneShape
from pipeline.decoder.model import DecoderModel, fuse_layer, stored
from pipeline.decoder.ops.base import entry_slots
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack
from pipeline.decoder.tree import HEADROOM, Tree
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable
from pipeline.errors import HeadError


class Eagle3Drafter:
    """One head, and the dynamic tree."""

    def __init__(
        self,
        head: Eagle3Head,
        model: DecoderModel,
        tree: TreeSection | Mapping[int, TreeSection | None],
    ) -> None:
        """`tree` is one shape for all batches, or the shape from each batch size upward.

        Batches whose shape is None are decoded plainly. The head's weights are copied; the target's
        embedding, type, device and operations are used. Raises HeadError when head and target do
        not fit.
        """
        check_fits(head, model)
        self.ops, self.embedding, self.dtype = model.ops, model.embedding, model.dtype
        self.shape = head.shape
        self._trees = {0: tree} if isinstance(tree, TreeSection) else dict(tree)
        shapes = [shape for shape in self._trees.values() if shape is not None]
        self.depth = max((shape.steps for shape in shapes), default=0)
        self.nodes = max((self._nodes(shape) for shape in shapes), default=1)
        # A draft writes all its beams; an extension one entry more than a draft has steps.
        written = (max((each.steps - 1) * each.top_k, each.steps + 1) for each in shapes)
        self.lookahead = max(written, default=1)
        self.state: RowState | None = RowState(head.shape.hidden_size, model.dtype)
        key = head.shape.num_key_value_heads, head.shape.head_dim
        self.planes: tuple[PlaneShape, ...] = (PlaneShape(1, *key, model.dtype),)
        rotary = RotaryTable(
            self.shape.rope_config(),
            model.max_length + HEADROOM,
            device=model.device,
            dtype=model.dtype,
        )
        self._rotary = rotary.cos, rotary.sin
        self._load(head, model.device)
        #: Set to a list to record every step's logits [B, beams, Vd], root first (tests, analysis).
        self.trace: list[Tensor] | None = None

    def shape_for(self, rows: int) -> TreeSection | None:
        return self._trees[max(size for size in self._trees if size <= rows)]

    def extend(
        self,
        batch: DecodeBatch,
        planes: Planes,
        rows: TokenRows,
        tokens: Tensor,
        aux: Tensor,
        counts: Tensor,
    ) -> None:
        # Entries behind the valid ones are written too; the next round overwrites them unseen.
        metadata = batch.metadata(self._rotary, rows)
        _, hidden = self.step(tokens.clamp(min=0), self.project(aux), metadata, planes)  # [T, H]
        batch.drafter_state.copy_(hidden[rows.starts[:-1] + counts - 1])

    def draft(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Tree:
        tokens, parents, scores = self.candidates(batch, planes, shape)
        return self.ops.grow_tree(batch.roots, tokens, parents, scores, self._nodes(shape))

    def candidates(
        self, batch: DecodeBatch, planes: Planes, shape: TreeSection
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All that such a draft proposes: tokens, parents, cumulative log-probabilities [B, C].

        The first k candidates have depth 1; after them every depth has k·k, k for each of its
        beams, best first. `parents` are candidate indices, -1 for the root.
        """
        rows, k = len(batch), self._beams(shape)
        state = batch.drafter_state  # [B, H]
        score, token = self._propose(self._normed(state), rows, k)
        score, token = score[:, 0], token[:, 0]  # [B, k] of each beam
        tokens, cumulative, kept = [token], [score], []
        places, bits = self._places(batch, shape.steps - 1, k)
        hidden, lineage = state.repeat_interleave(k, dim=0), bits[0]  # [B · k, H], [B, k]
        for step, place in enumerate(places, 1):
            metadata = replace(place, mask=lineage.flatten())
            normed, hidden = self.step(token.flatten(), hidden, metadata, planes)
            gained, proposed = self._propose(normed, rows, k)  # each [B, k, k]
            tokens.append(proposed.flatten(1))
            if step == len(places):
                cumulative.append((score[:, :, None] + gained).flatten(1))
                break
            beams = self.ops.select_beams(score, gained, proposed, lineage, hidden, bits[step])
            cumulative.append(beams.total)
            kept.append(beams.best)
            score, token, lineage, hidden = beams.score, beams.token, beams.lineage, beams.hidden
        return torch.cat(tokens, 1), _parents(kept, tokens, k), torch.cat(cumulative, 1)

    def step(
        self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata, planes: Planes
    ) -> tuple[Tensor, Tensor]:
        """A pass of the head's layer over tokens [T], hidden [T, H]: what `lm_head` reads [T, H],
        and the next step's hidden [T, H]."""
        norms = self._embed_norm, self._hidden_norm, self._eps
        joined = self.ops.embed_concat(tokens, self.embedding, hidden, *norms)  # [T, 2H]
        normed, output, _ = self.ops.layers(
            self._stack, metadata, hidden, joined, planes.drafter[0]
        )
        return normed, normed if self.shape.norm_output else output

    def project(self, aux: Tensor) -> Tensor:
        """Aux states [T, 3H] → the hidden input of step 0 [T, H]."""
        if self._fc_norms:
            pairs = zip(aux.chunk(3, dim=-1), self._fc_norms, strict=True)
            normed = [self.ops.add_rms_norm(part, None, norm, self._eps)[0] for part, norm in pairs]
            aux = torch.cat(normed, dim=-1)
        return self.ops.linear(aux, self._fc)

    def logits(self, normed: Tensor) -> Tensor:
        """Normed outputs [T, H] → logits over the draft vocabulary [T, Vd]."""
        return self.ops.linear(normed, self._lm_head)

    def _load(self, head: Eagle3Head, device: torch.device) -> None:
        """Copy the head's weights into the form that the operations want."""
        weights: dict[str, Tensor] = {
            name: tensor.clone() for name, tensor in head.state_dict().items()
        }
        inside = {name.removeprefix("midlayer."): weights[name] for name in weights}

        def norm(name: str) -> Tensor:
            return weights[f"{name}.weight"].to(device, self.dtype)

        self._embed_norm = norm("midlayer.input_layernorm")
        self._hidden_norm = norm("midlayer.hidden_norm")
        self._norm, self._eps = norm("norm"), head.shape.rms_norm_eps
        layer = fuse_layer(inside, self.ops, device)
        self._stack = LayerStack((layer,), (self._norm,), self._eps, captured=())
        self._fc_norms = [norm(f"fc_norm.{part}") for part in range(3 * head.shape.fc_norm)]
        self._fc = self.ops.pack(stored(weights["fc.weight"], device))
        self._lm_head = self.ops.pack(stored(weights["lm_head.weight"], device))
        self.target_ids = head.target_ids().to(device)  # [Vd]

    def _normed(self, state: Tensor) -> Tensor:
        """What `lm_head` reads of a hidden state [B, H]."""
        if self.shape.norm_output:
            return state
        return self.ops.add_rms_norm(state, None, self._norm, self._eps)[0]

    def _propose(self, normed: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:
        """Normed outputs [B · n, H] → log-probabilities, target ids of the best k [B, n, k]."""
        logits = self.logits(normed)  # [B · n, Vd]
        if self.trace is not None:
            self.trace.append(logits.float().view(rows, -1, logits.shape[-1]))
        scores, draft_ids = self.ops.propose(logits, k)
        return scores.view(rows, -1, k), self.target_ids[draft_ids].view(rows, -1, k)

    def _places(
        self, batch: DecodeBatch, steps: int, k: int
    ) -> tuple[list[AttentionMetadata], Tensor]:
        """Metadata, but for the masks, of draft steps of k beams; bits [steps, B, k] of entries."""
        rows = len(batch)
        drafted, depths, bits, starts = _beam_constants(rows, steps, k, batch.roots.device)
        if steps == 0:
            return [], bits
        slots = entry_slots(batch.block_table, batch.seq_lens[:, None] + drafted)  # [B, W]
        slots = slots.view(rows, steps, k).transpose(0, 1).flatten(1)  # [steps, B · k]
        positions = (batch.seq_lens[:, None] + depths).expand(-1, -1, k).flatten(1)
        places = [
            AttentionMetadata(
                rotary=self._rotary,
                positions=positions[step],
                slots=slots[step],
                block_table=batch.block_table,
                seq_lens=batch.seq_lens,
                query_starts=starts,
                longest=k,
                mask=None,
            )
            for step in range(steps)
        ]
        return places, bits

    def _nodes(self, shape: TreeSection) -> int:
        """Nodes of a tree; a small draft may have fewer candidates than the budget."""
        beams = self._beams(shape)
        return min(shape.nodes, 1 + beams + (shape.steps - 1) * beams**2)

    def _beams(self, shape: TreeSection) -> int:
        return min(shape.top_k, self.shape.draft_vocab_size)


@cache
def _beam_constants(
    rows: int, steps: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `steps` draft steps of k beams a row: drafted entries [W], step by step; depths [steps, 1,
    1]; bits of the entries [steps, B, k], one step of zeros for none; where rows start [B + 1]."""
    drafted = torch.arange(steps * k, device=device)
    depths = torch.arange(steps, device=device)[:, None, None]
    bits = (1 << drafted).view(steps, 1, k).expand(-1, rows, -1).contiguous()
    if steps == 0:
        bits = torch.zeros(1, rows, k, dtype=torch.int64, device=device)
    return drafted, depths, bits, torch.arange(0, rows * k + 1, k, device=device)


def _parents(kept: list[Tensor], tokens: list[Tensor], k: int) -> Tensor:
    """The candidate [B, C] that each of `tokens` continues, -1 for the root.

    The first k continue the root, the next k · k those k, and then k · k each the kept [B, k] of
    the k · k before them.
    """
    root, first, starts = _parent_constants(len(tokens[0]), len(kept), k, tokens[0].device)
    if len(tokens) == 1:
        return root
    above = torch.stack([first, *kept], 1) + starts  # [B, steps, k]
    return torch.cat((root, above[..., None].expand(-1, -1, -1, k).flatten(1)), 1)


@cache
def _parent_constants(
    rows: int, kept: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Parents of the first k candidates [B, k]; the first beams [B, k]; and where the list of all
    candidates has those that each step's beams were chosen from [steps, 1]."""
    root = torch.full((rows, k), -1, device=device)
    first = torch.arange(k, device=device).expand(rows, -1)
    starts = torch.arange(k - k * k, k + k * k * kept, k * k, device=device)
    return root, first, starts.clamp(min=0)[:, None]


def check_fits(head: Eagle3Head, model: DecoderModel) -> None:
    """Raise HeadError where the head's shape contradicts the target's."""
    hidden = model.config.hidden_size
    for field, value, wanted in (
        ("hidden_size", head.shape.hidden_size, hidden),
        ("vocab_size", head.shape.vocab_size, model.vocabulary),
        ("aux states", head.fc.in_features, 3 * hidden),
    ):
        if value != wanted:
            raise HeadError(
                f"{field} is {value}, the target's is {wanted}",
                where="head",
                fix="use the head that was trained for this target",
            )

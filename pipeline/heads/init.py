"""How a head of any algorithm begins: shape, draft vocabulary, weights copied from the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pipeline.console import notice
from pipeline.errors import ConfigError
from pipeline.heads.base import BorrowedRows, DraftingHead, DraftShape, RmsNorm, SwiGluMlp
from pipeline.heads.rope import rope_of_target
from pipeline.learning.batches import TrainBatch
from pipeline.learning.least_squares import Ridge
from pipeline.planning.decode import MAX_CHAIN, chain_tau

Shape = TypeVar("Shape", bound=DraftShape)

#: Standard deviation of randomly started matrices, as in the Llama family.
_INIT_STD = 0.02


def shape_for(
    kind: type[Shape],
    target_config: Any,  # transformers configuration
    *,
    draft_vocab_size: int,
    intermediate_size: int | None,
    num_attention_heads: int | None,
    num_key_value_heads: int | None,
    **fields: Any,
) -> Shape:
    """A shape for a target; None takes its own value, `fields` are those of `kind` alone."""
    hidden = int(target_config.hidden_size)
    heads = int(target_config.num_attention_heads)
    return kind(
        hidden_size=hidden,
        intermediate_size=intermediate_size or int(target_config.intermediate_size),
        num_attention_heads=num_attention_heads or heads,
        num_key_value_heads=num_key_value_heads
        or int(getattr(target_config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target_config, "head_dim", None) or hidden // heads),
        vocab_size=int(target_config.vocab_size),
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=_epsilon(target_config),
        rope_parameters=_rope(target_config),
        max_position_embeddings=int(target_config.max_position_embeddings),
        **fields,
    )


def _epsilon(target_config: Any) -> float:
    """Of the target's norms; families call it differently, and some have none."""
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps")
    values = (getattr(target_config, name, None) for name in names)
    return float(next((value for value in values if value is not None), 1e-6))


def _rope(target_config: Any) -> dict[str, Any]:
    """The target's rotary parameters for a head, which is one layer of full attention on text."""
    parameters = dict(getattr(target_config, "rope_parameters", None) or {})
    parameters = dict(parameters.get("full_attention") or parameters)  # of several kinds of layer
    return rope_of_target(parameters)


@dataclass(frozen=True)
class DraftVocabulary:
    """The most frequent supervised tokens of the training data."""

    target_ids: Tensor  # [Vd] int64, ascending
    coverage: float  # share of supervised tokens that it contains

    @property
    def size(self) -> int:
        return len(self.target_ids)


def choose_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens of `counts` [V]; ties go to the lower id.

    When fewer distinct tokens were seen, the lowest unseen ids fill up.
    """
    size = min(size, len(counts))
    by_frequency = torch.sort(counts, descending=True, stable=True).indices
    chosen = by_frequency[:size].sort().values
    total = int(counts.sum())
    return DraftVocabulary(chosen, float(counts[chosen].sum()) / total if total else 0.0)


class SizedVocabulary(NamedTuple):
    """The most frequent tokens, and what they are worth on paper."""

    size: int  # Vd
    coverage: float  # of an occurrence that is left out of the counts
    speedup: float  # over plain decoding, of the fastest chain


#: Share of the covered tokens that a head of some training accepts, each given those before it.
_ACCEPTED = 0.75


def size_vocabulary(
    counts: Tensor, sizes: Iterable[int], *, target: int, layer: int, hidden: int
) -> list[SizedVocabulary]:
    """What draft vocabularies of `sizes` are worth where reading weights takes all of the time.

    counts [V] of the supervised tokens; `target` parameters of the target, `layer` those of a head
    beside its lm_head, which a chain of γ tokens reads γ times:

        S = τ · target / (target + γ · (layer + H · Vd)),   τ = 1 + α + … + α^γ,   α = 0.75 coverage

    An occurrence is covered if its token would have been chosen without it (leave-one-out): what is
    counted of the chosen tokens themselves says too much where the counts are small.
    """
    seen = counts.sort(descending=True).values
    total = max(1, int(counts.sum()))

    def coverage(size: int) -> float:
        first_out = int(seen[size]) if size < len(seen) else 0
        others = seen[:size] - 1
        # Of those that would then be as frequent as the first that is left out, half.
        stays = (others > first_out) + 0.5 * ((others == first_out) & (others > 0))
        return float((seen[:size] * stays).sum()) / total

    def speedup(covered: float, size: int, steps: int) -> float:
        tau = chain_tau(_ACCEPTED * covered, steps)
        return tau * target / (target + steps * (layer + hidden * size))

    def sized(size: int) -> SizedVocabulary:
        covered, chains = coverage(size), range(1, MAX_CHAIN + 1)
        best = max(speedup(covered, size, steps) for steps in chains)
        return SizedVocabulary(size, covered, best)

    return [sized(size) for size in sizes]


def random_init(head: DraftingHead, seed: int) -> None:
    """Normal(0, 0.02) matrices, unit norms; the same weights for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                start = torch.empty(parameter.shape)
                parameter.copy_(start.normal_(0, _INIT_STD, generator=generator))
            else:
                parameter.fill_(1.0)


#: What `init_fc` does, for people.
FC_START = "fc: identity on the high layer"


def print_start(who: str, begun: str, copied: Sequence[str]) -> None:
    """What of a new head is not random: matrices that are `begun` simply, parts of the target."""
    parts = [begun, *([f"from the target: {', '.join(copied)}"] if copied else [])]
    notice("train", f"{who} with {'; '.join(parts)}; all else is random")


def init_fc(head: DraftingHead) -> None:
    """fc starts near the identity on the high aux state, the closest to the target's output."""
    size = head.shape.hidden_size
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -size:] += torch.eye(size)


def init_lm_head(head: DraftingHead, target_lm_head: Tensor, target_final_norm: Tensor) -> None:
    """lm_head rows and final norm are the target's own, for the tokens of the draft vocabulary.

    target_lm_head [V, H], target_final_norm [H].
    """
    with torch.no_grad():
        if not isinstance(head.lm_head, BorrowedRows):
            head.lm_head.weight.copy_(target_lm_head[head.target_ids()])
        head.norm.weight.copy_(target_final_norm)


def lend_rows(head: DraftingHead, target_lm_head: Tensor) -> None:
    """Give the target's output rows [V, H] to a head that has no lm_head of its own."""
    if isinstance(head.lm_head, BorrowedRows):
        head.lm_head.weight = target_lm_head.detach().to(head.fc.weight)


def inverse_norm(weight: Tensor) -> Tensor:
    """What takes a norm's weight [H] back: 1/w, where w is next to nothing less."""
    weight = weight.float()
    epsilon = (0.05 * weight.square().mean().sqrt()).square()
    return weight / (weight.square() + epsilon)


def _norm_before_mlp(layer: Mapping[str, Tensor]) -> str:
    """What a target calls it; where it norms attention's output as well, something else."""
    sandwiched = "pre_feedforward_layernorm.weight" in layer
    return "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm"


class PlainLayer(Protocol):
    """A head's layer that reads a residual stream alone, as the target's own do."""

    input_layernorm: RmsNorm
    post_attention_layernorm: RmsNorm
    self_attn: Any  # q_proj, k_proj, v_proj and o_proj
    mlp: SwiGluMlp


def copy_plain_layer(own: PlainLayer, source: Mapping[str, Tensor]) -> list[str]:
    """Copy what fits of a target layer, named relative to it; what did."""
    pairs = {
        "input_layernorm": own.input_layernorm,
        _norm_before_mlp(source): own.post_attention_layernorm,
        **{f"self_attn.{name}_proj": getattr(own.self_attn, f"{name}_proj") for name in "qkvo"},
    }
    copied = []
    for name, module in pairs.items():
        tensor = source.get(f"{name}.weight")
        if tensor is not None and tensor.shape == module.weight.shape:
            module.weight.copy_(tensor)
            copied.append(name)
    return [*copied, *copy_mlp(own.mlp, source)]


def fold_norm(weight: Tensor, norm: Tensor, read: Tensor, head_dim: int) -> Tensor:
    """A projection [heads·d, H] with the norm of its heads in it, at their typical size.

    It reads what a norm of weight `read` [H] lets through, of root mean square 1 before it. `norm`
    is of one head [d] or of all of them [heads·d].
    """
    heads = weight.float().view(-1, head_dim, weight.shape[1])  # [heads, d, H]
    typical = (heads * read).square().sum(-1).mean(1).sqrt()[:, None, None]  # [heads, 1, 1]
    scale = norm.float().reshape(-1, head_dim, 1)
    return (heads / typical * scale).view_as(weight)


def copy_mlp(own: SwiGluMlp, layer: Mapping[str, Tensor]) -> list[str]:
    """Copy a target layer's MLP into a head's, of a wider one the neurons that write the most."""
    parts = [layer.get(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
    gate, up, down = parts  # [I, H], [I, H] and [H, I]
    width = own.down_proj.in_features
    if gate is None or up is None or down is None or down.shape[1] < width:
        return []
    output_norm = down.float().norm(dim=0) * up.float().norm(dim=1)  # [I]
    neurons = output_norm.topk(width).indices.sort().values
    own.gate_proj.weight.copy_(gate[neurons])
    own.up_proj.weight.copy_(up[neurons])
    own.down_proj.weight.copy_(down[:, neurons])
    return [f"mlp[{width} of {down.shape[1]} neurons]"]


def check_sizes(shape: DraftShape, section: str) -> None:
    """Raise ConfigError for a shape, asked for in `section`, that no head can have."""
    size, heads, groups = (
        shape.draft_vocab_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
    )
    if size > shape.vocab_size:
        problem = f"{size} is more than the target's {shape.vocab_size} tokens"
        fix = f"choose at most {shape.vocab_size}"
        raise ConfigError(problem, where=f"{section}.draft_vocab_size", fix=fix)
    if heads % groups:
        problem = f"{heads} query heads do not divide over {groups} key/value heads"
        fix = f"choose a divisor of {section}.num_attention_heads"
        raise ConfigError(problem, where=f"{section}.num_key_value_heads", fix=fix)


SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


#: The least share of its own scale that the final norm keeps, where a prediction is worth nothing.
LEAST_SURE = 0.05


#: Batches that the scale of `fc` is measured on.
SCALE_BATCHES = 8


class Fit(NamedTuple):
    """What was solved, for the log."""

    rows: int
    held_out: int  # rows of them that the shares below are of; 0: all, as none could be held out
    strength: float  # of the ridge
    explained: float  # share of y's variance that the linear part explains
    explained_by_mlp: float = 0.0  # share of the rest that the MLP explains

    @property
    def measured_on(self) -> str:
        """What the shares are of."""
        return measured_on(self.held_out)


def measured_on(held_out: int) -> str:
    """What a regression's shares are of: labels that were held out, or all."""
    return f"on {held_out:,} of them held out" if held_out else "on the same"


def fit_of(ridge: Ridge) -> Fit:
    """What the log says of a linear part."""
    return Fit(ridge.rows, ridge.held_out, ridge.strength, ridge.explained)


@torch.no_grad()
def fc_scale(head: DraftingHead, batches: Iterable[TrainBatch]) -> float:
    """Factor of the learning rate of `fc`: 1 over the root mean square of what it reads.

    The residual stream grows from layer to layer, to ten and more where all other inputs of the
    head are normed to one. A step of Adam moves every weight alike, so it would move fc's output
    that much further. Two digits, so that the order of a sum on another machine changes nothing.
    """
    if head.aux_projection is None:
        return 1.0
    device = head.aux_projection.weight.device
    plain = (batch.to(device, torch.float32) for batch in batches)
    read = torch.cat([head.normed_aux(batch.aux_states[batch.labels - 2]) for batch in plain])
    return float(f"{min(1.0, 1 / float(read.square().mean().sqrt())):.2g}")

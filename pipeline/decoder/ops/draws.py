"""What a draw takes the largest of: logits scaled, cut to top-k and top-p, and with noise.

The noise depends on a seed, a position and a token only: Philox 4x32-10 (Salmon et al. 2011). The
key is the request's seed, the counter a position and a group of four tokens, each of which takes
one of the four words:

    counter   [ position : low 32 | position : high 32 | token // 4 | 0 ]
    words     [ token 0 | token 1 | token 2 | token 3 ]      of the group

No state is carried from one draw to the next, so batches, trees and resumed runs draw the same
tokens on every device, and a kernel makes only the numbers that it needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.ops.tree import SamplingTensors

#: What drafts multiply the temperature and the noise by. Their quotient is 1 for a head that knows
#: the target's logits; it is larger for one that errs, which would propose rare tokens whose noise
#: happens to be large. Both are the larger the surer a head may be of its first choice. Measured
#: (docs/log.md).
DRAFT_TEMPERATURE, DRAFT_NOISE = 1.2, 2 / 3


def perturb(logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
    """Logits with noise, of which the largest is a draw from their distribution: float32 [B, V].

    Gumbel-max (Maddison et al. 2014, arXiv:1411.0030, §2): scaled by the temperature, -inf outside
    top-k and top-p, plus a Gumbel number for each token. No token needs another's weight, so the
    maximum is taken in any order, and in parallel. A greedy row stays as it is.
    """
    temperature = sampling.temperature[:, None]
    filtered = keep_top(logits.float() / temperature.clamp(min=1e-6), sampling)
    noisy = filtered + gumbel(sampling.seeds, positions, logits.shape[-1])
    return torch.where(temperature == 0, logits.float(), noisy)


def by_node(sampling: SamplingTensors, count: int) -> SamplingTensors:
    """What each of `count` nodes a row samples with: its row's, [B · N]."""
    by_row = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seeds
    return SamplingTensors(*(part.repeat_interleave(count) for part in by_row))


def keep_top(scaled: Tensor, sampling: SamplingTensors) -> Tensor:
    """scaled [B, V] with -inf outside top-k, then outside top-p; equals of the last kept stay."""
    if ((sampling.top_k == 0) & (sampling.top_p >= 1)).all():
        return scaled
    ordered = scaled.sort(-1, descending=True).values  # [B, V]
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    limit = torch.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1])[:, None]
    last = ordered.gather(1, (limit - 1).clamp(max=scaled.shape[-1] - 1))  # [B, 1]: k-th largest
    within_k = ordered.masked_fill(ordered < last, float("-inf"))
    total = within_k.softmax(-1).double().cumsum(-1)  # [B, V]
    # A token is kept while the mass before it is below top_p; the first one always is. Over a large
    # vocabulary float32 masses sum to 1 ± 1e-5 only, hence top_p of what they do sum to.
    before, top_p = F.pad(total[:, :-1], (1, 0)), sampling.top_p[:, None]
    inside = (((before < top_p * total[:, -1:]) | (top_p >= 1)) & (ordered >= last)) | (rank == 0)
    least = ordered.gather(1, inside.sum(-1, keepdim=True) - 1)
    return scaled.masked_fill(scaled < least, float("-inf"))


_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def random_words(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """32 random bits for each of `size` tokens: int64 [B, size], in [0, 2^32).

    seeds, positions [B] int64, not negative.
    """
    groups = torch.arange(-(-size // 4), device=seeds.device)
    return _words_of_groups(seeds, positions, groups).flatten(1)[:, :size]


def _words_of_groups(seeds: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
    """The four words [B, g, 4] of each of the groups [g] of four tokens."""
    seeds, positions = seeds[:, None], positions[:, None]
    key = [seeds & _LOW, seeds >> 32]
    group = groups.expand(len(seeds), -1)
    counter = [positions & _LOW, positions >> 32, group, torch.zeros_like(positions)]
    for _ in range(_ROUNDS):
        # Products wrap in int64, and the wrapped bits are the right ones.
        first, second = _MULTIPLIERS[0] * counter[0], _MULTIPLIERS[1] * counter[2]
        counter = [
            ((second >> 32) & _LOW) ^ counter[1] ^ key[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ counter[3] ^ key[1],
            first & _LOW,
        ]
        key = [(key[0] + _WEYL[0]) & _LOW, (key[1] + _WEYL[1]) & _LOW]
    return torch.stack(counter, dim=-1)


def gumbel(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Standard Gumbel numbers, float32 [B, size]; arguments as in `random_words`.

    -log(E) of the exponential number E = -log(1 - v), v in (0, 1) from 32 bits. What decides a draw
    are the large ones, where v is small and float32 keeps all 32 bits. The range is bounded, by
    -2.82 and 22.88, so that a token can be ruled out before its number is made.
    """
    return _gumbel_of(random_words(seeds, positions, size))


def gumbel_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The numbers [B, n] that `gumbel` has for some tokens [n]."""
    words = _words_of_groups(seeds, positions, tokens // 4)
    within = (tokens % 4).expand(len(seeds), -1)[..., None]
    return _gumbel_of(words.gather(-1, within)[..., 0])


def _gumbel_of(words: Tensor) -> Tensor:
    v = (words.float() + 0.5) * 2.0**-32
    # The largest would round to 1, and its number to minus infinity.
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0**-24)))

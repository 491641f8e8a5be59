"""Random numbers that depend on a seed, a position and a token only: Philox 4x32-10.

Salmon et al. 2011. The key is the request's seed, the counter a position and a group of four
tokens, each of which takes one of the four words:

    counter   [ position : low 32 | position : high 32 | token // 4 | 0 ]
    words     [ token 0 | token 1 | token 2 | token 3 ]      of the group

Nothing is carried from one draw to the next and no number is made in an order, so batches, trees
and resumed runs draw the same ones, on every device, and a kernel makes those it needs where it
needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def random_words(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """32 random bits for each of `size` tokens: int64 [B, size], in [0, 2^32).

    seeds, positions [B] int64, not negative.
    """
    seeds, positions = seeds[:, None], positions[:, None]
    key = [seeds & _LOW, seeds >> 32]
    group = torch.arange(-(-size // 4), device=seeds.device).expand(len(seeds), -1)
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
    return torch.stack(counter, dim=-1).flatten(1)[:, :size]


def gumbel(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Standard Gumbel numbers, float32 [B, size]; arguments as in `random_words`.

    -log(E) of the exponential number E = -log(1 - v), v in (0, 1) from 32 bits. What decides a draw
    are the large ones, where v is small and float32 keeps all 32 bits. The range is bounded, by
    -2.82 and 22.88, so that a token can be ruled out before its number is made.
    """
    v = (random_words(seeds, positions, size).float() + 0.5) * 2.0**-32
    # The largest would round to 1, and its number to minus infinity.
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0**-24)))

"""Random numbers that depend on a seed and a position only: Philox 4x32-10 (Salmon et al. 2011).

The counter is the token's position, the key the request's seed. Nothing is carried from one draw to
the next, so batches, trees and resumed runs draw the same numbers, on every device.
"""

from __future__ import annotations

from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) with 24 random bits, float32; seeds, positions int64, not negative."""
    key = [seeds & _LOW, (seeds >> 32) & _LOW]
    zero = positions * 0
    counter = [positions & _LOW, (positions >> 32) & _LOW, zero, zero]
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
    return (counter[0] >> 8).float() * 2.0**-24

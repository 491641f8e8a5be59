"""What training may expect of these samples, for the datasheet: how many tokens, how large their
states, and how much a draft vocabulary will cover.

Coverage is measured as training will meet it: on replies that had no part in choosing.

    samples of up to 16 shards    0  1  2  3  4  5 …
    choose the V most frequent    ·     ·     ·        of the generated tokens
    cover                            ·     ·     ·     share of theirs that is among them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from pipeline.records import Sample, Shard, TargetContract
from pipeline.store.encodings import Encoding, row_width
from pipeline.store.location import Location
from pipeline.store.samples import read_samples

_SIZES = (4096, 8192, 16384, 32768, 65536)
_ENCODINGS: tuple[Encoding, ...] = ("int8", "bf16")
#: Shards that are read, evenly spaced: the datasheet of 100,000 may not take hours.
_SHARDS = 16


def forecast(
    contract: TargetContract, location: Location, shards: Sequence[Shard], *, supervised: int
) -> dict[str, Any]:
    """From the stage at `location` with these committed `shards` of `supervised` tokens in all."""
    filled = [shard for shard in shards if shard.rows]
    read = filled[:: -(-len(filled) // _SHARDS)]
    samples = chain.from_iterable(read_samples(location, shard) for shard in read)
    chosen_from, covered = _halves(samples)
    tokens = sum(shard.tokens for shard in filled)
    return {
        "tokens": tokens,
        "supervised_tokens": supervised,
        "states_bytes": {
            encoding: _states_bytes(contract, encoding, tokens, supervised)
            for encoding in _ENCODINGS
        },
        "shards_read": len(read),
        "distinct_tokens": len({*chosen_from, *covered}),
        "coverage": _coverage(chosen_from, covered, contract.vocab_size),
    }


def _halves(samples: Iterable[Sample]) -> tuple[Counter[int], Counter[int]]:
    """How often each generated token occurs, in every other sample and in the others."""
    halves: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for number, sample in enumerate(samples):
        for span in sample.supervised:
            halves[number % 2].update(sample.token_ids[span.start : span.end])
    return halves


def _coverage(
    chosen_from: Counter[int], covered: Mapping[int, int], vocabulary: int
) -> dict[str, float]:
    """Draft vocabulary size → share of tokens; nothing where there is one sample alone.

    The last size is the first that holds every token of the half that chooses.
    """
    ranked = [
        token for token, _ in sorted(chosen_from.items(), key=lambda item: (-item[1], item[0]))
    ]
    total = sum(covered.values())
    if not total:
        return {}
    sizes = [size for size in _SIZES if size < vocabulary]
    enough = sum(size < len(ranked) for size in sizes) + 1
    return {
        str(size): round(sum(covered.get(token, 0) for token in ranked[:size]) / total, 6)
        for size in sizes[:enough]
    }


def _states_bytes(
    contract: TargetContract, encoding: Encoding, tokens: int, supervised: int
) -> int:
    """Of the aux states of each token and the final state of each supervised one."""
    layers = len(contract.capture_layers)
    aux, final = (row_width(encoding, contract.hidden_size, count) for count in (layers, 1))
    return (tokens * aux + supervised * final) * (2 if encoding == "bf16" else 1)

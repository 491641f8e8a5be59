"""Small states samples for the tests of their format."""

from __future__ import annotations

import torch

from pipeline.config import RunConfig
from pipeline.records import Shard
from pipeline.store.location import Location
from pipeline.store.stage_run import open_stage
from pipeline.store.states import StatesSample, teacher_positions

H = 4


def make_states(
    index: int,
    length: int,
    supervised: range,
    *,
    everything: bool = False,
    hidden: int = H,
    alternatives: int = 0,
) -> StatesSample:
    """Random states; channel 1 is a hundred times larger than the others, as in real targets."""
    draw = torch.Generator().manual_seed(index)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[supervised.start : supervised.stop] = 1
    positions = teacher_positions(mask, length - 1 if everything else None)
    aux, final = (
        torch.randn(length, 3, hidden, generator=draw),
        torch.randn(len(positions), hidden, generator=draw),
    )
    aux[..., 1] *= 100
    others = torch.randn(len(positions), alternatives * hidden, generator=draw).bfloat16()
    ids = torch.randint(0, 60, (len(positions), alternatives), generator=draw, dtype=torch.int32)
    return StatesSample(
        sample_id=f"s{index}",
        source="unit",
        token_ids=torch.randint(0, 60, (length,), generator=draw, dtype=torch.int32),
        supervised_mask=mask,
        aux_states=aux.flatten(1).bfloat16(),
        final_states=final.bfloat16(),
        final_positions=positions,
        alternative_ids=ids if alternatives else None,
        alternative_states=others if alternatives else None,
    )


def three_samples(alternatives: int = 0) -> list[StatesSample]:
    """7, 1 and 12 tokens; the second has no final state."""
    return [
        make_states(0, 7, range(3, 7), alternatives=alternatives),
        make_states(1, 1, range(0, 0), alternatives=alternatives),
        make_states(2, 12, range(2, 6), alternatives=alternatives),
    ]


def commit(config: RunConfig, data: bytes) -> tuple[Location, Shard]:
    """`data` as the one shard of a features stage."""
    work = open_stage(config, "features", None)
    return work.location, work.commit("00000.safetensors", data, rows=3, tokens=20)

"""fp8 and int8 rows: error bounds, outliers, extremes, and one formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.errors import DataError
from pipeline.store.encodings import Codec, Encoding, calibrate
from pipeline.store.states import StatesSample, encode_states, teacher_positions

H = 48


def outlier_states(tokens: int = 400) -> Tensor:
    """bf16 [T, 3H] as real residual streams are.

    A few channels are far above the rest, and the first token is far above all.
    """
    states = torch.randn(tokens, 3, H, generator=torch.Generator().manual_seed(3))
    states[:, :, 5] *= 60
    states[:, :, 17] *= 200
    states[0, 1:] *= 5000
    return states.flatten(1).bfloat16()


def coded(encoding: Encoding, aux: Tensor) -> Tensor:
    """aux through the rows and back, float32 [T, 3, H]."""
    codec = calibrate(encoding, aux, aux[:, :H])
    return codec.decode_aux(codec.encode_aux(aux)).float().view(-1, 3, H)


def error_of_ordinary_channels(found: Tensor, states: Tensor) -> Tensor:
    """Relative error of each token and layer without the two outlier channels, [T, 3]."""
    ordinary = [channel for channel in range(H) if channel not in (5, 17)]
    exact = states.float().view(-1, 3, H)
    error: Tensor = (found - exact)[..., ordinary].norm(dim=2) / exact[..., ordinary].norm(dim=2)
    return error


def test_bf16_is_exact() -> None:
    states = outlier_states()
    assert torch.equal(coded("bf16", states).flatten(1), states.float())


def test_small_encodings_keep_ordinary_channels_beside_outliers() -> None:
    states = outlier_states()
    assert error_of_ordinary_channels(coded("int8", states), states).max() < 0.02
    assert error_of_ordinary_channels(coded("fp8", states), states).max() < 0.04
    # Planted: one scale a token and none a channel is what an int8 row cannot do.
    plain = Codec("int8", torch.ones(4, H, dtype=torch.bfloat16))
    found = plain.decode_aux(plain.encode_aux(states)).float().view(-1, 3, H)
    assert error_of_ordinary_channels(found, states).median() > 0.2


def test_a_first_token_far_above_all_others_costs_them_nothing() -> None:
    """The channel scale is a percentile: the same rows decode alike with and without that token."""
    states = outlier_states()
    with_first, without = (
        error_of_ordinary_channels(coded("int8", states), states)[1:],
        error_of_ordinary_channels(coded("int8", states[1:]), states[1:]),
    )
    assert abs(float(with_first.mean() - without.mean())) < 0.001


@pytest.mark.parametrize("rows", range(1, 10))
def test_a_shard_of_few_rows_is_as_exact(rows: int) -> None:
    """Final states, whose channels differ much between tokens."""
    draw = torch.Generator().manual_seed(rows)
    final = torch.randn(rows, 576, generator=draw) * torch.randn(576, generator=draw).exp()
    final = final.bfloat16()
    codec = calibrate("int8", final.repeat(1, 3), final)
    found = codec.decode_final(codec.encode_final(final)).float()
    assert ((found - final.float()).norm(dim=1) < 0.04 * final.float().norm(dim=1)).all()


@pytest.mark.parametrize(("encoding", "steps"), [("int8", 127.0), ("fp8", 448.0)])
def test_the_scale_is_the_smallest_that_clips_nothing(encoding: Encoding, steps: float) -> None:
    """value · 2^(code/4) · channel: a layer's largest value uses 5/6 of the range to all of it."""
    states = outlier_states()
    codec = calibrate(encoding, states, states[:, :H])
    rows = codec.encode_aux(states)
    codes = rows[:, 3 * H :].contiguous().view(torch.int8)
    channels = codec.channels[:3].float() if codec.channels is not None else torch.ones(3, H)
    largest = (states.float().view(-1, 3, H) / channels).abs().amax(2)
    used = largest / torch.exp2(codes.float() / 4) / steps
    assert used.max() <= 1 + 1e-5 and used.min() > 2**-0.25 - 1e-5


def test_extremes() -> None:
    """Rows of zeros, tiny and huge values, a channel without any value."""
    aux = torch.randn(64, 3 * H, generator=torch.Generator().manual_seed(0))
    aux[:, 7] = 0
    aux[3] = 0
    aux[4] *= 1e-6
    aux[5] *= 1e6
    for encoding in ("fp8", "int8"):
        found = coded(encoding, aux.bfloat16()).flatten(1)
        assert found.isfinite().all() and (found[3] == 0).all() and (found[:, 7] == 0).all()
        for row in (4, 5, 6):
            assert (found[row] - aux[row]).norm() / aux[row].norm() < 0.04


def test_what_has_no_scale_code_is_refused_with_its_sample() -> None:
    mask = torch.tensor([0, 1, 1], dtype=torch.uint8)
    samples = [
        StatesSample(
            name,
            "unit",
            torch.arange(3, dtype=torch.int32),
            mask,
            torch.ones(3, 12).bfloat16(),
            torch.ones(2, 4).bfloat16(),
            teacher_positions(mask),
        )
        for name in ("a", "b", "c")
    ]
    encode_states(samples, "int8")
    samples[1].aux_states[2, 5] = 1e30
    with pytest.raises(
        DataError,
        match=r"sample b of unit: has states that are too large for int8 "
        r"\(fix: set features.encoding=bf16\)",
    ):
        encode_states(samples, "int8")
    encode_states(samples, "bf16")


def test_blocks_do_not_show() -> None:
    """Rows are worked on 256 at a time; each comes out as it does alone."""
    states = outlier_states(700)
    for encoding in ("fp8", "int8"):
        codec = calibrate(encoding, states, states[:, :H])
        rows = codec.encode_aux(states)
        for row in (0, 255, 256, 699):
            assert torch.equal(codec.encode_aux(states[row : row + 1])[0], rows[row])
        assert torch.equal(codec.decode_aux(rows[300:301])[0], codec.decode_aux(rows)[300])


def test_no_final_states_are_no_problem() -> None:
    empty = torch.empty(0, H, dtype=torch.bfloat16)
    codec = calibrate("int8", outlier_states(), empty)
    assert codec.decode_final(codec.encode_final(empty)).shape == (0, H)

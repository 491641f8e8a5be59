"""Capture: any decoder, any packing, layers on several devices, a check that sees bad packing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import FeaturesSection, RunConfig, TargetSection
from pipeline.errors import DataError, OutOfMemory
from pipeline.features.capture import LocalStates, capture_shard, chosen_for_check
from pipeline.features.stage import run
from pipeline.records import Sample
from pipeline.store.manifest import stage_location
from pipeline.target.forward import (
    PACKED_ATTENTION,
    LoadedTarget,
    capture_states,
    register_packed_attention,
)
from pipeline.target.open import open_target
from tests.target.families import save_family


def load(directory: Path, **options: Any) -> LoadedTarget:
    return open_target(TargetSection(source=str(directory), device="cpu", dtype="float32")).load(
        attention=register_packed_attention(), **options
    )


def section(batch_tokens: int, tolerance: float = 64) -> FeaturesSection:
    return FeaturesSection(batch_tokens=batch_tokens, self_check_tolerance=tolerance)


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 96, (length,), generator=draw).tolist() for length in (5, 23, 9, 40)]


def test_layers_on_several_devices_end_on_one(tmp_path: Path, tiny_target: Path) -> None:
    """A device map as for several GPUs, with the one device that this machine has."""
    directory = save_family("llama", tmp_path, tiny_target)
    parts = "model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"
    names = dict.fromkeys([*parts, *(f"model.layers.{index}" for index in range(8))], "cpu")
    spread = load(directory, device_map=names)
    assert spread.device == torch.device("cpu")
    for mine, theirs in zip(
        capture_states(spread, documents()),
        capture_states(load(directory), documents()),
        strict=True,
    ):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


def test_the_order_of_samples_and_the_packing_do_not_show(
    tiny_target: Path, samples: list[Sample]
) -> None:
    target = load(tiny_target)
    packed, alone = (
        capture_shard(
            LocalStates(target), samples, section(budget), lambda tokens: None, name="a"
        ).states
        for budget in (200, 1)
    )
    assert (
        [state.sample_id for state in packed]
        == [state.sample_id for state in alone]
        == [sample.sample_id for sample in samples]
    )
    for mine, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(mine.aux_states, theirs.aux_states, rtol=2**-7, atol=1e-3)
        assert torch.equal(mine.token_ids, theirs.token_ids)


def out_of_memory_above(target: LoadedTarget, tokens: int, attempts: list[int]) -> Any:
    """A target whose forwards of more tokens fail, as on a device that holds no more."""

    def refuse(_module: Any, _inputs: Any, keywords: dict[str, Any]) -> None:
        attempts.append(keywords["input_ids"].numel())
        if attempts[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    return target.model.get_decoder().register_forward_pre_hook(refuse, with_kwargs=True)


def test_a_forward_for_which_memory_runs_out_is_computed_in_halves(
    tiny_target: Path, samples: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    target, advanced, attempts = load(tiny_target), list[int](), list[int]()
    expected = capture_shard(
        LocalStates(target), samples, section(200), lambda tokens: None, name="a"
    ).states
    total = sum(len(sample.token_ids) for sample in samples)
    assert total > 200, "several forwards"
    hook = out_of_memory_above(target, 150, attempts)
    halved = capture_shard(
        LocalStates(target), samples, section(200), advanced.append, name="a"
    ).states
    hook.remove()
    assert attempts[0] > 150 and max(attempts[1:]) <= 150, "one forward failed, no later one"
    assert sum(advanced) == total, "every token once"
    assert capsys.readouterr().out.count("out of memory with features.batch_tokens=200") == 1
    for mine, theirs in zip(halved, expected, strict=True):
        torch.testing.assert_close(mine.aux_states, theirs.aux_states, rtol=2**-7, atol=1e-3)
        assert mine.sample_id == theirs.sample_id
        assert torch.equal(mine.final_positions, theirs.final_positions)


@pytest.mark.parametrize(("budget", "failed"), [(200, 2), (1, 1)])
def test_memory_that_runs_out_for_half_a_forward_ends_the_stage(
    budget: int, failed: int, tiny_target: Path, samples: list[Sample]
) -> None:
    target, attempts = load(tiny_target), list[int]()
    out_of_memory_above(target, 20, attempts)
    expected = rf"features\.batch_tokens={budget}: out of memory.*CUDA out of memory"
    with pytest.raises(OutOfMemory, match=expected) as caught:
        capture_shard(LocalStates(target), samples, section(budget), lambda tokens: None, name="a")
    assert len(attempts) == failed and caught.value.exit_code == 75


def test_a_document_that_sees_its_neighbour_is_found(
    tiny_target: Path, samples: list[Sample]
) -> None:
    """The bug of a wrong mask, planted: attention over the whole packed row."""
    from transformers import AttentionInterface

    def leaking(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None

    target = load(tiny_target)
    lengths = [len(sample.token_ids) for sample in samples]
    # The longest is the first in the row, which sees no other.
    chosen = ((name, chosen_for_check(name, len(samples))) for name in map(str, range(9)))
    name, number = next(pair for pair in chosen if lengths[pair[1]] < max(lengths))
    capture = partial(
        capture_shard, LocalStates(target), samples, advance=lambda tokens: None, name=name
    )
    AttentionInterface.register(PACKED_ATTENTION, leaking)
    try:
        with pytest.raises(
            DataError,
            match=rf"sample {samples[number].sample_id} of unit: layer 1 differs by .* "
            "where 7.63e-06 is allowed in torch.float32",
        ):
            capture(section(1000))
        assert len(capture(section(1000, tolerance=0)).states) == len(samples)
    finally:
        register_packed_attention()


def test_the_sample_that_is_checked_differs_from_shard_to_shard() -> None:
    chosen = [chosen_for_check(f"{index:05d}.safetensors", 50) for index in range(40)]
    assert chosen == [chosen_for_check(f"{index:05d}.safetensors", 50) for index in range(40)]
    assert len(set(chosen)) > 20 and min(chosen) >= 0 and max(chosen) < 50


def test_a_failed_write_stops_the_stage_and_a_re_run_ends_with_the_same_bytes(
    tmp_path: Path, ready: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third commit fails in the background thread: the first two stay, no later one is made."""
    from pipeline.store.stage_run import StageRun

    whole, broken = (ready(tmp_path / name, shard_tokens=1) for name in ("whole", "broken"))
    commit, names = StageRun.commit, []

    def failing(self: StageRun, name: str, data: bytes, **counts: Any) -> Any:
        names.append(name)
        if len(names) == 3:
            raise OSError("the disk is gone")
        return commit(self, name, data, **counts)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "commit", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            run(broken)
    assert names == [f"000000-00{number}.safetensors" for number in range(3)]
    assert sorted(
        name
        for name in stage_location(broken.run.uri, "features").child("shards").names()
        if name.endswith(".entry.json")
    ) == [f"{name}.entry.json" for name in names[:2]]
    assert run(broken).content_hash == run(whole).content_hash

"""The bench of trainers: how they take turns, and what its ratios are of."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch

from bench.leaderboard.experiment import Experiment, PeerSettings
from bench.leaderboard.peers import train_peer, write_samples
from bench.peers.__main__ import _floors, _ratios, _Turns
from bench.peers.samples import Samples
from pipeline.config import RunConfig
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from pipeline.records import Manifest
from pipeline.store.states import StatesSample
from pipeline.target.open import open_target
from pipeline.target.weights import TargetWeights
from tests.heads.conftest import logits_of

#: Has what bench/peers/requirements.txt names.
PYTHON = os.environ.get("EAGLE3_SPECFORGE_PYTHON")


def test_a_trainer_performs_a_step_whenever_it_is_asked() -> None:
    ours = _Turns("ours", "float32", sys.executable, threads=1)
    ours.step()
    ours.step()
    assert all(step["seconds"] > 0 and step["cpu_seconds"] > 0 for step in ours.steps)
    assert len(ours.steps) == 2 and 0.3 < ours.end() < 30


def test_a_trainer_that_cannot_start_is_named() -> None:
    with pytest.raises(SystemExit, match="specforge in float32 ended with 1"):
        _Turns("specforge", "float32", sys.executable, threads=1)


def test_ratios_are_of_each_trainers_better_type() -> None:
    """Here the peers' better types are fp32 and bf16, and each is the best peer once."""
    rows = {
        "ours.bfloat16": (400, 200, 1.0),
        "ours.float32": (900, 100, 9.0),
        "specforge.bfloat16": (1, 1, 1.0),
        "specforge.float32": (50, 80, 4.0),
        "speculators.bfloat16": (100, 40, 5.0),
        "speculators.float32": (1000, 30, 0.1),
    }
    names = "tokens_per_second", "tokens_per_cpu_second", "peak_gb"
    figures = {
        f"{row}.{name}": value
        for row, values in rows.items()
        for name, value in zip(names, values, strict=True)
    }
    figures |= {f"floor.{name}.tokens_per_cpu_second": 500 for name in ("bfloat16", "float32")}
    assert _ratios(figures, ["ours", "specforge", "speculators"]) == {
        "tokens_per_second_vs_peers": 4.0,
        "tokens_per_cpu_second_vs_peers": 2.5,
        "peak_gb_vs_peers": 0.25,
        "floor_share": 0.4,
        "floor_vs_peers": 6.25,
    }
    assert _ratios(figures, ["ours"]) == {}


def test_the_floor_counts_the_products_that_labels_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 512 tokens pass fc, and step 0's keys and values; 368 labels pass the rest, each step."""
    monkeypatch.setattr("bench.peers.__main__.matmul_rate", lambda *_, **__: 1e12)
    fc, keys_values, others = 3 * 576**2, 2 * 1152 * 192, (1152 + 576) * 576 + 3 * 1536 * 576
    every_step = keys_values + others + 8192 * 576
    products = (fc + keys_values) * 512 + (7 * every_step - keys_values) * 368
    expected = pytest.approx(1e12 / 2 / (6 * products / 512), rel=1e-3)  # but for the norms
    assert _floors(threads=2) == {
        "floor.bfloat16.tokens_per_cpu_second": expected,
        "floor.float32.tokens_per_cpu_second": expected,
    }


def test_peers_learn_from_the_samples_that_we_draw(
    tiny_config: Callable[..., RunConfig],
    store_states: Callable[..., Manifest],
    states: list[StatesSample],
    tmp_path: Path,
) -> None:
    """Whole ones, in batches of whole ones, each once a pass; its final state names a next token
    that the target drew greedily."""
    config = tiny_config(data_tokens=150, batch_tokens=16)
    store_states(config)
    path = tmp_path / "samples.safetensors"
    tokens = write_samples(config, open_target(config.target), path)
    samples = Samples(path)
    assert 150 <= tokens < 150 + 40 and len(samples) < len(states)
    by_ids = {tuple(sample.token_ids.tolist()): sample for sample in states}
    for index in range(len(samples)):
        drawn = samples[index]
        stored = by_ids.pop(tuple(drawn.token_ids.tolist()))
        assert torch.equal(drawn.supervised, stored.supervised_mask.long())
        assert torch.equal(drawn.aux_states, stored.aux_states)
        taught = drawn.supervised[1:].bool()
        logits = (drawn.final_states.float() @ samples.lm_head.float().T)[:-1][taught]
        said = logits.gather(1, drawn.token_ids[1:][taught, None])
        # The target drew in bfloat16, which does not tell logits apart that are so near.
        assert (logits.amax(1, keepdim=True) - said).max() < logits.max() / 64
    t2d, d2t = samples.marks()
    assert int(t2d.sum()) == 48 and torch.equal(torch.arange(48) + d2t, t2d.nonzero().flatten())
    for size in (0, 60, 1000):
        batches = list(samples.batches(size, seed=1))
        assert sorted(chain(*batches)) == list(range(len(samples)))
        for batch in batches:
            length = sum(len(samples[index].token_ids) for index in batch)
            assert len(batch) == 1 or length <= size
    assert list(samples.batches(60, seed=1)) != list(samples.batches(60, seed=2))


@pytest.mark.skipif(not PYTHON, reason="EAGLE3_SPECFORGE_PYTHON names no interpreter of peers")
@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
def test_a_head_that_a_peer_trained_predicts_what_it_has_learnt(
    trainer: str,
    tiny_config: Callable[..., RunConfig],
    store_states: Callable[..., Manifest],
    states: list[StatesSample],
    target_directory: Path,
) -> None:
    """Through our import: its first guesses on the samples that it saw many times, where a guess at
    the token before or after would be right hardly ever."""
    config = tiny_config(head={"draft_vocab_size": 96}, data_tokens=10_000)
    store_states(config)
    settings = PeerSettings.model_validate(
        {"trainer": trainer, "rate": 1e-2, "passes": 60, "steps": 2, "decay": 0.8}
    )
    experiment = Experiment(name="peer", about="A peer.", peer=settings)
    trained = train_peer(config, experiment, Path(str(PYTHON)))
    assert (
        trained.trained_tokens
        == 60 * trained.data_tokens
        == 60 * sum(len(sample.token_ids) for sample in states)
    )
    head, _ = load_head(Path(config.run.uri) / "head")
    assert isinstance(head, Eagle3Head)
    right = total = 0
    embedding = TargetWeights(target_directory).embedding().float()
    for sample in states:
        tokens, aux = sample.token_ids.long(), sample.aux_states.float()
        with torch.no_grad():
            [logits] = logits_of(head.float(), embedding, tokens, aux, steps=1)
        guesses = head.target_ids()[logits.argmax(-1)]  # at t: token t + 2
        taught = sample.supervised_mask[2:].bool()
        right += int((guesses[: len(tokens) - 2] == tokens[2:])[taught].sum())
        total += int(taught.sum())
    assert right > 0.7 * total, f"{right} of {total}"

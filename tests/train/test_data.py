"""Survey, cutting, packing, order and the batches that come of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import TrainSection
from pipeline.errors import CorruptShard, DataError
from pipeline.heads.init import DraftVocabulary, choose_vocabulary
from pipeline.heads.registry import algorithm
from pipeline.learning.batches import AHEAD, ReadAhead, Schedule, read_batch, shards_together
from pipeline.learning.corpus import HeldOut, Piece, Survey, draw_samples, survey
from pipeline.store.states import StatesRows, StatesSample, teacher_positions
from pipeline.train.loop import own_batches
from pipeline.train.prepare import (
    HeadInit,
    audit_mask,
    coverage_by_source,
    log_coverage,
    log_vocabulary_sizes,
    show_sample,
)
from pipeline.train.stage import run
from tests.train.memory_corpus import MemoryCorpus
from tests.train.runs import Configure, Store


def sample(
    length: int,
    supervised: Sequence[int],
    name: str = "s",
    source: str = "test",
    *,
    everything: bool = False,
) -> StatesSample:
    """Aux and final states hold their own position, so that a row can be recognised."""
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[list(supervised)] = 1
    positions = teacher_positions(mask, length - 1 if everything else None)
    at = torch.arange(length, dtype=torch.bfloat16)[:, None]
    return StatesSample(
        name,
        source,
        torch.arange(length, dtype=torch.int32),
        mask,
        at.repeat(1, 6),
        at[positions.long()].repeat(1, 2),
        positions,
    )


def test_survey_counts_tokens_and_reasons() -> None:
    corpus = MemoryCorpus(
        [sample(8, [3, 4, 5]), sample(6, [])], [sample(5, [1]), sample(25, range(20, 25))]
    )
    surveyed = survey(corpus, vocab_size=30, budget=10)
    assert (surveyed.samples, surveyed.tokens, surveyed.supervised, surveyed.split) == (4, 44, 9, 1)
    # A token that no position can predict teaches nothing; the long sample's first two pieces hold
    # only prompt.
    assert surveyed.rejected == {"no_supervised_tokens": 2, "piece_without_supervised_tokens": 2}
    assert surveyed.pieces == (Piece(0, 0, 0, 8), Piece(1, 1, 16, 25))
    assert surveyed.counts["test"].nonzero().flatten().tolist() == [1, 3, 4, 5, 20, 21, 22, 23, 24]


def test_vocabulary_covers_the_supervised_tokens() -> None:
    corpus = MemoryCorpus([sample(10, [3, 4, 5]), sample(10, [4, 5]), sample(10, [5, 9])])
    vocabulary = choose_vocabulary(survey(corpus, vocab_size=10, budget=10).counts["test"], 2)
    assert vocabulary.target_ids.tolist() == [4, 5]
    assert vocabulary.coverage == pytest.approx(5 / 7)


def test_long_sample_is_cut_without_losing_a_token() -> None:
    long = sample(23, range(5, 23), "long")
    corpus = MemoryCorpus([long])
    surveyed = survey(corpus, vocab_size=30, budget=10)
    assert surveyed.split == 1 and sum(piece.length for piece in surveyed.pieces) == 23
    assert surveyed.pieces == (Piece(0, 0, 0, 7), Piece(0, 0, 7, 15), Piece(0, 0, 15, 23))
    for piece in surveyed.pieces:
        part = corpus.read(piece, corpus.new_rows(piece, piece.stop, piece.length))
        assert part.token_ids.tolist() == list(range(piece.stop)), "with its past"
        assert part.final_states[:, 0].tolist() == part.final_positions.tolist()
    batch = read_batch(corpus, surveyed.pieces)
    assert (batch.lengths, batch.pasts) == ((7, 15, 23), (0, 7, 15))
    assert (batch.tokens, batch.trained_tokens) == (45, 23)
    # Each label once; its teacher stands one position before it.
    assert batch.depths.tolist() == list(range(5, 23))
    assert batch.token_ids[batch.labels].tolist() == batch.depths.tolist()
    assert batch.teacher_states[:, 0].tolist() == (batch.depths - 1).tolist()
    assert batch.trained(batch.aux_states)[:, 0].tolist() == list(range(23))


def test_prompts_teach_where_their_final_states_are_stored() -> None:
    """Every token but the first two of a piece is a label; the vocabulary is that of replies."""
    corpus = MemoryCorpus([sample(23, range(18, 23), everything=True), sample(8, [5, 6])])
    surveyed = survey(corpus, vocab_size=30, budget=10)
    assert [piece.length for piece in surveyed.pieces] == [7, 8, 8, 8]
    assert surveyed.rejected == {} and surveyed.supervised == 7
    assert surveyed.counts["test"].nonzero().flatten().tolist() == [5, 6, 18, 19, 20, 21, 22]
    batch = read_batch(corpus, surveyed.pieces)
    assert batch.depths.tolist() == [*range(2, 23), 5, 6]
    assert batch.teacher_states[:, 0].tolist() == (batch.token_ids[batch.labels] - 1).tolist()


def test_long_sample_is_dropped_and_counted() -> None:
    corpus = MemoryCorpus([sample(23, range(5, 23)), sample(10, [4, 5])])
    surveyed = survey(corpus, vocab_size=30, budget=10, long_samples="drop")
    assert surveyed.pieces == (Piece(0, 1, 0, 10),) and surveyed.rejected == {
        "longer_than_batch": 1
    }
    assert (surveyed.samples, surveyed.tokens, surveyed.supervised, surveyed.split) == (1, 10, 2, 0)
    nothing = survey(
        MemoryCorpus([sample(23, range(5, 23))]), vocab_size=30, budget=10, long_samples="drop"
    )
    with pytest.raises(DataError, match="longer_than_batch 1") as caught:
        audit_mask(nothing, where="states")
    assert "train.long_samples=split" in caught.value.fix


def test_samples_are_drawn_until_they_have_so_many_tokens() -> None:
    """By the seed alone; a larger draw holds a smaller one, and what is held out is in neither."""
    corpus = MemoryCorpus(*[[sample(10, [5]), sample(10, [6])] for _ in range(5)])
    held_out = HeldOut(2, 1, "held out", (1, 2))

    def draw(tokens: int, seed: int = 0) -> set[tuple[int, int]]:
        return draw_samples(corpus, tokens, seed=seed, held_out=[held_out])

    assert len(draw(30)) == 3 and len(draw(31)) == 4 and len(draw(1000)) == 9
    assert draw(30) < draw(60) and (2, 1) not in draw(1000)
    assert draw(40) != draw(40, seed=1)
    surveyed = survey(corpus, vocab_size=50, budget=20, held_out=[held_out], drawn=draw(30))
    assert (surveyed.samples, surveyed.tokens) == (3, 30)
    assert surveyed.rejected == {"held_out": 1, "beyond_data_tokens": 6}


def test_what_is_dropped_for_its_length_is_not_drawn(
    tiny_config: Configure, store_states: Store, states: list[StatesSample]
) -> None:
    """Else the run would train on fewer tokens than it was asked for."""
    config = tiny_config(batch_tokens=25, long_samples="drop", data_tokens=100, epochs=1)
    store_states(config)
    manifest = run(config)
    longer = sum(len(each.token_ids) > 25 for each in states)
    assert longer > 4 and manifest.rejected["longer_than_batch"] == longer
    assert 100 <= manifest.details["data_tokens"] < 100 + 25


def test_large_shards_are_shuffled_in_smaller_groups() -> None:
    """What is shuffled together has to fit a cache, and its order has to be that of any machine."""
    assert shards_together([100 << 20] * 500) == 64 == shards_together([])
    assert shards_together([500_000_000, 10]) == 32 and shards_together([1 << 40]) == 2
    pieces = [Piece(shard, index, 0, 4) for shard in range(12) for index in range(5)]
    schedule = Schedule(pieces, budget=4, seed=0, epochs=1, together=3)
    order = [schedule.batch(number)[0].shard for number in range(len(schedule))]
    groups = [set(order[first : first + 15]) for first in range(0, 60, 15)]
    assert [len(group) for group in groups] == [3] * 4 and set.union(*groups) == set(range(12))


def test_coverage_is_counted_by_source() -> None:
    corpus = MemoryCorpus(
        [
            sample(10, [3, 4, 5], source="a"),
            sample(10, [4, 9], source="b"),
            sample(10, [5, 8, 9], source="b"),
        ]
    )
    surveyed = survey(corpus, vocab_size=10, budget=10)
    assert coverage_by_source(surveyed.counts, torch.tensor([3, 4, 5])) == {
        "a": 1.0,
        "b": pytest.approx(2 / 5),
    }


@pytest.mark.parametrize("sources", [1, 6, 7])
def test_of_many_sources_the_least_covered_are_said(
    sources: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source i has 10 tokens, of which the vocabulary lacks i."""
    counts = {f"s{index}": torch.tensor([10 - index, index]) for index in range(sources)}
    survey = Survey((), 1, 1, 10 * sources, counts, {}, 0)
    log_coverage(survey, DraftVocabulary(torch.tensor([0]), 0.5))
    said = capsys.readouterr().out
    assert ("by source: s0 100.00%, s1 90.00%" in said) == (sources == 6)
    assert ("the least of 7 sources: s6 40.00%, s5 50.00%" in said) == (sources == 7)
    assert ("s0" in said) == (sources == 6)


@pytest.mark.parametrize("own", [256, 1024])
def test_a_faster_draft_vocabulary_is_named(own: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Here 256 tokens are all that is ever said."""
    counts = {"s": torch.where(torch.arange(2000) < 256, 9, 0)}
    surveyed = Survey((), 1, 1, 2304, counts, {}, 0)
    shape: Any = SimpleNamespace(draft_vocab_size=own, vocab_size=2000, hidden_size=64)
    target: Any = SimpleNamespace(contract=SimpleNamespace(parameters=10**6))
    log_vocabulary_sizes(HeadInit(shape, 20_000 + 64 * own, 0.05), surveyed, target)
    said = " ".join(capsys.readouterr().out.split())
    assert ("on paper 256 tokens would decode" in said) == (own == 1024)
    assert ("they hold 100.0%, 1,024 hold 100.0%" in said) == (own == 1024)
    continued = HeadInit(shape, 20_000 + 64 * own, 0.05, earlier=cast("Any", object()))
    log_vocabulary_sizes(continued, surveyed, target)  # it keeps the vocabulary that it has
    assert not capsys.readouterr().out


def test_it_is_named_where_a_draft_reads_the_head_at_each_step(
    tiny_config: Configure, store_states: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a block is drafted in one forward, nor of heads that follow one another."""
    named: list[int] = []
    monkeypatch.setattr(
        "pipeline.train.stage.log_vocabulary_sizes",
        lambda init, survey, target: named.append(init.shape.draft_vocab_size),
    )
    config = tiny_config(max_steps=1)
    store_states(config)
    run(config)
    assert named == [config.train.head_config.draft_vocab_size]
    sections: list[dict[str, Any]] = [
        {"algorithm": "eagle3"},
        {"algorithm": "eagle3", "head_config": {"heads": 3}},
        {"algorithm": "dflash"},
    ]
    unrolled = [algorithm(TrainSection.model_validate(each)).is_unrolled for each in sections]
    assert unrolled == [True, False, False]


def test_one_sample_is_shown_with_its_mask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.console.on_terminal", lambda: True)
    corpus = MemoryCorpus([sample(6, []), sample(300, [2, 3, 299])])
    surveyed = survey(corpus, vocab_size=300, budget=300)
    show_sample(corpus, surveyed, lambda ids: "".join(f"<{token}>" for token in ids))
    shown = capsys.readouterr().out.replace("\n", "")
    assert "3 of 300 tokens are supervised" in shown
    assert (
        "<0><1><2><3><4>" in shown
        and "<83> … 135 tokens … <219>" in shown
        and "<298><299>" in shown
    )


def test_token_outside_the_vocabulary() -> None:
    with pytest.raises(CorruptShard, match="token id"):
        survey(MemoryCorpus([sample(10, [3])]), vocab_size=9, budget=10)


@pytest.mark.parametrize(
    ("supervised", "share"), [([], "0 %"), (range(8), "100 %"), ([0, 1], "0 %")]
)
def test_mask_audit(supervised: Sequence[int], share: str) -> None:
    surveyed = survey(MemoryCorpus([sample(8, supervised)]), vocab_size=30, budget=10)
    with pytest.raises(DataError, match=share):
        audit_mask(surveyed, where="states")


def pieces_of(lengths: Sequence[int]) -> list[Piece]:
    return [Piece(number // 4, number % 4, 0, length) for number, length in enumerate(lengths)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=120), st.integers(0, 3))
def test_every_epoch_holds_every_piece_once(lengths: list[int], seed: int) -> None:
    pieces = pieces_of(lengths)
    schedule = Schedule(pieces, budget=50, seed=seed, epochs=2)
    seen: dict[int, Counter[Piece]] = {0: Counter(), 1: Counter()}
    for number in range(len(schedule)):
        batch = schedule.batch(number)
        assert 0 < sum(piece.length for piece in batch) <= 50
        seen[schedule.locate(number)[0]].update(batch)
    assert seen[0] == seen[1] == Counter(pieces)


def test_a_piece_with_a_past_goes_alone() -> None:
    """Behind several long samples' last few tokens there may be all that they say."""
    long = [Piece(0, 0, 30 * part, 30 * part + 30) for part in range(5)]
    short = [Piece(0, number, 0, 10) for number in range(1, 8)]
    schedule = Schedule([*long, *short], budget=50, seed=1, epochs=1)
    batches = [schedule.batch(number) for number in range(len(schedule))]
    assert [[piece] for piece in long[1:]] == sorted(batch for batch in batches if batch[0].start)
    assert all(piece.start == 0 for batch in batches if len(batch) > 1 for piece in batch)
    assert sorted(piece for batch in batches for piece in batch) == sorted([*long, *short])


def test_order_depends_on_seed_and_epoch_only() -> None:
    draw = torch.Generator().manual_seed(0)
    pieces = pieces_of(torch.randint(5, 300, (400,), generator=draw).tolist())
    one, same, other = (Schedule(pieces, budget=1024, seed=seed, epochs=3) for seed in (1, 1, 2))
    backwards = [one.batch(number) for number in reversed(range(len(one)))][::-1]
    assert backwards == [same.batch(number) for number in range(len(same))]
    assert one.batch(0) != other.batch(0)
    first_of_second = next(number for number in range(len(one)) if one.locate(number) == (1, 0))
    assert one.batch(0) != one.batch(first_of_second)
    assert one.fill > 0.95


@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_sees_the_same_batches_whatever_the_number_of_processes(
    world: int, accumulate: int
) -> None:
    first, steps = 20, 3
    mine = [
        list(own_batches(first, steps, rank=rank, world=world, accumulate=accumulate))
        for rank in range(world)
    ]
    for step in range(steps):
        taken = {
            number
            for numbers in mine
            for number in numbers[step * accumulate : (step + 1) * accumulate]
        }
        assert taken == set(range(first + 4 * step, first + 4 * step + 4))


class CountingCorpus(MemoryCorpus):
    """Counts the samples that were read, and notes the shards that were announced."""

    def __init__(self, *shards: Sequence[StatesSample]) -> None:
        super().__init__(*shards)
        self.reads, self.announced = 0, list[int]()
        self._lock = threading.Lock()

    def read(self, piece: Piece, rows: StatesRows) -> StatesSample:
        with self._lock:
            self.reads += 1
        return super().read(piece, rows)

    def prefetch(self, shard: int) -> None:
        with self._lock:
            self.announced.append(shard)


def test_read_ahead_keeps_the_order_and_its_bound() -> None:
    corpus = CountingCorpus([sample(10, [4, 5], f"s{number}") for number in range(12)])
    schedule = Schedule(
        [Piece(0, number, 0, 10) for number in range(12)], budget=10, seed=0, epochs=1
    )
    expected = [read_batch(corpus, schedule.batch(number)).sample_ids for number in range(12)]
    corpus.reads = 0
    with ReadAhead(corpus, schedule, range(12)) as reader:
        taken = []
        for number in range(12):
            taken.append(reader.take().sample_ids)
            assert corpus.reads <= number + 1 + AHEAD
        assert reader.waited > 0
    assert taken == expected and corpus.reads == 12


class BrokenCorpus(MemoryCorpus):
    """Its second sample cannot be read."""

    def read(self, piece: Piece, rows: StatesRows) -> StatesSample:
        if piece.sample == 1:
            raise CorruptShard("has CRC-32 0, 1 was written", where="shard: sample 1", fix="none")
        return super().read(piece, rows)


def test_what_the_reading_thread_raises_arrives_with_its_batch() -> None:
    corpus = BrokenCorpus([sample(8, [3, 4]), sample(8, [3, 4])])
    schedule = Schedule([Piece(0, 0, 0, 8), Piece(0, 1, 0, 8)], budget=8, seed=0, epochs=1)
    bad = next(number for number in range(2) if schedule.batch(number)[0].sample == 1)
    with ReadAhead(corpus, schedule, [1 - bad, bad]) as reader:
        assert reader.take().sample_ids == ("s",)
        with pytest.raises(CorruptShard, match="CRC-32"):
            reader.take()

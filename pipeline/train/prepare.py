"""All before the first step: states verified, held out, surveyed and scheduled; the initial head.

    local disk ──────────────────────────────────────────────► sample, CRC-32 checked
    remote ─ whole shard, checksum checked ─► cache ─────────► sample, CRC-32 checked
    remote, cache too small ─ two byte ranges a sample ──────► sample, CRC-32 checked

A sample whose bytes are wrong is read once more, from a fresh copy; then training stops with its
name. Memory is bounded whatever the corpus holds: a fixed number of shards is open, and a sample is
read into the rows of its batch.

Of several processes each verifies and surveys its part of the shards, and all get the whole; rank 0
draws the held-out samples, solves the least squares and broadcasts both.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeline.config import RefreshSection, RunConfig, TrainSection, cache_directory, rank
from pipeline.console import long_step, notice, show_supervised
from pipeline.errors import ConfigError, CorruptShard, DataError, Eagle3Error, StoreError
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.checkpoint import WEIGHTS
from pipeline.heads.init import (
    SCALE_BATCHES,
    DraftVocabulary,
    choose_vocabulary,
    fc_scale,
    lend_rows,
    size_vocabulary,
)
from pipeline.heads.registry import algorithm, algorithm_of, check_algorithm, empty_head, open_head
from pipeline.learning.batches import Schedule, shards_together
from pipeline.learning.corpus import (
    Corpus,
    HeldOut,
    Piece,
    Survey,
    cut_into,
    draw_samples,
    final_rows,
    hold_out,
    join_surveys,
    survey,
)
from pipeline.learning.least_squares import FirstBatches
from pipeline.records import Manifest, Shard, TargetContract, match_contracts
from pipeline.store.hub import commit_of
from pipeline.store.location import Location
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.samples import check_supervised
from pipeline.store.shards import SHARDS, ShardCache, verify_shard, verify_sizes, verify_stored
from pipeline.store.states import StatesReader, StatesRows, StatesSample
from pipeline.target.open import Target
from pipeline.train.group import (
    all_gather_or_raise,
    broadcast_from_rank0,
    broadcast_tensor,
    own_part,
)

#: Sources whose coverage is printed, at most.
_PRINTED_SOURCES = 6
#: Remote shards that are surveyed at one time.
_AT_ONCE = 4
#: Attempts at opening a copy before other processes evict it.
_OPENINGS = 4

T = TypeVar("T")
_FIX = "restore the file, or run `eagle3 features --force`"


class Data(NamedTuple):
    """The states, and what is trained and decoded of them."""

    corpus: StoredCorpus
    survey: Survey
    schedule: Schedule
    held_out: tuple[HeldOut, ...]  # selecting half, reporting half; none without evaluate_every


def open_data(config: RunConfig, corpus: StoredCorpus, target: Target, shape: DraftShape) -> Data:
    """Verify the states, hold some out, survey, audit and schedule the rest."""
    section, seed = config.train, config.run.seed
    own = own_part(len(corpus))
    all_gather_or_raise(lambda: corpus.verify(own))
    held_out: tuple[HeldOut, ...] = ()
    if section.evaluate_every:
        count = section.evaluate_prompts
        limit = shape.max_position_embeddings - section.evaluate_tokens
        held_out = broadcast_from_rank0(
            lambda: hold_out(corpus, count, seed=seed, max_prompt=limit)
        )
    drawn = None
    if (tokens := section.data_tokens) is not None:
        budget = section.batch_tokens if section.long_samples == "drop" else None
        drawn = broadcast_from_rank0(
            lambda: draw_samples(corpus, tokens, seed=seed, held_out=held_out, max_length=budget)
        )
    parts = all_gather_or_raise(
        lambda: survey(
            corpus,
            own,
            vocab_size=target.contract.vocab_size,
            budget=section.batch_tokens,
            long_samples=section.long_samples,
            held_out=held_out,
            drawn=drawn,
        )
    )
    surveyed = join_surveys(parts)
    audit_mask(surveyed, where=stage_location(config.states_uri, "features").uri)
    template = target.template()
    if rank() == 0:
        show_sample(corpus, surveyed, lambda ids: template.text(tuple(ids), special=True))
    log_survey(surveyed, section.batch_tokens)
    corpus.wait_for(0)
    schedule = Schedule(
        surveyed.pieces,
        budget=section.batch_tokens,
        seed=seed,
        epochs=section.epochs,
        together=corpus.together,
        window=corpus.window,
    )
    corpus.wait_for(schedule.window(0))
    return Data(corpus, surveyed, schedule, held_out)


def solve_least_squares(config: RunConfig, head: DraftingHead, target: Target, data: Data) -> None:
    """Solve what is linear in `head` on rank 0, and broadcast it. It stays on the CPU."""

    def batches(labels: int) -> FirstBatches:
        return FirstBatches(data.corpus, data.schedule, labels=labels)

    def solve() -> None:
        lines = algorithm_of(head).init.init_least_squares(
            config.train, head.to(target.device), target, batches, config.run.seed
        )
        head.cpu()
        for line in lines:
            notice("train", line)

    with long_step("train", "solving the head by least squares"):
        broadcast_from_rank0(solve)
    for parameter in head.parameters():
        broadcast_tensor(parameter, target.device)


def measure_scale(config: RunConfig, head: DraftingHead, data: Data) -> float:
    """Factor of the learning rate of `fc`, measured on rank 0."""
    tokens = config.train.batch_tokens * SCALE_BATCHES
    batches = FirstBatches(data.corpus, data.schedule, tokens=tokens)
    return broadcast_from_rank0(lambda: fc_scale(head, batches))


def audit_mask(survey: Survey, *, where: str) -> None:
    """Refuse states without a trainable token, and such of which everything is supervised.

    Raises DataError: the mask was lost, or never made.
    """
    fix = (
        "look at the samples' `supervised` spans and run `eagle3 synth` and `eagle3 features` again"
    )
    if not survey.pieces:
        left_out = ", ".join(f"{reason} {count}" for reason, count in survey.rejected.items())
        count = f"{survey.supervised} of {survey.tokens} tokens are supervised (0 %)"
        if "longer_than_batch" in survey.rejected:
            fix = "raise train.batch_tokens, or set train.long_samples=split"
        problem = f"no trainable token: {count}; left out: {left_out or 'nothing'}"
        raise DataError(problem, where=where, fix=fix)
    check_supervised(survey.supervised, survey.tokens, where=where, fix=fix)


def show_sample(corpus: Corpus, survey: Survey, decode: Callable[[Sequence[int]], str]) -> None:
    """Show the first trained sample with its mask, or its counts where there is no terminal."""
    first = survey.pieces[0]
    token_ids, mask = corpus.outline(first.shard).tokens(first.sample)
    show_supervised("train", token_ids.tolist(), mask.bool().tolist(), decode)


def coverage_by_source(counts: Mapping[str, Tensor], target_ids: Tensor) -> dict[str, float]:
    """Share of each source's supervised tokens that the draft vocabulary holds.

    counts [V] for each source, target_ids [Vd].
    """
    return {
        source: int(seen[target_ids].sum()) / max(1, int(seen.sum()))
        for source, seen in sorted(counts.items())
    }


def log_survey(survey: Survey, batch_tokens: int) -> None:
    """Print what the states hold, and what of it is left out."""
    share = f"{survey.supervised / survey.tokens:.1%} supervised"
    notice("train", f"states: {survey.samples:,} samples, {survey.tokens:,} tokens, {share}")
    if survey.split:
        longer = f"{survey.split:,} samples are longer than train.batch_tokens={batch_tokens}"
        notice("train", f"{longer} and were split; no token is lost")
    if survey.rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in survey.rejected.items())
        notice("train", f"not trained on: {reasons}")


def log_coverage(survey: Survey, vocabulary: DraftVocabulary) -> None:
    """Print which share of the supervised tokens the draft vocabulary holds, and of each source's.

    Of many sources the least covered are printed; the manifest has all.
    """
    covered = f"{vocabulary.coverage:.2%} of {survey.supervised:,} supervised tokens"
    notice("train", f"draft vocabulary: {vocabulary.size:,} tokens cover {covered}")
    by_source = coverage_by_source(survey.counts, vocabulary.target_ids)
    if len(by_source) > 1:
        printed, which = list(by_source.items()), "by source"
        if len(printed) > _PRINTED_SOURCES:
            which = f"the least of {len(printed)} sources"
            printed = sorted(printed, key=lambda pair: pair[1])[:_PRINTED_SOURCES]
        shares = ", ".join(f"{source} {share:.2%}" for source, share in printed)
        notice("train", f"{which}: {shares}")


def log_vocabulary_sizes(init: HeadInit, survey: Survey, target: Target) -> None:
    """Print which draft vocabulary would be the fastest on paper, if it is another one.

    Not for a head that continues an earlier one, and keeps its vocabulary.
    """
    if init.earlier:
        return
    shape = init.shape
    own, vocabulary = shape.draft_vocab_size, shape.vocab_size
    sizes = sorted({own, vocabulary, *(2**n for n in range(8, 20) if 2**n < vocabulary)})
    sized = size_vocabulary(
        _of_all_sources(survey.counts),
        sizes,
        target=target.contract.parameters,
        layer=init.parameters - shape.hidden_size * own,
        hidden=shape.hidden_size,
    )
    best = max(sized, key=lambda each: each.speedup)
    ours = next(each for each in sized if each.size == own)
    if best.size != own:
        notice(
            "train",
            f"draft vocabulary: on paper {best.size:,} tokens would decode "
            f"{best.speedup / ours.speedup - 1:.1%} faster: of tokens left out of the counts they "
            f"hold {best.coverage:.1%}, {own:,} hold {ours.coverage:.1%}",
        )


@dataclass(frozen=True)
class HeadInit:
    """What is known of the head before any data is read."""

    shape: DraftShape
    parameters: int
    share: float  # of the target's parameters
    earlier: DraftingHead | None = None  # train.start_from, in float32
    origin: Mapping[str, Any] | None = None  # where `earlier` comes from, for the card


def choose_init(
    section: TrainSection,
    target_directory: Path,
    contract: TargetContract,
    *,
    refresh: RefreshSection | None = None,
) -> HeadInit:
    """Shape of a new head, or the head of `train.start_from`; that of a `refresh` was made for the
    target before it was tuned.

    Raises ConfigError for a shape that cannot be, is too large, or is not that of the earlier head;
    HeadError or ContractMismatch for an earlier head that cannot be read or belongs to another
    target.
    """
    if section.start_from:
        earlier, card = open_head(section.start_from, expected=None if refresh else contract)
        origin = {
            "head": commit_of(section.start_from),
            "weights_sha256": Location(section.start_from).sha256(WEIGHTS),
            "provenance": card.provenance,
        }
        if refresh:
            where = f"head {section.start_from}"
            match_contracts(contract, card.contract, where=where, tuned=True)
            origin["manifest"] = read_manifest(refresh.run, "train").content_hash
        check_algorithm(section, earlier, where=section.start_from)
        chosen = algorithm_of(earlier)
        shape = chosen.init.continue_shape(section, earlier, section.start_from)
        earlier.shape = shape
    else:
        earlier, origin, chosen = None, None, algorithm(section)
        shape = chosen.init.choose_shape(section, target_directory, contract)
    settings = chosen.settings(section)
    limit = math.inf if earlier else settings.max_share  # it is as large as it is
    parameters, share = check_share(shape, contract.parameters, limit, settings.key)
    of_target = f"{share:.2%} of the target's {contract.parameters:,}"
    notice("train", f"head: {parameters:,} parameters, {of_target}")
    return HeadInit(shape, parameters, share, earlier, origin)


def draft_vocabulary(init: HeadInit, counts: Mapping[str, Tensor]) -> DraftVocabulary:
    """The most frequent supervised tokens, or the earlier head's own. counts: source → [V]."""
    total = _of_all_sources(counts)
    if init.earlier is None:
        return choose_vocabulary(total, init.shape.draft_vocab_size)
    ids = init.earlier.target_ids()
    return DraftVocabulary(ids, float(total[ids].sum()) / max(1, int(total.sum())))


def _of_all_sources(counts: Mapping[str, Tensor]) -> Tensor:
    """counts: source → [V]; their sum [V]."""
    return torch.stack([*counts.values()]).sum(0)


def initial_head(
    init: HeadInit, section: TrainSection, vocabulary: DraftVocabulary, target: Target, *, seed: int
) -> DraftingHead:
    """The head that training begins with: the earlier one, or a new one."""
    if init.earlier and init.origin:
        head, same = init.earlier, "its draft vocabulary and shape are kept"
        notice("train", f"head starts from {init.origin['head']}, {same}")
    else:
        layers, weights = target.contract.num_layers, target.weights
        head = algorithm(section).init.new_head(
            section, init.shape, vocabulary, weights, num_layers=layers, seed=seed
        )
    lend_rows(head, target.weights.lm_head())
    return head


def check_share(
    shape: DraftShape, target_parameters: int, limit: float, section: str = "train.head_config"
) -> tuple[int, float]:
    """(parameters, share of the target's) of a head that `section` describes.

    Raises ConfigError for one above `limit`.
    """
    with torch.device("meta"):
        parameters = empty_head(shape).count_parameters()
    share = parameters / target_parameters
    if share > limit:
        above = f"{share:.1%} of the target's {target_parameters:,}, above the limit of {limit:.1%}"
        vocabulary = f"{section}.draft_vocab_size (now {shape.draft_vocab_size})"
        mlp = f"intermediate_size (now {shape.intermediate_size})"
        raise ConfigError(
            f"the head has {parameters:,} parameters, {above}",
            where=f"{section}.max_share_of_target",
            fix=f"lower {vocabulary} or {mlp}, or raise the limit",
        )
    return parameters, share


class StoredCorpus:
    """The committed shards of the features stage at `location`; at most `keep_open` stay open, as
    many as are shuffled together.

    Remote shards are fetched into `cache` when it can hold those that are shuffled together;
    otherwise, and without a cache, samples are read by byte range. `hidden_size` is that of the
    target they must be of.
    """

    def __init__(
        self,
        location: Location,
        shards: Sequence[Shard],
        *,
        keep_open: int | None = None,
        cache: ShardCache | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self._location, self._shards = location, list(shards)
        sizes = sorted((shard.bytes for shard in self._shards), reverse=True)
        self.together = shards_together(sizes)
        self._keep_open, self._hidden_size = keep_open or self.together, hidden_size
        self._open: OrderedDict[int, StatesReader] = OrderedDict()
        self._lock, self._reopening = threading.Lock(), threading.Lock()
        largest = sum(sizes[: self.together])
        fits = cache is not None and not location.is_local and cache.limit >= largest
        self._cache = cache if fits else None
        #: Shards that all epochs pass over before the next ones; None: there is one window.
        self.window: int | None = None

    def wait_for(self, window: int, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Whether the states of window number `window` are there, after waiting for them; False
        where a process is to stop meanwhile."""
        return True

    def require_after(self, step: int) -> None:
        """Raise StageConflict where states are gone that the checkpoint of `step` still needs."""

    @property
    def is_over(self) -> bool:
        """Whether training has taken its last step, and given up all states."""
        return False

    def consume(self, windows: int, *, step: int) -> None:
        """The first `windows` are not needed again: the checkpoint of `step` is past them."""

    def consume_all(self, *, step: int) -> None:
        """No states are needed again."""

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def reading_threads(self) -> int:
        """Two for local files: more would wait for the interpreter. Four for byte ranges: a remote
        store takes its time for each answer."""
        return 2 if self._location.is_local or self._cache else 4

    def rows(self, shard: int) -> int:
        """Samples of shard number `shard`."""
        return self._shards[shard].rows

    def verify(self, shards: Sequence[int] | None = None) -> None:
        """Check the size of every shard, and the checksums of all or of `shards`.

        Local ones are read for that. Of remote ones what the store tells is compared; they are
        checked when they are fetched, and their samples when they are read. Raises CorruptShard.
        """
        own = tuple(self._shards if shards is None else map(self._shards.__getitem__, shards))
        if len(own) < len(self):
            verify_sizes(self._location, tuple(self._shards))
        if not self._location.is_local:
            verify_stored(self._location, own)
            return
        for shard in own:
            verify_shard(self._location, shard)

    def outline(self, shard: int) -> StatesReader:
        """Ids, masks and origins of shard number `shard`, without fetching a remote one."""
        with self._lock:
            if shard in self._open:
                return self._open[shard]
        if self._location.is_local:
            return self.reader(shard)
        return self._checked(self._location, shard)

    def outlines(self, shards: Sequence[int]) -> Iterator[StatesReader]:
        """Of `shards` in order; remote ones are read a few at a time."""
        if self._location.is_local:
            yield from map(self.outline, shards)
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="outline") as pool:
            numbers = iter(shards)
            coming = [pool.submit(self.outline, shard) for shard in islice(numbers, 2 * _AT_ONCE)]
            while coming:
                yield coming.pop(0).result()
                coming += [pool.submit(self.outline, shard) for shard in islice(numbers, 1)]

    def reader(self, shard: int) -> StatesReader:
        """The reader of shard number `shard`; the one unused for longest is closed for it.

        Raises CorruptShard.
        """
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
        opened = self._opened(shard)
        with self._lock:
            opened = self._open.setdefault(shard, opened)  # another thread may have been faster
            self._open.move_to_end(shard)
            while len(self._open) > self._keep_open:
                self._open.popitem(last=False)
        return opened

    def new_rows(self, piece: Piece, tokens: int, finals: int) -> StatesRows:
        """Memory for the states of `tokens` tokens and final ones, in rows like `piece`'s."""
        return self._retried(piece, lambda reader: reader.new_rows(tokens, finals))

    def read(self, piece: Piece, rows: StatesRows) -> StatesSample:
        """The piece with its past (see `cut_into`), in the first of the given rows."""
        return self._retried(piece, lambda reader: read_piece(reader, piece, rows))

    def prefetch(self, shard: int) -> None:
        """Have the shard in the cache when this returns. A failure arrives with a sample of it."""
        if self._cache:
            with suppress(Eagle3Error):
                self._cache.fetch(self._location, self._shards[shard])

    def announce(self, piece: Piece) -> None:
        """Have a local sample read ahead. A failure arrives with the sample itself."""
        if self._location.is_local:
            with suppress(Eagle3Error):
                self.reader(piece.shard).announce(piece.sample)

    def _retried(self, piece: Piece, read: Callable[[StatesReader], T]) -> T:
        """`read` with the reader of the piece's shard, again with a fresh copy if bytes are wrong.

        Then CorruptShard with the sample.
        """
        reader: StatesReader | None = None
        try:
            reader = self.reader(piece.shard)
            return read(reader)
        except CorruptShard:
            pass
        try:
            return read(self._reopened(piece.shard, instead_of=reader))
        except CorruptShard as error:
            problem, where = f"{error.problem}, read twice", error.where
            if self._cache:  # name the shard, not its copy
                copy = str(self._cache.folder(self._shards[piece.shard]))
                where = where.replace(copy, self._location.uri)
            where = f"{where}: sample {piece.sample}"
            raise CorruptShard(problem, where=where, fix=error.fix) from error

    def _opened(self, shard: int) -> StatesReader:
        if self._cache is None:
            return self._checked(self._location, shard)
        for _ in range(_OPENINGS):
            folder = self._cache.fetch(self._location, self._shards[shard])
            try:
                return self._checked(folder, shard)
            except CorruptShard:
                raise
            except (StoreError, FileNotFoundError):
                continue  # evicted by another process between fetch and open
        raise StoreError(
            "does not stay in the cache",
            where=self._where(shard),
            fix="raise run.cache_bytes: other processes fill the cache as well",
        )

    def _checked(self, folder: Location, shard: int) -> StatesReader:
        """The shard, or its copy, in `folder`; it must be of this target."""
        reader = StatesReader(folder, self._shards[shard])
        if self._hidden_size is not None and reader.hidden_size != self._hidden_size:
            expected = f"the target of the manifest's contract has {self._hidden_size}"
            problem = f"holds states of hidden_size {reader.hidden_size}, {expected}"
            raise CorruptShard(problem, where=self._where(shard), fix=_FIX)
        return reader

    def _reopened(self, shard: int, *, instead_of: StatesReader | None) -> StatesReader:
        """A reader of a fresh copy; threads that found the same one wrong share it."""
        with self._reopening:
            with self._lock:
                current = self._open.get(shard)
            if current is not None and current is not instead_of:
                return current
            if self._cache:
                self._cache.drop(self._shards[shard])
            fresh = self._opened(shard)
            with self._lock:
                self._open[shard] = fresh  # whatever a slower thread has opened meanwhile
            return fresh

    def _where(self, shard: int) -> str:
        return f"{self._location.uri}/{SHARDS}/{self._shards[shard].path}"


def read_piece(reader: StatesReader, piece: Piece, rows: StatesRows) -> StatesSample:
    """A piece of one of the reader's samples with its past, in the first of the given rows.

    A sample that is kept with all of its states is read there. Others must be read whole, for their
    checksum; of those, what is kept is copied.
    """
    positions = reader.final_positions(piece.sample)
    stored = (reader.lengths[piece.sample], slice(0, len(positions)))
    needed = (piece.stop, final_rows(positions, piece.start, piece.stop))
    if needed == stored:
        whole = rows.part(slice(0, piece.stop), slice(0, len(positions)))
        return reader.read_into(piece.sample, whole)
    return cut_into(reader.sample(piece.sample, decode=False), piece, rows)


def open_corpus(config: RunConfig, parent: Manifest) -> StoredCorpus:
    """The states of the run, `parent` being their manifest."""
    cache = ShardCache(cache_directory(), config.run.cache_bytes)
    location = stage_location(config.states_uri, "features")
    hidden_size = parent.contract.hidden_size
    return StoredCorpus(location, parent.shards, cache=cache, hidden_size=hidden_size)

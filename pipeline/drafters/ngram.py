"""Drafting by looking up what came before: prompt lookup, or suffix matching; no head, no training.

Where the text repeats itself — code that is edited, a document that is quoted, a loop — what
followed its last tokens the last time follows them again (prompt lookup decoding, Saxena 2023;
arXiv:2304.04487; SuffixDecoding, arXiv:2411.04975):

    history    … a b c d e … x b c f … a b c        root: the last c, at L
    matches          └─ of 3       └─ of 2          proposed: d e … before f …

Matching runs on the device, in kernels of static shape: history lies in the row's state, and so the
whole round stays one graph that waits for no host. A host that kept suffix trees would be a round
behind, or the round would wait for it. The price is S comparisons a row, and more where the root's
own token stands: far less than one layer's weights.

A match whose continuation reaches the root goes on periodically: behind "a b a b" stand "a b a b …"
as deep as the draft goes. So every match proposes a whole chain, and ops/lookup.py makes a tree of
them.

A text that all requests share, sorted so that one search names its longest matches.

Positions are in the order of the tokens that end there, read backwards; the neighbours of where a
request's last tokens would stand agree with them longest:

    … b a        sorted by a, then b, then what is before it: a suffix array of the reversed text
    … b c a  ◄─ would stand here: the longest matches are next to it
    … d c a

Sorting and searching go by whole numbers that hold a few tokens each, exactly; no hash:

    level 1     the last 3 tokens (of 16 to 21 bits)
    level 2     where those begin in the order, and the next older tokens
    level 3     where all of those begin, and so on, until `max_match` tokens are compared

A search is one `searchsorted` a level: of static shape, so that a round's graph can hold it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config import NgramSection, TreeSection
from pipeline.console import notice
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import ReadTokens, TreeDrafter, Trees
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.lookup import last_tokens
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.documents import refuse_other_kinds
from pipeline.errors import ConfigError, DataError
from pipeline.target.open import Target


class NgramDrafter(TreeDrafter):
    """Proposes what followed earlier occurrences of the last tokens.

    Row b's history is its tokens 0 … L, the root being the last; whatever stands behind is never
    looked at.
    """

    def __init__(
        self,
        model: DecoderModel,
        trees: Trees,
        section: NgramSection,
        corpus: CorpusIndex | None = None,
    ) -> None:
        """`corpus` is looked up beside the request's own tokens; it must match `max_match`."""
        super().__init__(trees, model.vocabulary)
        self._section, self._corpus = section, corpus
        proposed = [
            min(each.nodes, 1 + section.matches * each.steps) for each in self.shapes.drafted
        ]
        self.nodes = max(proposed, default=1)
        self.lookahead = 1  # drafting writes no entry
        self.history = model.max_length + HEADROOM
        self.ops = model.ops

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        del ended
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        del planes
        rows = read.rows
        self.ops.write_history(
            *(batch.history, batch.seq_lens, rows.cu_seqlens_q, rows.max_query_len),
            *(read.tokens, read.next_tokens, read.counts),
        )

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        del planes
        history, seq_lens, section = batch.history, batch.seq_lens, self._section
        least, most, steps = section.min_match, section.matches, shape.steps
        limits = {"max_match": section.max_match, "least": least, "most": most, "steps": steps}
        lengths, chains = self.ops.look_up(history, seq_lens, **limits)  # [B, W], [B, W, D]
        if self._corpus is not None:
            context = last_tokens(history, seq_lens, section.max_match)
            of_corpus = self._corpus.lookup(context, least, most, steps)
            lengths, order = torch.cat((lengths, of_corpus[0]), 1).sort(
                dim=-1, descending=True, stable=True
            )
            lengths, order = lengths[:, :most], order[:, :most]
            chains = torch.cat((chains, of_corpus[1]), 1)
            chains = chains.gather(1, order[..., None].expand(-1, -1, steps))
        return self.ops.tree_of_chains(chains, lengths, self.shapes.beams(shape))


_BITS = 63  # of a key; its sign stays free


class CorpusIndex:
    """N tokens and their order; immutable, so that any number of engines can share it."""

    def __init__(self, tokens: Tensor, vocabulary: int, max_match: int) -> None:
        """tokens [N ≥ 1] below `vocabulary`, on the device; matches of up to `max_match` tokens."""
        self._tokens, self._max_match = tokens, max_match
        self._token_bits = vocabulary.bit_length()  # none is 0, token t is t + 1
        count = len(tokens)
        further = (_BITS - count.bit_length()) // self._token_bits
        assert further > 0, "a key holds a position and a token"
        self._order = torch.arange(count, device=tokens.device)  # [N]
        self._keys: list[Tensor] = []  # of each level [N], ascending
        self._spans: list[tuple[int, int]] = []  # tokens of each level, counted from the last
        known, begins = 0, torch.zeros_like(self._order)
        while known < max_match:
            span = known, known + (further if known else _BITS // self._token_bits)
            key = self._pack(begins, self._context(self._order, *span))
            key, moved = key.sort(stable=True)
            self._order = self._order[moved]
            self._keys.append(key)
            self._spans.append(span)
            known, begins = span[1], torch.searchsorted(key, key)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        """Memory that it takes on its device."""
        return sum(part.nbytes for part in (self._tokens, self._order, *self._keys))

    def lookup(self, context: Tensor, least: int, most: int, steps: int) -> tuple[Tensor, Tensor]:
        """The `most` longest matches of a context [B, max_match], its last token first, -1 for
        none.

        Lengths [B, most], longest first, 0 where there is none of at least `least`; and the
        `steps` tokens that followed each [B, most, steps].
        """
        count, device = len(self), context.device
        # One more on each side: nothing follows the corpus' last token, which may be among them.
        around = torch.arange(-most - 1, most + 1, device=device)
        near = self._search(context)[:, None] + around
        inside = (near >= 0) & (near < count)
        ends = self._order[near.clamp(0, count - 1)]  # [B, 2 · most + 2]
        theirs = self._context(ends, 0, self._max_match)
        agrees = (theirs == context[:, None]) & (context >= 0)[:, None]
        back = torch.arange(self._max_match, device=device)
        lengths = torch.where(agrees, self._max_match, back).amin(-1)
        matches = inside & (lengths >= least) & (ends < count - 1)
        lengths, best = torch.where(matches, lengths, 0).sort(dim=-1, descending=True, stable=True)
        ends = ends.gather(1, best[:, :most])[..., None]
        ahead = torch.arange(1, steps + 1, device=device)
        return lengths[:, :most], self._tokens[(ends + ahead).clamp(max=count - 1)]

    def _search(self, context: Tensor) -> Tensor:
        """Where contexts [B, max_match] would stand in the order [B], before their equals."""
        short = max(self._spans[-1][1] - self._max_match, 0)
        context = torch.cat((context, context.new_full((len(context), short), -1)), 1)
        begins = place = torch.zeros_like(context[:, 0])
        within = torch.ones_like(begins, dtype=torch.bool)  # as deep as the levels before
        for key, span in zip(self._keys, self._spans, strict=True):
            packed = self._pack(begins, context[:, slice(*span)])
            begins = torch.searchsorted(key, packed)
            place = torch.where(within, begins, place)
            within = within & (key[begins.clamp(max=len(self) - 1)] == packed)
        return place

    def _context(self, ends: Tensor, first: int, last: int) -> Tensor:
        """Tokens first … last-1 back from `ends` [..], [.., last - first]; -1: none."""
        place = ends[..., None] - torch.arange(first, last, device=ends.device)
        return torch.where(place >= 0, self._tokens[place.clamp(min=0)], -1)

    def _pack(self, begins: Tensor, tokens: Tensor) -> Tensor:
        """begins [n] and tokens [n, t] as one number each, in the order of both [n]."""
        key = begins
        for token in tokens.unbind(-1):
            key = key << self._token_bits | token + 1
        return key


def load_corpus(section: NgramSection, model: DecoderModel, target: Target) -> CorpusIndex | None:
    """The index of `section.corpus`, on the model's device; None without one.

    Of a longer text the first `corpus_tokens` tokens are taken, and a notice says how much is left
    out. Behind each text stands the token that ends a reply. Raises ConfigError for a file that
    cannot be read, DataError for a record that holds no text.
    """
    if section.corpus is None:
        return None
    template, limit = target.template(), section.corpus_tokens
    end = template.stop_ids[0] if template.end_of_turn is None else template.end_of_turn
    ids: list[int] = []
    records = left_out = 0
    for where, line in _lines(section.corpus):
        records += 1
        if len(ids) >= limit:
            left_out += 1
            continue
        for text in _ids(line, where, template.encode, model.vocabulary):
            ids += [*text, end]
    if not ids:
        raise _unreadable(section.corpus, "holds no text")
    tokens = torch.tensor(ids[:limit], device=model.device)
    index = CorpusIndex(tokens, model.vocabulary, section.max_match)
    taken = f"{len(index):,} tokens of {records - left_out:,} records"
    notice("drafter", f"corpus: {taken}, {index.bytes / 2**20:,.1f} MiB")
    if left_out or len(ids) > limit:
        end_of_last = f"the last {len(ids) - limit:,} tokens of the last one taken"
        lost = f"left out: {left_out:,} records behind them, and {end_of_last}"
        notice("drafter", f"corpus: {lost} (drafter.corpus_tokens={limit})")
    return index


def _lines(source: str) -> Iterator[tuple[str, str]]:
    """(file:line, text) of every line that is not blank."""
    import fsspec  # type: ignore[import-untyped]

    try:
        path = refuse_other_kinds(source)
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            lines = ((f"{source}:{number}", line) for number, line in enumerate(file, 1))
            yield from ((where, line) for where, line in lines if line.strip())
    except FileNotFoundError:
        raise _unreadable(source, "no such file") from None
    except UnicodeDecodeError as error:
        raise _unreadable(source, f"is not UTF-8: {error}") from None
    except (OSError, EOFError, zlib.error, ValueError, ImportError) as error:
        raise _unreadable(source, f"cannot be read: {error}") from None


def _unreadable(source: str, problem: str) -> ConfigError:
    fix = "name a JSONL file of texts, or leave it out"
    return ConfigError(f"{source}: {problem}", where="drafter.corpus", fix=fix)


def _ids(
    line: str, where: str, encode: Callable[[str], list[int]], vocabulary: int
) -> Iterator[Sequence[int]]:
    """Token ids of a line's text, or of each of its turns. Raises DataError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON: {error}"
        raise DataError(problem, where=where, fix="correct or remove that line") from None
    values = record if isinstance(record, dict) else {}
    ids, turns = values.get("token_ids"), values.get("turns", [values.get("text")])
    if ids is not None:
        if not _is_list_of(ids, int) or not all(0 <= token < vocabulary for token in ids):
            problem = f"token_ids is no list of numbers from 0 to {vocabulary - 1}"
            raise DataError(problem, where=where, fix="use the target's own token ids")
        yield ids
    elif _is_list_of(turns, str):
        try:
            "".join(turns).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which no tokenizer takes
            problem, fix = "a text is not valid Unicode", "correct or remove that line"
            raise DataError(problem, where=where, fix=fix) from None
        yield from map(encode, turns)
    else:
        fix = "write one JSON object a line with text, turns (texts) or token_ids"
        raise DataError("the record holds no text", where=where, fix=fix)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)

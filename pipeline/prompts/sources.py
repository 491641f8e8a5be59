"""All configured sources: their prompts, unique ids, and how many records they hold.

A prompt is identified by its source and its id. A record's own `source` and `id` are kept. Without
them a file contributes its name and the record's number, preceded by as many folders as distinguish
it from the other sources:

    a/train.jsonl  b/train.jsonl  b/test.jsonl.gz    →  a/train   b/train   test
    train.jsonl    train.parquet                     →  train.jsonl   train.parquet
    hub:org/name   hub:org/name with split: test     →  org/name/train   org/name/test

Names depend on which sources there are, not on their order. Where two records have the same pair,
the later one's id gets a digest of its text: 17, then 17~5f0c21aa. Nothing is dropped for its id.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from pipeline.config import SourceSpec, store_timeout_seconds
from pipeline.errors import DataError, MissingPackage
from pipeline.prompts.bad_records import BadRecords, usable
from pipeline.prompts.draw import EVEN, Balance, draw
from pipeline.prompts.files import PARQUET, count_rows, open_file, plain, read_file
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS, to_prompt
from pipeline.records import Prompt, canonical_json


def load_prompts(specs: Sequence[SourceSpec], *, seed: int) -> list[Prompt]:
    """As `stream_prompts`, all of them in memory."""
    return list(stream_prompts(specs, seed=seed))


def stream_prompts(
    specs: Sequence[SourceSpec],
    *,
    seed: int,
    balance: Balance = EVEN,
    bad: BadRecords | None = None,
    is_new: IsNew | None = None,
) -> Iterator[Prompt]:
    """Prompts of every source in configured order, each within its own `limit`, one at a time.

    Draws follow `balance`. No two prompts have both source and id in common; `is_new` remembers
    which there were. Raises DataError for a missing or malformed source, and a bad record unless it
    may go into `bad`; MissingPackage for a hub data set without datasets. A source that cannot be
    read at all is told before the first prompt.
    """
    is_new = is_new or remembered()
    for spec in specs:
        if next(read_source(spec, None if bad is None else BadRecords()), None) is None:
            fix = "remove the source or correct its path"
            raise DataError("holds no prompts", where=spec.source, fix=fix)
    for spec, name in zip(specs, source_names(specs), strict=True):
        prompts = with_unique_ids(read_source(spec, bad, name), is_new)
        yield from draw(prompts, spec.limit, seed, balance)


def require_files(specs: Sequence[SourceSpec]) -> None:
    """Raise DataError for a file that is not there or cannot be opened; nothing else is read."""
    for spec in specs:
        if not spec.source.startswith("hub:"):
            open_file(spec.source, unpack=False).close()


def read_source(
    spec: SourceSpec, bad: BadRecords | None = None, name: str | None = None
) -> Iterator[Prompt]:
    """Prompts of one source, from `read_at_most` records; its `limit` is the caller's to draw."""
    prompts = _read(spec, bad, name or source_names([spec])[0])
    return (_with_configured_fields(prompt, spec) for prompt in prompts)


def _read(spec: SourceSpec, bad: BadRecords | None, name: str) -> Iterator[Prompt]:
    kind, separator, _ = spec.source.partition(":")
    if separator and kind == "hub":
        return read_hub(spec, name, bad)
    return read_file(spec, name, bad)


def _with_configured_fields(prompt: Prompt, spec: SourceSpec) -> Prompt:
    """The source's configured licence, category and sampling win over the record's own.

    Forbidding terms win over any licence.
    """
    forbidden = spec.forbids_competing_models or prompt.license == FORBIDS_COMPETING_MODELS
    configured = {
        "license": FORBIDS_COMPETING_MODELS if forbidden else spec.license,
        "category": spec.category,
        "sampling": spec.sampling,
    }
    update = {field: value for field, value in configured.items() if value}
    return prompt.model_copy(update=update) if update else prompt


#: Takes 16 bytes, and says whether they are new.
IsNew = Callable[[bytes], bool]


def source_names(specs: Sequence[SourceSpec]) -> list[str]:
    """What the prompts of each source without one of their own have as `source`."""
    ladders = {_place(spec): _ladder(spec, specs) for spec in specs}
    rungs = dict.fromkeys(ladders, 0)
    while True:
        names = {place: ladders[place][rung] for place, rung in rungs.items()}
        counts = Counter(names.values())
        alike = [place for place, name in names.items() if counts[name] > 1]
        higher = [place for place in alike if rungs[place] + 1 < len(ladders[place])]
        if not higher:
            return [names[_place(spec)] for spec in specs]
        for place in higher:
            rungs[place] += 1


def with_unique_ids(prompts: Iterable[Prompt], is_new: IsNew) -> Iterator[Prompt]:
    """The same prompts; an id that its source has given before is changed."""
    repeated: Counter[bytes] = Counter()
    for prompt in prompts:
        if not is_new(_key(prompt.source, prompt.sample_id)):
            prompt = _renamed(prompt, is_new, repeated)
        yield prompt


def _renamed(prompt: Prompt, is_new: IsNew, repeated: Counter[bytes]) -> Prompt:
    text = _digest([prompt.system, *prompt.turns]).hex()
    name = first = f"{prompt.sample_id}~{text[:8]}"
    while not is_new(_key(prompt.source, name)):  # the very same record, once more
        key = _key(prompt.source, first)
        repeated[key] += 1
        name = f"{first}-{repeated[key] + 1}"
    return prompt.model_copy(update={"sample_id": name})


def remembered() -> IsNew:
    """In memory, for as many as an evaluation has."""
    seen: set[bytes] = set()

    def is_new(digest: bytes) -> bool:
        before = len(seen)
        seen.add(digest)
        return len(seen) > before

    return is_new


def _place(spec: SourceSpec) -> tuple[str | None, ...]:
    """What two sources share that give the same records."""
    if spec.source.startswith("hub:"):
        return spec.source, spec.subset, spec.split, spec.revision
    return (spec.source,)


def _ladder(spec: SourceSpec, specs: Sequence[SourceSpec]) -> list[str]:
    """Its names, from the shortest to one that no other source has."""
    kind, separator, name = spec.source.partition(":")
    last = _digest(list(_place(spec))).hex()[:8]
    if separator and kind == "hub":
        parts = [spec.split, spec.subset, spec.revision]
        stated = [part for part in parts if part]
        longer = ["/".join([name, *stated[:count]]) for count in range(len(stated) + 1)]
        return [*longer, f"{name}~{last}"]
    path = _path(spec.source)
    own = _stem(path)
    others = {each for each in map(_path, (other.source for other in specs)) if each != path}
    if any(each.parent == path.parent and _stem(each) == own for each in others):
        own = path.name
    folders = [part for part in path.parent.parts if part not in ("/", "..")]
    counts = range(len(folders) + 1)
    longer = ["/".join([*folders[len(folders) - count :], own]) for count in counts]
    return [*longer, f"{own}~{last}"]


def _path(source: str) -> PurePosixPath:
    """Without the bucket of a remote one: whose it is, is nobody's business."""
    protocol, separator, rest = source.partition("://")
    if separator and protocol not in ("file", "local"):
        rest = rest.partition("/")[2]
    return PurePosixPath(rest if separator else source)


def _stem(path: PurePosixPath) -> str:
    return path.name.split(".")[0] or path.name


def _key(source: str, sample_id: str) -> bytes:
    pair = f"{len(source)} {source}{sample_id}"
    return hashlib.blake2b(pair.encode(), digest_size=16).digest()


def _digest(values: list[str | None]) -> bytes:
    return hashlib.blake2b(canonical_json(values).encode(), digest_size=16).digest()


#: The beginning of a file, whose lines stand for the rest.
_HEAD = 4 << 20
_GZIP = 31  # zlib's window bits for gzip
_LONGEST_TEXT = 64 << 20  # that a compressed beginning is unpacked to
_PACKED = 4  # bytes of records for one byte of a compressed file, about


def record_bytes(spec: SourceSpec) -> int | None:
    """About how many bytes of records the source has; None for a hub data set, which does not say.

    Raises DataError for a file that cannot be opened.
    """
    if spec.source.startswith("hub:"):
        return None
    is_packed = spec.source.endswith((".gz", *PARQUET))
    return _size(spec.source) * (_PACKED if is_packed else 1)


def estimate_records(spec: SourceSpec) -> int | None:
    """About how many records a file or a hub data set has, None where nobody says.

    Of Parquet files exactly; of others from their size and the length of their first lines.
    """
    kind, _, name = spec.source.partition(":")
    if name and kind == "hub":
        return count_hub(name, spec)
    if spec.source.endswith(PARQUET):
        return count_rows(spec.source)
    with open_file(spec.source, unpack=False) as file:
        head = file.read(_HEAD)
    text, read = _unpack(head) if spec.source.endswith(".gz") else (head, len(head))
    return round(text.count(b"\n") * _size(spec.source) / max(1, read))


def _size(source: str) -> int:
    with open_file(source, unpack=False) as file:
        return file.seek(0, os.SEEK_END)


def _unpack(head: bytes) -> tuple[bytes, int]:
    """The text of a compressed file's beginning, and of how many of these bytes it is."""
    text, rest = b"", head
    with suppress(zlib.error):  # whoever reads the records says what is wrong
        while rest and len(text) < _LONGEST_TEXT:  # a file may be several compressed ones in a row
            packed = zlib.decompressobj(_GZIP)
            text += packed.decompress(rest, _LONGEST_TEXT)
            rest = packed.unused_data or packed.unconsumed_tail
    return text, len(head) - len(rest)


def read_hub(spec: SourceSpec, name: str, bad: BadRecords | None = None) -> Iterator[Prompt]:
    """Prompts of one split; `name` is the source of those that have none of their own.

    Raises DataError for a set that cannot be loaded, and for a broken record as `usable` does.
    """
    rows = enumerate(_records(spec), start=1)
    records = ((f"{spec.source}: row {number}", record) for number, record in rows)

    def read(number: int, where: str, record: Any) -> Prompt:
        sample_id = f"{name}:{number}"
        return to_prompt(
            plain(record), where=where, sample_id=sample_id, source=name, field=spec.field
        )

    yield from usable(islice(records, spec.read_at_most), read, bad)


def count_hub(name: str, spec: SourceSpec) -> int | None:
    """Records of the split as its data set tells, None where it does not."""
    try:
        from datasets import load_dataset_builder  # type: ignore[import-untyped]

        builder = load_dataset_builder(name, spec.subset, revision=spec.revision)
        return int(builder.info.splits[spec.split].num_examples) or None
    except Exception:  # as below; whoever reads the records says what is wrong
        return None


def source_at(spec: SourceSpec) -> str:
    """A source with its configured revision."""
    return f"{spec.source}@{spec.revision}" if spec.revision else spec.source


def hub_commits(specs: Iterable[SourceSpec]) -> dict[str, str]:
    """Of the hub data sets among them, the commits that this process reads, by `source_at`.

    Without those of which the Hub says none: whoever reads the records says what is wrong.
    """
    commits = {}
    for spec in specs:
        kind, separator, name = spec.source.partition(":")
        if separator and kind == "hub":
            with suppress(Exception):  # of huggingface_hub and of its HTTP client
                commits[source_at(spec)] = _commit(name, spec.revision)
    return {source: commit for source, commit in commits.items() if commit}


@cache
def _commit(name: str, revision: str | None) -> str | None:
    """None for a directory of that name here, which `datasets` takes instead."""
    if os.path.isdir(name):
        return None
    from huggingface_hub import HfApi

    seconds = store_timeout_seconds()
    return HfApi(library_name="eagle3").dataset_info(name, revision=revision, timeout=seconds).sha


def _records(spec: SourceSpec) -> Iterator[Any]:
    where, name = spec.source, spec.source.removeprefix("hub:")
    try:
        from datasets import load_dataset
    except ImportError:
        fix = "pip install datasets, or export the data set to JSONL and name that file"
        raise MissingPackage("needs the pip package datasets", where=where, fix=fix) from None
    # At the start or in the middle, the library raises whatever network, parser or layout cause.
    try:
        records: Iterable[Any] = load_dataset(
            name,
            spec.subset,
            split=spec.split,
            revision=_commit(name, spec.revision) or spec.revision,
            streaming=True,
        )
        yield from records
    except Exception as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"split {spec.split!r} cannot be loaded: {cause}"
        checks = "check the name, the subset, the split and the network"
        fix = f"{checks}, or export the data set to JSONL"
        raise DataError(problem, where=where, fix=fix) from error

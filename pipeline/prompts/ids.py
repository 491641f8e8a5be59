"""What tells one prompt from all others of a run: the pair of its source and its id.

A record's own `source` and `id` are kept. Without them a file gives its name and the record's
number, with as many folders before it as tell it from the other sources, and none that do not:

    a/train.jsonl  b/train.jsonl  b/test.jsonl.gz    →  a/train   b/train   test
    train.jsonl    train.parquet                     →  train.jsonl   train.parquet
    hub:org/name   hub:org/name with split: test     →  org/name/train   org/name/test

Names depend on which sources there are, not on their order. Where two records have the same pair,
the later one's id gets a digest of its text: 17, then 17~5f0c21aa. Nothing is dropped for its id.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from pipeline.config import SourceSpec
from pipeline.records import Prompt, canonical_json

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
        given = [part for part in parts if part]
        longer = ["/".join([name, *given[:count]]) for count in range(len(given) + 1)]
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

"""Right files made wrong: bytes, and trees of JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = [0, -1, 1, 2**31, 2**40, 2**60, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, float("nan")]
TEXTS = ["", "\x00", "../../etc/passwd", "/dev/zero", "\ud800", "a" * 5000, "\n---\n", "{{ 7 }}"]
VALUES: list[Any] = [*NUMBERS, *TEXTS, None, True, [], {}, [[]], {"a": {"a": {}}}]


def mutate(data: bytes, rng: random.Random, *, tree: bool) -> bytes:
    """`data` after one to three changes; as a tree of JSON mostly, where it is one."""
    for _ in range(rng.randint(1, 3)):
        changed = mutate_tree(data, rng) if tree and rng.random() < 0.7 else None
        data = mutate_bytes(data, rng) if changed is None else changed
    return data


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(8)
    first, kind = rng.randrange(len(data)), rng.randrange(6)
    last = min(len(data), first + rng.choice([1, 4, 8, 64, 1024]))
    match kind:
        case 0:
            return data[:first]
        case 1:
            return data[:first] + data[last:]
        case 2:
            return data[:last] + data[first:]
        case 3:
            return data[:first] + bytes([data[first] ^ 1 << rng.randrange(8)]) + data[first + 1 :]
        case 4:
            size = rng.choice([4, 8])
            number = int(rng.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**60, 2**63]))
            number %= 1 << 8 * size
            return data[:first] + number.to_bytes(size, "little") + data[first + size :]
    return data[:first] + rng.randbytes(last - first) + data[last:]


def mutate_tree(data: bytes, rng: random.Random) -> bytes | None:
    """One value, key or layer of a document of JSON changed; None where it is none."""
    try:
        return _changed(json.loads(data), rng)
    except (ValueError, RecursionError):  # no document, or one that an earlier change has nested
        return None


def _changed(document: Any, rng: random.Random) -> bytes | None:
    places = list(_places(document))
    if not places:
        return None
    owner, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            owner[key] = copy.deepcopy(rng.choice(VALUES))
        case 1:
            del owner[key]
        case 2:
            for _ in range(rng.choice([1, 70, 900])):
                owner[key] = [owner[key]]
        case 3 if isinstance(owner, dict):
            owner[rng.choice(TEXTS)] = owner.pop(key)
        case 4 if isinstance(owner, dict):
            text = json.dumps(document)
            mark = json.dumps(key) + ":"
            return text.replace(mark, f"{mark} 1, {mark}", 1).encode()
        case _:
            _, other = rng.choice(places), rng.choice(places)
            owner[key] = copy.deepcopy(other[0][other[1]])
    return json.dumps(document).encode()


def _places(value: Any) -> Any:
    """Every owner and key of a tree."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(pairs if isinstance(value, dict | list) else ()):
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)

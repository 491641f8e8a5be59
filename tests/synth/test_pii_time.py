"""What a text is made of does not decide how long it is searched.

Seconds here are the processor's. The budget of our own finders is four times what the slowest text
takes (names in one word) and twenty times what the others do; at LENGTH a pattern that goes over a
text once for each of its characters is over it. Shorter texts, of any repetition and with presidio,
only tell what takes the third power or never ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline.config import PiiSection
from pipeline.synth.privacy.filter import PiiFilter, view_of
from pipeline.synth.privacy.recognisers import FINDERS
from pipeline.synth.privacy.secrets import find_secrets

#: Seconds for each 1,000 characters: of our own finders, and with presidio's and spaCy.
OURS, ALL = 0.5, 1.0
LENGTH = 40_000


def find_view(text: str) -> list[object]:
    return [view_of(text)]


SEARCHES: list[Callable[[str], Iterable[object]]] = [find_secrets, find_view]
SEARCHES += [finder for of_entity in FINDERS.values() for finder in of_entity]

#: unit that is repeated, and what comes last
ADVERSARIAL = {
    "letters": ("a", ""),
    "capitals": ("A", ""),
    "ideographs": ("漢", ""),
    "digits": ("1", ""),
    "base 64": ("ab1", ""),
    "a long local part": ("a.b", "@"),
    "a long domain": ("u@h.", " x"),
    "hyphens": ("a-", " 1"),
    "names of many parts": ("Aa-", " 1"),
    "names of many apostrophes": ("Aa'", "; x@y.z"),
    "many names": ("Aaa Bbb ", ","),
    "particles": ("Aa van de ", ""),
    "a street of many words": ("12 a-b ", "1"),
    "links": ("http://a:", ""),
    "a key's name": ("api_key=", "'"),
    "assignments": ("a='b1C2d3E4f5G6h7I8j9K0' ", ""),
    "spaces": (" ", "a"),
    "phone numbers": ("+1 (2) ", ""),
    "blanks behind a name": ("password" + " " * 2_000, "1"),
    "names in one word": ("passworda", "1"),
    "escapes": ("%40&#64;", ""),
    "escapes of escapes": ("%25", "40"),
    "at and dot": (" at a dot", " 1"),
    "brackets": ("a(at", ")"),
    "narrow blanks": ("4\u2009", "x"),
    "mails": ("mail is a ", "@"),
    "cards": ("4111-", "x"),
    "births": ("born 1.", ""),
    "headers": ("-----BEGIN PRIVATE KEY-----", ""),
}


@contextmanager
def budget(text: str, seconds_a_thousand: float) -> Iterator[None]:
    """Time for `text`; what takes twice as long is ended, as exponential patterns never end."""
    allowed = seconds_a_thousand * len(text) / 1000

    def over(*_: object) -> None:
        raise AssertionError(f"over {allowed:.1f} s: {text[:20]!r}…")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(int(2 * allowed) + 1)
    started = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - started < allowed, text[:20]


def repeated(unit: str, last: str, length: int = LENGTH) -> str:
    return (unit * (length // len(unit) + 1))[: length - len(last)] + last


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """detect-secrets is imported by the first text that needs it."""
    list(find_secrets("password = 'abc123DEF456ghi789'"))


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_our_finders_read_a_text_in_linear_time(name: str) -> None:
    text = repeated(*ADVERSARIAL[name])
    for finder in SEARCHES:
        with budget(text, OURS):
            list(finder(text))


SIGNS = st.text("aA1éß漢.-_@:/=+'\"(),; \n", min_size=1, max_size=6)
WORDS = st.sampled_from(
    ["", "password ", "name: ", "call me at ", "lives at ", "card ", "api_key=", "12 rua ", "sk-"]
)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(WORDS, SIGNS, SIGNS)
def test_of_any_repetition(first: str, unit: str, last: str) -> None:
    text = first + repeated(unit, last, 4_000)
    for finder in SEARCHES:
        with budget(text, OURS):
            list(finder(text))


def test_the_whole_filter_reads_them_in_linear_time() -> None:
    pii = PiiFilter(PiiSection())
    for unit, last in ADVERSARIAL.values():
        text = repeated(unit, last, 8_000)
        with budget(text, ALL):
            pii.find_all([text])

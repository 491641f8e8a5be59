"""A text as its reader understands it, beside the text as it is written.

    text    我的邮箱是anna%40firm(dot)com请联系
    view    我的邮箱是 anna@firm.com 请联系
    spans   every character of the view knows the characters that it stands for

Recognisers know one spelling of a thing. What people, forms and web pages write instead is put back
into that spelling here: compatibility forms (NFKC), signs that nobody sees, dashes and blanks of
all kinds, other scripts' digits, escapes of URLs, HTML and JSON, "at" and "dot" in words, and a
blank between an ideograph and what it touches, because for regular expressions both are letters.
A text that is its own view is not searched twice.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import unquote

from pipeline.synth.privacy.finding import Finding

_INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # beside those of class Cf
_DOTS = "\u3002\u00b7\u2022\u2027\u2219"  # ideographic full stop, and dots in the middle
_MINUS = "\u2212\u02d7\u2043"
_PROSE_DASHES = "\u2013\u2014\u2015"  # every other text has one: they count between digits only
_RANGE = rf"(?<=\d)[{_PROSE_DASHES}](?=\s?\d)|(?<=\d\s)[{_PROSE_DASHES}](?=\s?\d)"

_URL_ESCAPE = r"(?:%[0-9A-Fa-f]{2})++"
_HTML_ESCAPE = r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8});"
_CODE_ESCAPE = r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})"
_ESCAPE = re.compile(f"{_URL_ESCAPE}|{_HTML_ESCAPE}|{_CODE_ESCAPE}")
_MAX_ESCAPES = 2  # one within another: %2540

_LABEL = r"[\w\-]{1,63}"
_OPEN, _CLOSE = r"(?<=\w)\s{0,2}[\[({<]\s?", r"\s?[\])}>]\s{0,2}"
#: "At" and "dot" go together by language: "at this point in" is no address.
_SPELT = re.compile(
    # anna (at) firm [dot] com
    rf"{_OPEN}(?P<at>at|ät|arroba|arobase|(?<=[(])a(?=[)])|@){_CLOSE}(?={_LABEL}\s{{0,2}}[.\[({{<])"
    rf"|{_OPEN}(?P<dot>dot|punkt|punto|ponto|point|\.){_CLOSE}(?=\w)"
    # anna at firm dot com · anna @ firm . com
    rf"|(?<=\w)(?P<words> at (?!the |a ){_LABEL}(?: (?:dot|punkt) {_LABEL}){{1,4}}"
    rf"| ät {_LABEL}(?: punkt {_LABEL}){{1,4}}| arroba {_LABEL}(?: (?:punto|ponto) {_LABEL}){{1,4}}"
    rf"| arobase {_LABEL}(?: point {_LABEL}){{1,4}}| @ {_LABEL}(?:(?: \. |\.){_LABEL}){{1,4}})\b"
    # my mail is anna at firm.com
    rf"|(?<=mail)(?P<mail>(?: address)? ?(?:is|ist|:|=) [\w.\-]{{1,40}} (?:at|ät|@) {_LABEL}"
    rf"(?:\.{_LABEL}){{1,4}})",
    re.IGNORECASE,
)
#: What `_SPELT` cannot do without.
_HINTS = (
    *("@", "dot", "punkt", "punto", "ponto", "arroba", "arobase", "ät", "mail"),
    *("at)", "at]", "at}", "at>", "(a)", "[.]"),
)
_WORD = re.compile(
    r" (?P<at>at|ät|arroba|arobase) | ?(?P<sign>@) ?| (?:dot|punkt|punto|ponto|point|\.) | ?\. ?",
    re.IGNORECASE,
)
_GLUED = re.compile(r"(?<=[a-z0-9])AT(?=[a-z0-9\-]{1,63}DOT[a-z])|(?<=[a-z0-9])DOT(?=[a-z])")

_IDEOGRAPH = r"[\u0e00-\u0e7f\u1100-\u11ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"
_BESIDE_IDEOGRAPH = re.compile(
    rf"(?<={_IDEOGRAPH})(?=[A-Za-z0-9+(])|(?<=[A-Za-z0-9)])(?={_IDEOGRAPH})"
)


class View(NamedTuple):
    """What is searched; its character i stands for [starts[i], ends[i]) of the source."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def in_source(self, finding: Finding) -> Finding:
        """A finding in the view as one in the text that it is a view of."""
        start, end = self.starts[finding.start], self.ends[finding.end - 1]
        return finding._replace(start=start, end=end)


def view_of(text: str) -> View | None:
    """The view of `text`, None where it says nothing new."""
    view = View(text, range(len(text)), range(1, len(text) + 1))
    for _ in range(_MAX_ESCAPES):
        view = _replaced(view, _ESCAPE, _unescaped)
    if not view.text.isascii():
        plain = {sign: _plain(sign) for sign in set(view.text)}
        unlike = [s for s in plain if plain[s] != s and s not in _PROSE_DASHES]
        signs = re.compile(f"[{''.join(map(re.escape, unlike))}]|{_RANGE}" if unlike else _RANGE)
        view = _replaced(view, signs, lambda match: plain[match[0]])
        view = _replaced(view, _BESIDE_IDEOGRAPH, lambda _: " ")
    if "DOT" in text:
        view = _replaced(view, _GLUED, lambda match: "@" if match[0] == "AT" else ".")
    lower = view.text.lower()
    if any(hint in lower for hint in _HINTS):
        view = _replaced(view, _SPELT, _spelt_out)
    return view if view.text and view.text != text else None


def _plain(sign: str) -> str:
    """The plainest equal of one character."""
    category = unicodedata.category(sign)
    if category == "Cf" or sign in _INVISIBLE or "\ufe00" <= sign <= "\ufe0f":
        return ""
    if category == "Nd":
        return str(unicodedata.digit(sign))
    if category == "Pd" or sign in _MINUS:
        return "-"
    if category == "Zs":
        return " "
    return "." if sign in _DOTS else unicodedata.normalize("NFKC", sign)


def _unescaped(match: re.Match[str]) -> str:
    escape = match[0]
    if escape[0] == "%":
        return unquote(escape)
    if escape[0] == "&":
        return html.unescape(escape)
    sign = chr(int(escape[2:], 16))
    return escape if "\ud800" <= sign <= "\udfff" else sign  # half of one: not for recognisers


def _spelt_out(match: re.Match[str]) -> str:
    if match["at"] or match["dot"]:
        return "@" if match["at"] else "."
    return _WORD.sub(lambda word: "@" if word["at"] or word["sign"] else ".", match[0])


def _replaced(
    view: View, regex: re.Pattern[str], replacement: Callable[[re.Match[str]], str]
) -> View:
    """`view` with every match replaced; each new character stands for all that was replaced."""
    pieces: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    position = 0
    for match in regex.finditer(view.text):
        first, last = match.span()
        new = replacement(match)
        pieces += [view.text[position:first], new]
        # Nothing is replaced where a blank goes in: it stands for the character before it.
        first_source, last_source = (first, last - 1) if last > first else (first - 1, first - 1)
        starts += [*view.starts[position:first], *[view.starts[first_source]] * len(new)]
        ends += [*view.ends[position:first], *[view.ends[last_source]] * len(new)]
        position = last
    if not pieces:
        return view
    pieces.append(view.text[position:])
    starts += view.starts[position:]
    ends += view.ends[position:]
    return View("".join(pieces), starts, ends)

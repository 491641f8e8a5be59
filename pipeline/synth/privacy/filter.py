"""Personal data and secrets in text.

    presidio with a real spaCy pipeline   what checksums, formats and a language model can tell
    recognisers                           where presidio is weak (docs/pii.md has the measurements)
    secrets                               credentials
    dlp                                   another inspector, where the run names one

All of them report findings with a score; thresholds are applied here, reserved values are left out,
and overlapping findings become one. Only entity types, offsets, counts and salted hashes leave this
module's callers. A text in an unusual spelling is searched twice, as it is written and as its
reader understands it:

    text    我的邮箱是anna%40firm(dot)com请联系
    view    我的邮箱是 anna@firm.com 请联系
    spans   every character of the view knows the characters that it stands for

The view undoes compatibility forms (NFKC), invisible signs, dashes and blanks of all kinds, other
scripts' digits, escapes of URLs, HTML and JSON, "at" and "dot" in words, and puts a blank between
an ideograph and what it touches, because for regular expressions both are letters.
"""

from __future__ import annotations

import html
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from pipeline.config import DlpSection, PiiSection
from pipeline.errors import ConfigError, MissingPackage
from pipeline.synth.privacy.analyzer import Analyzer
from pipeline.synth.privacy.finding import Finder, Finding, above_threshold, without_overlap
from pipeline.synth.privacy.recognisers import FINDERS, mislabelled_names
from pipeline.synth.privacy.reserved import marked, somebodys
from pipeline.synth.privacy.secrets import SECRET_ENTITIES, find_secrets

#: Of what our own finders find. A run that was begun with another version stops; a test fails when
#: they find other texts under the same one.
FINDERS_VERSION = "9067cbdc638dd99d"


class Inspector(Protocol):
    """A further detector over many texts; its findings are taken as they are, at any score."""

    def inspect(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text."""


class PiiFilter:
    """Detects the configured entities, and secrets.

    Raises MissingPackage when presidio, detect-secrets or the spaCy pipeline is not installed,
    ConfigError for an entity type that nothing here finds.
    """

    def __init__(
        self,
        section: PiiSection,
        dlp: DlpSection | None = None,
        *,
        inspector: Inspector | None = None,
    ) -> None:
        _require("presidio_analyzer", "presidio-analyzer", "synth.pii")
        model = section.spacy_model
        _require(model, model.replace("_", "-"), "synth.pii.spacy_model")
        if section.secrets:
            _require("detect_secrets", "detect-secrets", "synth.pii.secrets")
        entities = {*section.entities, *(spec.entity for spec in section.recognizers)}
        self._analyzer = Analyzer(section, entities)
        by_presidio = self._analyzer.supported_entities
        _check_entities(section, by_presidio | set(FINDERS), by_presidio)
        ours = sorted(entities & set(FINDERS))
        self._finders: list[Finder] = [finder for entity in ours for finder in FINDERS[entity]]
        if section.secrets:
            self._finders.append(find_secrets)
        self._finds_names = "PERSON" in entities
        self._threshold, self._thresholds = section.score_threshold, section.thresholds
        self._inspector = inspector or _open_inspector(dlp or DlpSection())
        self.entities = sorted({*entities, *(SECRET_ENTITIES if section.secrets else ())})
        self.uses_ner = self._analyzer.uses_ner

    def find_all(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text that are somebody's, in text order, none overlapping."""
        return [without_overlap(somebodys(of_text)) for of_text in self.find_overlapping(texts)]

    def find_overlapping(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text, unmerged: the same characters may be of several types."""
        inspected = self._inspector.inspect(texts) if self._inspector else [[] for _ in texts]
        views = {number: view for number, text in enumerate(texts) if (view := view_of(text))}
        searched = self._search([*texts, *(view.text for view in views.values())])
        findings = searched[: len(texts)]
        for text, of_text, further in zip(texts, findings, inspected, strict=True):
            of_text += marked(text, further)
        for (number, view), in_view in zip(views.items(), searched[len(texts) :], strict=True):
            findings[number] += map(view.in_source, in_view)
        return findings

    def check(self, text: str) -> list[str]:
        """Entity types found in `text`, sorted."""
        return sorted({finding.entity for finding in self.find_all([text])[0]})

    def _search(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text by presidio and our own finders, those that reach a threshold."""
        return [
            marked(text, above_threshold(findings, self._threshold, self._thresholds))
            for text, findings in zip(texts, self._find_all_scores(texts), strict=True)
        ]

    def _find_all_scores(self, texts: Sequence[str]) -> Iterator[list[Finding]]:
        for text, (by_presidio, document) in zip(texts, self._analyzer.analyse(texts), strict=True):
            own = [finding for finder in self._finders for finding in finder(text)]
            names = mislabelled_names(document) if self._finds_names else ()
            yield [*by_presidio, *own, *names]


def _check_entities(section: PiiSection, known: set[str], by_presidio: set[str]) -> None:
    """A misspelt type would silently never be found, nor words that no recogniser looks for."""
    with_secrets = known | set(SECRET_ENTITIES)
    for field, entities, allowed in (
        ("entities", section.entities, known),
        ("thresholds", section.thresholds, with_secrets),
        ("context_words", section.context_words, by_presidio),
    ):
        for entity in entities:
            if entity not in allowed:
                raise ConfigError(
                    f"no recogniser finds {entity!r}",
                    where=f"synth.pii.{field}",
                    fix=f"choose among {', '.join(sorted(allowed))}",
                )


def _open_inspector(section: DlpSection) -> Inspector | None:
    if section.project is None:
        return None
    from pipeline.synth.privacy.dlp import GoogleInspector

    return GoogleInspector(section)


def _require(module: str, package: str, where: str) -> None:
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        without = "set synth.pii.enabled=false for data known to be free of personal data"
        fix = f"pip install {package}, or {without}"
        raise MissingPackage(f"the pip package {package} is not installed", where=where, fix=fix)


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

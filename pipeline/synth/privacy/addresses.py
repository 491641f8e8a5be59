"""Postal addresses, by the parts that make one.

    85 Kongshøj Allé 70        number and a street's name, in the order of its country
    Apt. 252                   a unit
    Kruså, CA 94110            a place with its postcode
    ───────────────── neighbouring parts are one address

One part alone is weak: prompts are full of "5 apples" and "Baker Street". Two different parts that
touch, or a part behind words such as "lives at", score high.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.synth.privacy.finding import Finding

_HIGH, _MEDIUM, _LOW = 0.85, 0.65, 0.4
#: Characters between two parts of one address at most, none of them a digit or a sentence's end.
_MAX_GAP = 16
#: The same across lines and commas: "Apt. 252⏎ Črni Vrh⏎ Slovenia 15755".
_MAX_GAP_ACROSS_LINES = 45

_WORD = r"[^\W\d_][\w.'’\-]{0,40}+"  # with a limit: it may begin after each hyphen
_NAME = rf"(?:{_WORD}[ ]){{0,4}}"
#: Words before a name that are part of it: "Alte" in Alte Lindenstraße.
_CAPITALISED = r"(?-i:[A-ZÀ-Þ][\w.\-]{0,40}+[ ]){0,2}"
_NUMBER = r"\d{1,5}(?:[/\-]\d{1,4})?[A-Za-z]?"
#: Words that end a street's name. These hardly mean anything else behind a number; the next table's
#: do, as in "3 fields" or "12 points".
_STREET = (
    "street|road|rd|avenue|ave|lane|drive|boulevard|blvd|parkway|pkwy|highway|hwy|crescent|marg|"
    "nagar|chowk|ganj|zila|allé|vei|vej|utca|útja|tér|körút|katu|tänav|sokak"
)
_STREETLIKE = (
    "st|dr|ln|court|ct|place|pl|square|sq|way|terrace|close|circle|trail|loop|alley|row|walk|mews|"
    "grove|gardens?|hill|ridge|view|village|isle|islands?|creek|estates?|extension|flats?|fords?|"
    "forks?|glens?|greens?|harbors?|heights|hollow|knolls?|lakes?|landing|lodge|manors?|meadows?|"
    "mills?|mount|mountains?|park|path|passage|pike|pines?|plains?|plaza|points?|port|prairie|"
    "ranch|rapids|river|route|rue|run|shoals?|shores?|springs?|stravenue|stream|summit|trace|"
    "track|turnpike|union|valley|via|viaduct|villes?|vista|wells?|bluffs?|branch|bridge|brooks?|"
    "bypass|camp|canyon|cape|causeway|cliffs?|club|common|corners?|course|coves?|crest|crossing|"
    "curve|dale|divide|gate|tie|veien|u"
)
_COMPOUND = (
    r"(?:stra(?:ss|ß)e|str\.|weg|gasse|platz|allee|damm|ufer|gata|gatan|gatu|vägen|väg|stigen|"
    r"gränd|vej|gade|veien|vegen|vei|vegur|laan|straat|plein|kade|gracht|singel|dijk|katu|tie|"
    r"kuja|polku|raitti|götu|braut|allé|tie|lia|bakken|plads|torv|stræde)"
)
_LEADING = (
    "rua|via|viale|vicolo|piazza|corso|strada|stretto|rotonda|borgo|largo|calle|c/|callejón|"
    "cañada|camino|carrera|avenida|av|avda|alameda|paseo|pasaje|plaza|ronda|rambla|glorieta|"
    "urbanización|acceso|cuesta|vial|travessa|praça|ladeira|rue|boulevard|chemin|impasse|quai|"
    "allée|avenue|place|ul|ulica|al|aleja|plac|os|pl|calea|bulevardul|trg|cesta|ulice|ulitsa|"
    "prospekt|jalan|jl|calçada|campo|canale|contrada|incrocio|piazzetta|rivolta|salita|"
    "urbanizacion"
)
_UNIT = (
    r"\b(?:suite|apt\.?|apartment|unit|flat|studio|floor|room|piso|piano|puerta|appartamento|"
    r"interno|h\.? ?no\.?|house no\.?)[ ]?#?\d{1,5}[A-Za-z]?\b"
    r"|\bP\.? ?O\.? Box \d+|\bpostbox \d+|\bPSC \d+,? Box \d+|\bUnit \d+,? Box \d+"
)
_STATE = (
    "AL|AK|AZ|AR|CA|CO|CT|DE|FL|GA|HI|ID|IL|IN|IA|KS|KY|LA|ME|MD|MA|MI|MN|MS|MO|MT|NE|NV|NH|NJ|NM|"
    "NY|NC|ND|OH|OK|OR|PA|RI|SC|SD|TN|TX|UT|VT|VA|WA|WV|WI|WY|DC|AS|GU|MP|PR|VI|FM|MH|PW|NSW|QLD|"
    "VIC|TAS|ACT|NT"
)
_STREET_BEFORE_NUMBER = r"utca|u\.|útja|tér|köz|körút|sor|tänav|sokak|vej|vei|allé|gate|kadu"
_STREET_BEFORE_NAME = r"rue|avenue|boulevard|via|rua|avenida|calle|ul\."

#: kind of part → its regexes.
_PARTS: dict[str, tuple[str, ...]] = {
    "street": (
        rf"(?<![\w.]){_NUMBER},?[ ]{_NAME}(?:{_STREET})\b\.?(?:[ ]\d{{1,4}}[a-z]?\b)?",
        rf"(?<![\w.])(?:{_NUMBER},?[ ])?{_CAPITALISED}"
        rf"(?:[^\W\d_][\w\-]{{1,40}}{_COMPOUND}|Strasse|Straße|út)[ ]\d{{1,4}}(?:-\d+)?[a-z]?\b",
        rf"(?<!\w){_WORD}[ ](?:{_STREET_BEFORE_NUMBER})[ ]\d{{1,4}}\b\.?",
        rf"(?<![\w.])(?:{_NUMBER},?[ ])(?:{_STREET_BEFORE_NAME})[ ]{_NAME}{_WORD}",
    ),
    "streetlike": (
        rf"(?<![\w.]){_NUMBER},?[ ]{_NAME}(?:{_STREETLIKE})\b\.?(?:[ ]\d{{1,4}}[a-z]?\b)?",
        rf"(?<![\w.])(?:{_NUMBER},?[ ])(?:{_LEADING})\.?[ ]{_NAME}{_WORD}",
        rf"(?<!\w)(?:{_NUMBER},?[ ])?(?:{_LEADING})\.?[ ]{_NAME}{_WORD},?[ ]\d{{1,4}}[a-z]?\b",
        rf"(?<![\w.])\d{{1,5}}[ ]{_NAME}{_WORD}[ ]\d{{1,5}}\b",
    ),
    "unit": (_UNIT,),
    "forces": (r"\b(?:APO|FPO|DPO)[ ](?:AA|AE|AP)[ ]\d{5}\b",),
    "city": (rf"\b{_NAME}{_WORD}\s?,?\s+(?:{_STATE})\s+\d{{5}}(?:-\d{{4}})?\b",),  # City, ST 12345
    "place": (
        r"\b[A-Z]{1,2}\d[A-Z\d]?[ ]\d[A-Z]{2}\b",  # United Kingdom
        r"\b[A-Z]\d[A-Z][ ]?\d[A-Z]\d\b",  # Canada
        r"\b\d{4}[ ]?[A-Z]{2}\b",  # Netherlands
        r"\b\d{5}[ ](?=[^\W\d_]{3})" + _WORD,  # most of Europe: before the place
        r"\b\d{2}-\d{3}[ ]" + _WORD,  # Poland
        r"\b\d{5}-\d{3}\b",  # Brazil
        r"(?<=[^\W\d_][ \-])\d{5,6}\b",  # India, and 5 digits behind a name
    ),
    "corner": (rf"\bcorner of (?:the )?{_NAME}{_WORD}(?: \d+)?\.? (?:St\.? )?and {_NAME}{_WORD}",),
}
_CASE_MATTERS = frozenset({"city", "place"})
_NEEDS_CAPITAL = frozenset({"street", "streetlike"})  # some word of theirs begins with one

_WITHOUT_LINES = frozenset({"city", "corner"})  # may go over lines, or have no digit of its own

_REGEXES = {
    kind: re.compile("|".join(regexes), 0 if kind in _CASE_MATTERS else re.IGNORECASE)
    for kind, regexes in _PARTS.items()
}
_CAPITAL = re.compile(r"[A-ZÀ-ÞΑ-ΩА-Я]")
_LINE_WITH_DIGIT = re.compile(r"^[^\n\d]*+\d[^\n]*", re.MULTILINE)

#: What announces an address; the address then reaches to the end of the clause.
_ANNOUNCED = re.compile(
    r"(?:\b(?:liv(?:e|es|ed|ing)|resid(?:e|es|ed|ing)|located|situated|moved|delivered?|"
    r"ship(?:ped)?|office is|offices are|house is)\s(?:at|on|to)\s"
    r"|\b(?:address|adr|anschrift|adresse|dirección)\b(?:\s(?:of|for|to)\s[^\n:]{1,40}?)?"
    r"(?:\s(?:is|with|to(?: the same)?)\b)?\s?[:,]?\s"
    r"|\bsend (?:it|a new one|them|this)\sto\s)"
    r"(?P<value>(?=[^\n.?!]{0,40}\d)[^\n?!;|\"]{3,80}?)"
    r"(?=$|[\n?!;|\"]|\.\s|,? (?:and I|hereby|applying|for this|in |ask ))",
    re.IGNORECASE,
)


def find_addresses(text: str) -> Iterator[Finding]:
    """Addresses of a text: announced ones, and sequences of neighbouring parts."""
    for match in _ANNOUNCED.finditer(text):
        if any(regex.search(match["value"]) for regex in _REGEXES.values()):
            yield Finding(*match.span("value"), "ADDRESS", _HIGH)
    yield from _join_neighbours(text, sorted(_find_parts(text)))


def _find_parts(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, kind) of every part."""
    lines = [line.span() for line in _LINE_WITH_DIGIT.finditer(text)]
    everything = [(0, len(text))] if lines else []
    for kind, regex in _REGEXES.items():
        for span in everything if kind in _WITHOUT_LINES else lines:
            for match in regex.finditer(text, *span):
                if kind not in _NEEDS_CAPITAL or _CAPITAL.search(match[0]):
                    yield match.start(), match.end(), kind


def _join_neighbours(text: str, parts: list[tuple[int, int, str]]) -> Iterator[Finding]:
    """Neighbouring parts as one finding; the more kinds, the higher its score."""
    while parts:
        start, end, kind = parts.pop(0)
        kinds = {kind}
        while parts and _is_gap_within_address(text[end : parts[0][0]]):
            _, part_end, kind = parts.pop(0)
            end = max(end, part_end)
            kinds.add(kind)
        yield Finding(start, end, "ADDRESS", _score(kinds))


def _is_gap_within_address(gap: str) -> bool:
    max_gap = _MAX_GAP_ACROSS_LINES if "\n" in gap or "," in gap else _MAX_GAP
    return len(gap) <= max_gap and not re.search(r"[!?;:]|[.](?=[ ][A-Z])|\d|\n\s*\n", gap)


def _score(kinds: set[str]) -> float:
    if len(kinds - {"streetlike"}) > 1 or kinds & {"forces"}:
        return _HIGH
    return _MEDIUM if len(kinds) > 1 or kinds & {"street", "corner", "unit", "city"} else _LOW

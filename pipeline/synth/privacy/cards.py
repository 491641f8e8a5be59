"""Payment cards: by checksum and scheme in any grouping, or by the word or field that names them.

    4929 5260 1815 9081 · 4929-5260-… · 4929.5260.…     12 to 19 digits that pass Luhn and begin as
    3612 345678 9012 · 6228378657975432313              Visa, Diners, UnionPay and others do
    {"pan": "4929526018159084"} · Kartennummer: 4929…   named: mistyped, but somebody's

A number with other digits beside it ("12/27 4929 5260 1815 9081 123") is looked for among its
groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.synth.privacy.finding import Finder, Finding, pattern_finder

_VALID, _ANNOUNCED = 0.9, 0.7

_SEPARATOR = r"(?:[ .\-]| - )"
_RUN = re.compile(rf"(?<![\w#])(?<!\d\.)\d++(?:{_SEPARATOR}\d++){{0,30}}+(?![\w%]|\.\d)")
_IBAN_BEGINS = re.compile(r"\b[A-Z]{2}\d\d(?:[ \-]?[A-Z0-9]{4}){0,2}[ \-]$")
_DIGITS = re.compile(r"\d+")
#: Beginning → number of digits, by issuer's range.
_SCHEMES = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}|(?:30[0-5]|309|36\d|3[89]\d)\d{11,16}"  # American Express, Diners
    r"|(?:6011|64[4-9]\d|65\d\d)\d{12,15}"  # Discover
    r"|35(?:2[89]|[3-8]\d)\d{12,15}|(?:1800|2131)\d{11}"  # JCB
    r"|(?:62|81)\d{14,17}|220[0-4]\d{12,15}|9792\d{12}"  # UnionPay, Mir, Troy
    r"|(?:50\d\d|5[6-9]\d\d|6304|6390|67\d\d|0604)\d{8,15}"  # Maestro
    r"|(?:60|508[0-9]|353|356)\d{13,14}|(?:5019|4571)\d{12}"  # RuPay, Dankort
)
_MIN_GROUP = 4  # digits of the first group, where only some groups of a run are the number


def _find_valid_cards(text: str) -> Iterator[Finding]:
    for run in _RUN.finditer(text):
        if _IBAN_BEGINS.search(text, max(0, run.start() - 20), run.start()):
            continue
        groups = [
            (m.start() + run.start(), m.end() + run.start()) for m in _DIGITS.finditer(run[0])
        ]
        for first, last in _candidates([end - start for start, end in groups]):
            start, end = groups[first][0], groups[last][1]
            if is_card(re.sub(r"\D", "", text[start:end])):
                yield Finding(start, end, "CREDIT_CARD", _VALID)


def _candidates(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of the groups that may be one number: all of them, or some that are long."""
    last = len(sizes) - 1
    if 12 <= sum(sizes) <= 19:
        yield 0, last
    for first, size in enumerate(sizes):
        total = 0
        for end in range(first, min(last, first + 4) + 1):
            total += sizes[end]
            if size >= _MIN_GROUP and 12 <= total <= 19 and (first, end) != (0, last):
                yield first, end


def is_card(digits: str) -> bool:
    """Of a known scheme, and with a valid check digit (Luhn)."""
    if _SCHEMES.fullmatch(digits) is None:
        return False
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


#: In prose there may be words between, in data there are only signs.
_WORD = (
    r"(?:(?:credit|debit|bank)?\s?card|kredit-?karte|karte|tarjeta|carte|carta|cart[aã]o|kaart|"
    r"visa|master ?card|amex|american express|discover|diners|maestro)s?(?:nummern?)?"
)
_CJK_WORD = "卡号|银行卡|信用卡|カード番号|카드\\s?번호"
_FIELD = (
    r"(?:\w{0,20}card\w{0,20}|\w{0,20}kartennummer|pan|ccn?|cc_?(?:num(?:ber)?|no)|num_carte|"
    r"num_tarjeta|acct_?num)"
)
_NUMBER = rf"(?P<value>\d(?:{_SEPARATOR}?\d){{11,18}})(?![\w\-])"
_PATTERNS = (
    (rf"\b{_WORD}\b[^\n.;]{{0,40}}?(?<!\d){_NUMBER}", _ANNOUNCED),
    (rf"(?:{_CJK_WORD})[^\n.;]{{0,12}}?(?<!\d){_NUMBER}", _ANNOUNCED),
    (
        rf"(?<![^\W_]){_FIELD}\\?[\"']?\]?[ \t]{{0,3}}(?:[:=,]|=>)?[ \t]{{0,3}}\\?[\"']?{_NUMBER}",
        _ANNOUNCED,
    ),
)

CARD_FINDERS: tuple[Finder, ...] = (
    _find_valid_cards,
    pattern_finder("CREDIT_CARD", _PATTERNS, digits=12),
)

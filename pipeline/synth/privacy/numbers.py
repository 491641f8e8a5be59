"""Phone, card, account and social-security numbers, where presidio's own recognisers are weak.

Presidio trusts a number when its checksum or its country's numbering plan does. People write
numbers that pass neither: foreign, local, mistyped or made up. What surrounds them says what they
are, so every kind here has two readings:

    formatted as nothing else is        +44 20 7946 0018, (212) 555-0187 x12, 219-09-9999
    announced, or labelled afterwards   call me on 481 7531 · 089 72 63 41 office · card number 4131034282458
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.synth.privacy.finding import Finder, Finding, pattern_finder

_SURE, _LIKELY = 0.85, 0.7

_NOT_INSIDE = r"(?<![\w./=#\-])(?<!\d,)"  # not the tail of a longer number, path or decimal
_EXTENSION = r"(?:\s?(?:x|ext\.?)\s?\d{1,6})?"
_ENDS = r"(?![\w/]|[.,\-]\d)"

#: 7 to 15 digits in groups; the separators are those that people put into phone numbers.
_DIGITS = r"(?:\+|00)?(?:[(]\d{1,5}[)][ .\-]?)?\d(?:[ .\-/]{0,2}(?:[(]0[)])?\d){4,14}" + _EXTENSION

_INTERNATIONAL = (
    r"(?<![\w+])(?=\+(?:\D{0,2}\d){8})\+\d{1,3}(?:[ .\-]?[(]?\d{1,5}[)]?){2,6}" + _EXTENSION + _ENDS
)
_NORTH_AMERICAN = (
    _NOT_INSIDE
    + r"(?:(?:\+|00)?1[ .\-])?(?:[(]\d{3}[)][ ]?|\d{3}[ .\-])\d{3}[.\-]\d{4}"
    + _EXTENSION
    + _ENDS
)
_AREA_CODE = _NOT_INSIDE + r"[(]0?\d{2,5}[)][ ]?\d{3,4}[ \-]?\d{3,4}" + _EXTENSION + _ENDS

_PHONE_WORD = r"(?:tele|cell)?phone|t[eé]l[eé]?(?:[fp]h?on\w*)?|mobile|m[oó]vil|mobil|cell|fax|whats ?app|sms|hotline|handy|rufnummer"
_ANNOUNCED = (
    rf"\b(?:{_PHONE_WORD})\b(?:\s?(?:no|nr|num|number|numbers|line)\b)?[ \w']{{0,25}}[.:)=\"']*\s{{0,3}}[\"']?"
    rf"|\b(?:call|reach|ring|text|contact|phone|answer(?:ing)?|dial)(?:\s(?:me|us|him|her|them|you))?(?:\sback)?\s(?:at|on|under)\s(?:my\s(?:\w+\s)?(?:number\s)?)?"
    rf"|\bcontact\b(?:\sperson)?:[ \w,.']{{0,40}}[,:]\s"
    rf"|\b(?:call|dial|ring)\s(?:me\s)?(?=[+(]?\d[\d ().\-]{{6,}})"
    rf"|\bmy\s(?:registered|home|work|office|private)\s(?:number(?:\sis)?\s)?"
)
_LABEL_AFTER = r"(?=\s?[\-(]?\s?(?:office|fax|mobile|home|cell|work)\b)"


def _phone_shapes() -> Finder:
    announced = rf"(?:{_ANNOUNCED})(?P<value>{_DIGITS}){_ENDS}"
    labelled = rf"{_NOT_INSIDE}(?P<value>{_DIGITS}){_LABEL_AFTER}"
    return pattern_finder(
        "PHONE_NUMBER",
        [
            (_INTERNATIONAL, _SURE),
            (_NORTH_AMERICAN, _LIKELY),
            (_AREA_CODE, _LIKELY),
            (announced, _SURE),
            (labelled, _LIKELY),
        ],
    )


_EMAIL = re.compile(r"[\w.+\-]+@[\w\-]+\.[\w.\-]+")
_BESIDE_EMAIL = re.compile(rf"(?<![\w./=#\-]){_DIGITS}(?![\w/]|[.\-]\d)")


def _beside_email(text: str) -> Iterator[Finding]:
    """Long numbers on a line that also has an e-mail address: a contact line, a CSV row, a signature."""
    for line in re.finditer(r"[^\n]+", text):
        mails = [mail.span() for mail in _EMAIL.finditer(line[0])]
        for match in _BESIDE_EMAIL.finditer(line[0]) if mails else ():
            digits = sum(character.isdigit() for character in match[0])
            inside = any(start <= match.start() < end for start, end in mails)
            near = any(
                min(abs(match.start() - end), abs(start - match.end())) <= 3 for start, end in mails
            )
            if near and not inside and 8 <= digits <= 20:
                yield Finding(
                    line.start() + match.start(),
                    line.start() + match.end(),
                    "PHONE_NUMBER",
                    _LIKELY,
                )


_CARD_WORD = (
    r"(?:credit|debit|bank)?\s?card|visa|master ?card|amex|american express|discover|diners|maestro"
)
_CARD = r"\d(?:[ \-]?\d){11,18}"
_IBAN = r"[A-Z]{2}\d{2}(?:[ \-]?[A-Z0-9]{1,4}){3,8}"
_ACCOUNT_WORD = r"iban|bank details|bank|account(?: number| no\.?)?|transfer(?:red)?"
#: Without its checksum a wallet's address still looks like nothing else: base 58 with digits and both cases, bech32, or 40 hex digits.
_COIN = r"\b(?:[13](?=\w*\d)(?=\w*[a-z])(?=\w*[A-Z])[1-9A-HJ-NP-Za-km-z]{25,34}|bc1[02-9ac-hj-np-z]{11,71}|0x[0-9a-fA-F]{40})\b"
_SSN_WORD = r"ssn|social security(?: number| no\.?| #)?|social"
_SSN = r"\d{3}[ .\-]?\d{2}[ .\-]?\d{4}|[\dX]{3}-[\dX]{2}-[\dX]{4}"


def number_finders() -> dict[str, list[Finder]]:
    """Finders by the entity that they look for."""
    gap = r"[^\n.;]{0,40}?"
    return {
        "PHONE_NUMBER": [_phone_shapes(), _beside_email],
        # Without a checksum, where the words say card: a mistyped number is still somebody's.
        "CREDIT_CARD": [
            pattern_finder(
                "CREDIT_CARD",
                [(rf"\b(?:{_CARD_WORD})s?\b{gap}(?<!\d)(?P<value>{_CARD})(?![\w\-])", _LIKELY)],
            )
        ],
        "IBAN_CODE": [
            pattern_finder(
                "IBAN_CODE", [(rf"\b(?:{_ACCOUNT_WORD})\b{gap}\b(?P<value>{_IBAN})\b", _LIKELY)]
            ),
        ],
        "CRYPTO": [pattern_finder("CRYPTO", [(_COIN, _LIKELY)], re.RegexFlag(0))],
        "US_SSN": [
            pattern_finder(
                "US_SSN",
                [(rf"\b(?:{_SSN_WORD})\b{gap}(?<![\d\-])(?P<value>{_SSN})(?![\d\-])", _SURE)],
            ),
            pattern_finder(
                "US_SSN",
                [
                    (
                        r"(?<![\w.,/\-])(?!000|666)\d{3}([\-. ])(?!00)\d{2}\1(?!0000)\d{4}(?![\w/]|[.\- ]\d)",
                        _LIKELY,
                    )
                ],
            ),
        ],
    }

"""Numbers and names, where presidio's own recognisers are weak.

Presidio trusts a number when its checksum or its country's numbering plan does. People write
numbers that pass neither: foreign, local, mistyped or made up. What surrounds them says what they
are, so every kind here has two readings:

    formatted as nothing else is        +44 20 8394 6571, (212) 555-0187 x12, 219-09-9999
    announced, or labelled afterwards   call me on 481 7531 · 089 72 63 41 office
                                        account GB00 ABCD 1234 5678 9012 34

Names that spaCy's small English model misses, by what stands around them:

    announced     Dear Sébastien Blanc · my name is Lily Nolan · ask for Vitor Hugo Gomes
    beside        Rosemary Doherty,r.doherty@example.com    next to an e-mail address, as in a CSV
    a line        Layla Gairbekov⏎      two or three capitalised words that fill one: a signature
    mislabelled   "Zoe Young" taken for an organisation: counts only below the usual threshold

What a text is made of must not decide how long it takes: what is repeated is possessive (`++`) or
has a limit, and what may begin anywhere begins at the first character of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.records import digest
from pipeline.synth.privacy.cards import CARD_FINDERS
from pipeline.synth.privacy.finding import Finder, Finding, pattern_finder

_NAMED, _ANNOUNCED, _FORMATTED = 0.95, 0.85, 0.7
_NAME_FILLS_LINE, _NAME_MISLABELLED = 0.65, 0.4

# ── phone numbers ──

_NOT_INSIDE = r"(?<![\w./=#\-])(?<!\d,)"  # not the tail of a longer number, path or decimal
_EXTENSION = r"(?:\s?(?:x|ext\.?)\s?\d{1,6})?"
_PHONE_ENDS = r"(?![\w/]|[.,\-]\d)"

#: 5 to 15 digits in groups; the separators are those that people put into phone numbers.
_PHONE_DIGITS = (
    r"(?:\+|00)?(?:[(]\d{1,5}[)][ .\-]?)?\d(?:[ .\-/]{0,2}(?:[(]0[)])?\d){4,14}" + _EXTENSION
)
_INTERNATIONAL = (
    r"(?<![\w+])(?=\+(?:\D{0,2}\d){8})\+\d{1,3}(?:[ .\-]?[(]?\d{1,5}[)]?){2,6}"
    rf"{_EXTENSION}{_PHONE_ENDS}"
)
_NORTH_AMERICAN = (
    rf"{_NOT_INSIDE}(?:(?:\+|00)?1[ .\-])?(?:[(]\d{{3}}[)][ ]?|\d{{3}}[ .\-])\d{{3}}[.\-]\d{{4}}"
    rf"{_EXTENSION}{_PHONE_ENDS}"
)

_PHONE_WORD = (
    r"(?:tele|cell)?phone|t[eé]l[eé]?(?:[fp]h?on\w*)?|mobile|m[oó]vil|mobil|cell|fax|whats ?app|sms"
    r"|hotline|handy|rufnummer"
)
#: Without the ends of words: what stands beside an ideograph is a letter too.
_CJK_PHONE_WORD = "电话|手机|電話|携帯|전화|번호"
_CALL = (
    r"call|reach|ring|text|contact|phone|answer(?:ing)?|dial|ll[aá]ma(?:me|r)?|chiama(?:mi)?|"
    r"appelle[rz]?(?:-moi)?|bel|ruf|lig[au]e?|zadzwoń|soita|soittele|позвони\w{0,3}"
)
_BEFORE_PHONE = (
    rf"\b(?:{_PHONE_WORD})\b(?:\s?(?:no|nr|num|number|numbers|line)\b)?"
    rf"[ \w']{{0,25}}[.:)=\"']*\s{{0,3}}[\"']?"
    rf"|(?:{_CJK_PHONE_WORD})[^\n\d]{{0,8}}"
    rf"|\b(?:{_CALL})"
    rf"(?:\s(?:me|us|him|her|them|you|mig|meg|mij|mich))?(?:\sback)?"
    rf"(?:\s?:|\s(?:at|on|under|al|au|på|op|no|unter|an))"
    rf"\s(?:my\s(?:\w+\s)?(?:number\s)?)?"
    rf"|\bcontact\b(?:\sperson)?:[ \w,.']{{0,40}}[,:]\s"
    rf"|\b(?:call|dial|ring)\s(?:me\s)?(?=[+(]?\d[\d ().\-]{{6,}})"
    rf"|\b(?:wa\.me/|tel:|sms:)"
    rf"|\bmy\s(?:registered|home|work|office|private)\s(?:number(?:\sis)?\s)?"
)
_AFTER_PHONE = r"(?=\s?[\-(]?\s?(?:office|fax|mobile|home|cell|work)\b)"

_PHONE_PATTERNS = (
    (_INTERNATIONAL, _ANNOUNCED),
    (_NORTH_AMERICAN, _FORMATTED),
    (rf"(?:{_BEFORE_PHONE})(?P<value>{_PHONE_DIGITS}){_PHONE_ENDS}", _ANNOUNCED),
    (rf"{_NOT_INSIDE}(?P<value>{_PHONE_DIGITS}){_AFTER_PHONE}", _FORMATTED),
)

_EMAIL = re.compile(r"(?<![\w.+\-])[\w.+\-]++@[\w\-]++\.[\w.\-]++")
_PHONE_BESIDE_EMAIL = re.compile(rf"(?<![\w./=#\-]){_PHONE_DIGITS}(?![\w/]|[.\-]\d)")
_MAX_DISTANCE = 3  # characters between a number and the e-mail address beside it


def _find_phones_beside_email(text: str) -> Iterator[Finding]:
    """Long numbers next to an e-mail address: a contact line, a CSV row, a signature."""
    for line in re.finditer(r"[^\n]+", text):
        emails = [email.span() for email in _EMAIL.finditer(line[0])]
        for match in _PHONE_BESIDE_EMAIL.finditer(line[0]) if emails else ():
            digits = sum(character.isdigit() for character in match[0])
            if 8 <= digits <= 20 and _is_beside(match.span(), emails):
                start, end = (line.start() + offset for offset in match.span())
                yield Finding(start, end, "PHONE_NUMBER", _FORMATTED)


def _is_beside(span: tuple[int, int], emails: list[tuple[int, int]]) -> bool:
    """Next to one of the e-mail addresses, and inside none."""
    first, last = span
    return not any(start <= first < end for start, end in emails) and any(
        min(abs(first - end), abs(start - last)) <= _MAX_DISTANCE for start, end in emails
    )


# ── accounts, wallets, social-security numbers ──

_GAP = r"[^\n.;]{0,40}?"
_ACCOUNT_WORD = (
    r"bank details|bank|account(?: number| no\.?)?|transfer(?:red)?|überweis\w*|virement|bonifico|"
    r"konto|rekening"
)
_IBAN = r"[A-Z]{2}\d{2}(?:[ \-]?[A-Z0-9]{1,4}){3,8}"
_SSN_WORD = r"ssn|social security(?: number| no\.?| #)?|social"
_SSN = r"\d{3}[ .\-]?\d{2}[ .\-]?\d{4}|[\dX]{3}-[\dX]{2}-[\dX]{4}"

_ANNOUNCED_IBAN = rf"\b(?:{_ACCOUNT_WORD})\b{_GAP}\b(?P<value>{_IBAN})\b"
_IBAN_FIELD = rf"\biban['\"]?\s?[:=]?\s?['\"]?(?P<value>{_IBAN})\b"
#: Without its checksum a wallet's address still looks like nothing else: base 58 with digits and
#: both cases, bech32, or 40 hex digits.
_WALLET = (
    r"\b(?:[13](?=\w*\d)(?=\w*[a-z])(?=\w*[A-Z])[1-9A-HJ-NP-Za-km-z]{25,34}"
    r"|bc1[02-9ac-hj-np-z]{11,71}|0x[0-9a-fA-F]{40})\b"
)
_ANNOUNCED_SSN = rf"\b(?:{_SSN_WORD})\b{_GAP}(?<![\d\-])(?P<value>{_SSN})(?![\d\-])"
_FORMATTED_SSN = (
    r"(?<![\w.,/\-])(?!000|666)\d{3}([\-. ])(?!00)\d{2}\1(?!0000)\d{4}(?![\w/]|[.\- ]\d)"
)

#: Finders of numbers by the entity that they look for.
NUMBER_FINDERS: dict[str, tuple[Finder, ...]] = {
    "PHONE_NUMBER": (
        pattern_finder("PHONE_NUMBER", _PHONE_PATTERNS, digits=5),
        _find_phones_beside_email,
    ),
    "CREDIT_CARD": CARD_FINDERS,
    "IBAN_CODE": (
        pattern_finder("IBAN_CODE", [(_ANNOUNCED_IBAN, _FORMATTED), (_IBAN_FIELD, _NAMED)]),
    ),
    "CRYPTO": (pattern_finder("CRYPTO", [(_WALLET, _FORMATTED)], re.NOFLAG),),
    "US_SSN": (
        pattern_finder("US_SSN", [(_ANNOUNCED_SSN, _ANNOUNCED), (_FORMATTED_SSN, _FORMATTED)]),
    ),
}

# ── person names ──

_CAPITAL = r"[^\W\d_a-zß-öø-ÿ]"
_PART = rf"(?:{_CAPITAL}[^\W\d_]*+(?:['’\-][^\W\d_]++){{0,4}}+)"
_BEGINS = r"(?<![^\W\d_])"  # not inside a word
_JOIN = r"(?:[ ](?:van|von|der|den|de|da|di|du|del|la|le|el|bin|ibn|dos|zu|y|e|of)){0,2}"
_NAME = rf"{_PART}(?:{_JOIN}[ ]{{1,2}}(?:{_PART}|{_CAPITAL}\.)){{0,3}}"
_FULL = rf"{_PART}(?:{_JOIN}[ ]{{1,2}}(?:{_PART}|{_CAPITAL}\.)){{1,3}}"
_LOWER_FULL = r"[^\W\d_]{2,}(?: [^\W\d_]\.?)? [^\W\d_]{2,}"

_ROLE = (
    r"(?:customer|client|patient|employee|colleague|agent|officer|tenant|applicant|user|analyst|"
    r"nurse|doctor|contact)"
)
_LABELS = (
    "name|contact|fn|author|attn|attention|from|signed|customer|patient|employee|holder|cardholder|"
    "directed by|billing address|cc|to"
)
_I_AM = (
    "I am|I'm|it's|this is|I,|me llamo|ich heiße|je m'appelle|mi chiamo|meu nome é|ik ben|jag heter"
    "|nazywam się"
)
_VERBS = (
    r"ask for|authori[sz]e|letter (?:to|for)|called|named|follow up with|meet(?:ing)? with|"
    r"spoke (?:to|with)|under|refer(?:red)? to|on behalf of|(?:changed?|amend) (?:it|the name) to"
)

_ANNOUNCED_NAMES = (
    rf"(?i:\b(?:dear|hi|hello|hey|cheers|regards|sincerely|thanks)),?[ \n](?P<value>{_FULL})",
    rf"(?i:\b(?:full )?name(?:'s| is|:)?)[ ](?P<value>{_NAME})",
    rf"(?i:\b(?:{_LABELS}):)\s{{0,8}}(?P<value>{_FULL})",
    rf"(?i:\b(?:{_I_AM}))[ ](?P<value>{_FULL})",
    rf"(?i:\b{_ROLE})[ ](?P<value>{_FULL})",
    rf"(?i:\b(?:{_VERBS}))[ ](?P<value>{_FULL})",
    rf"(?i:\b(?:my name is|add|follow up with|named|ask for)) (?P<value>(?i:{_LOWER_FULL}))"
    r"(?= (?:as|in|and|on)\b|[.,?!]|$)",
    rf"{_BEGINS}(?P<value>{_FULL})(?=[ ]?[,;|<(][ ]?[\w.+\-]+@[\w\-]+\.\w)",
    rf"{_BEGINS}(?P<value>{_FULL})(?=(?:'s)?[ ](?:lives|resides|residing|born|passport|SSN)\b)",
)
_LINE_NAME = (
    rf"^[> \t]*(?P<value>{_PART}(?: {_CAPITAL}\.?)?(?:{_JOIN} {{1,2}}{_PART}){{1,2}}"
    r"(?: (?:MD|PhD|DDS|Jr\.?|Sr\.?|II|III))?)[ \t]*$"
)
_NAME_REGEXES = [
    *((re.compile(regex, re.MULTILINE), _ANNOUNCED) for regex in _ANNOUNCED_NAMES),
    (re.compile(_LINE_NAME, re.MULTILINE), _NAME_FILLS_LINE),
]

#: Words that make a capitalised phrase something else than a person.
_NOT_NAMES = re.compile(
    r"(?i)\b(?:the|and|inc|ltd|llc|plc|gmbh|ag|corp|company|group|bank|university|school|college|"
    r"street|road|avenue|city|united|states|north|south|east|west|new|day|january|february|march|"
    r"april|june|july|august|september|october|november|december|monday|tuesday|wednesday|"
    r"thursday|friday|saturday|sunday|write|explain|list|question|answer|example|input|output|note|"
    r"step|act|chapter|part|section|department|ministry|museum|park|javascript|python|java|sql|api|"
    r"technologies|systems|data|science|war|world|national|international|association|institute|"
    r"your|you|here|dear)\b"
)
_MISLABELLED = frozenset({"ORG", "GPE", "FAC", "WORK_OF_ART", "PRODUCT", "EVENT", "LOC", "NORP"})
_NAME_SHAPED = re.compile(_NAME)


def find_names(text: str) -> Iterator[Finding]:
    """Names by what announces them, and names that fill a line."""
    for regex, score in _NAME_REGEXES:
        for match in regex.finditer(text):
            if not _NOT_NAMES.search(match["value"]):
                yield Finding(*match.span("value"), "PERSON", score)


def mislabelled_names(document: Any) -> Iterator[Finding]:
    """Entities of a spaCy document that have the shape of a name under another label."""
    for entity in document.ents:
        is_name = _NAME_SHAPED.fullmatch(entity.text) and not _NOT_NAMES.search(entity.text)
        if entity.label_ in _MISLABELLED and is_name:
            yield Finding(entity.start_char, entity.end_char, "PERSON", _NAME_MISLABELLED)


def patterns_digest() -> str:
    """Of the files of this folder: another version of them may find other texts."""
    folder = Path(__file__).parent
    return digest([file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))])[:16]

"""Values that belong to nobody: those in texts, and those that replace findings.

    person1@example.com · git@github.com      RFC 2606 domains, and an account that all share
    127.0.0.1 · 10.0.0.7 · 2001:db8::1        what no outside machine has (`ipaddress`), versions
    202-555-0101 · 020 7946 0018              kept free for fiction; area codes that do not exist
    4111 1111 1111 1111                       printed in the payment providers' manuals
    AKIAIOSFODNN7EXAMPLE · YOUR_API_KEY       keys of manuals, and what stands where a key belongs
    Nemonia Examplesson                       invented here

Prompts and replies are full of them, and a text that holds nothing else identifies nobody. They are
detected like all others, so that detection can be measured, and left out of what a policy acts on.
A finding is replaced by its type or by an invented value:

    text           Ask Anna Schmidt (anna@firm.com). Anna knows.
    redacted       Ask <PERSON> (<EMAIL_ADDRESS>). <PERSON> knows.
    pseudonymised  Ask Fictus Sampleworth (person1@example.com). Fictus knows.

Invented values come from ranges reserved for examples (RFC 2606 domains, RFC 5737 addresses,
555-01xx numbers, social-security area 000) and names are made up, so a reply that repeats one can
be told from a leak. They are numbered by appearance and never computed from the original.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence

from pipeline.records import digest
from pipeline.synth.privacy.finding import Finding

#: Made up for replace.py, and unlike names that people have.
FIRST_NAMES = (
    "Nemonia", "Fictus", "Exemplia", "Testwin", "Sampletta", "Moquill", "Placidora", "Dummond",
    "Blankwyn", "Noneva",
)  # fmt: skip
LAST_NAMES = (
    "Examplesson", "Sampleworth", "Placeholdery", "Testingham", "Fictivale", "Dummerstone",
    "Mockinfield", "Nobodyham", "Blankensby",
)  # fmt: skip
_NAME_WORDS = frozenset([*FIRST_NAMES, *LAST_NAMES])
_TITLES = frozenset(
    ["Mr", "Mrs", "Ms", "Miss", "Mx", "Dr", "Prof", "Professor", "Dear", "Hi", "Hello", "s"]
)
_EMAIL = re.compile(
    r"(?:.*[@.])?(?:example\.(?:com|org|net|edu)|[\w\-]+\.(?:example|test|invalid|localhost|local)"
    r"|localhost|your[\w\-]*\.\w+|domain\.(?:com|tld))|git@[\w.\-]+",
    re.IGNORECASE,
)
_URL = re.compile(r"(?:https?://)?(?:[\w\-]+\.)*example\.(?:com|org|net|edu)(?:[/:].*)?", re.I)
_RESOLVERS = frozenset(["8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9"])
_VERSION = re.compile(r"(?i)(?:\bv|\bver\.?|version|release|revision)['\" :=]{0,4}$")
#: North American numbers of fiction, or of an area that there is not; British ones of Ofcom's.
_PHONE = re.compile(
    r"(?:(?:\+?|00)1)?(?:\d{3})?55501\d\d|(?:\+?1)?(?:555\d{7}|1234567890)"
    r"|(?:\+44|0)(?:207946|7700900|1632960)\d{3,4}"
)
_EXTENSION = re.compile(r"(?i)\s?(?:x|ext\.?)\s?\d+$")
_CARDS = frozenset([
    "4111111111111111", "4242424242424242", "4012888888881881", "4000056655665556",
    "4222222222222", "5555555555554444", "5105105105105100", "5200828282828210",
    "2223003122003222", "378282246310005", "371449635398431", "378734493671000",
    "6011111111111117", "6011000990139424", "6011601160116611", "30569309025904",
    "38520000023237", "3056930009020004", "36227206271667", "3530111333300000",
    "3566002020360505", "6200000000000005", "6304000000000000", "6759649826438453",
    "1234567890123456", "1234567812345678", "4917610000000000003",
])  # fmt: skip
_SSN = re.compile(
    r"(?:000|666)\d{6}|\d{3}00\d{4}|\d{5}0000|078051120|219099999|123456789|98765432\d"
)
_SECRET = re.compile(
    r"(?i).*(?:example|your[_\- ]|x{4}|\*{3}|\.{3}|…|placeholder|change[_\-]?me|dummy|redacted)"
    r".*|(?:[a-z_]{2,10}[\-_])?(.)\1+|<.*>|pass(?:word|wd)?|secret"
    r"|your\w+(?:key|token|secret|password)|.*:(?:pass(?:word|wd)?|pwd|secret|<.*>|\$?\{.*\})@"
    r"|[A-Za-z_\-]*(?:1234567890?(?:abcdef)?|abcdefgh?i?j?)+",
    re.DOTALL,
)
_ADDRESS = re.compile(
    r"(?i)\d+ Example Street(?:, Sampletown)?|123 Main St(?:reet|\.)?(?:,? Any.*)?"
)
_INVENTED = re.compile(r"0000[ \-]?0000[ \-]?0000[ \-]?\d{4}|EXAMPLE-[A-Z_]+-\d+")


def is_reserved(entity: str, value: str, before: str = "") -> bool:
    """Whether `value` is nobody's; `before` is what stands before it."""
    value = value.strip()
    digits = re.sub(r"[^\d+]", "", value)
    if _INVENTED.fullmatch(value):
        return True
    match entity:
        case "EMAIL_ADDRESS":
            return _EMAIL.fullmatch(value) is not None
        case "IP_ADDRESS":
            return _is_reserved_ip(value) or _VERSION.search(before[-20:]) is not None
        case "PHONE_NUMBER":
            number = re.sub(r"[^\d+]", "", _EXTENSION.sub("", value))
            return _PHONE.fullmatch(number) is not None or _is_reserved_ip(value)
        case "CREDIT_CARD":
            return digits in _CARDS
        case "US_SSN":
            return _SSN.fullmatch(digits) is not None
        case "API_KEY" | "PASSWORD":
            return _SECRET.fullmatch(value) is not None
        case "ADDRESS":
            return _ADDRESS.fullmatch(value) is not None
        case "URL":
            return _URL.fullmatch(value) is not None
        case "PERSON":
            words = {*re.findall(r"[^\W\d_]+", value)} - _TITLES
            return bool(words) and words <= _NAME_WORDS
    return False


def _is_reserved_ip(value: str) -> bool:
    address = value.strip("[]").partition("/")[0].partition("%")[0]
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not ip.is_global or ip.is_multicast or address in _RESOLVERS


def marked(text: str, findings: Iterable[Finding]) -> list[Finding]:
    """`findings` of `text`, those that are nobody's marked."""
    return [
        finding._replace(
            reserved=is_reserved(
                finding.entity,
                text[finding.start : finding.end],
                text[max(0, finding.start - 20) : finding.start],
            )
        )
        for finding in findings
    ]


def somebodys(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that are not reserved, nor a part of one that is and no less sure."""
    findings = list(findings)
    reserved = [finding for finding in findings if finding.reserved]
    return [
        finding
        for finding in findings
        if not finding.reserved
        and not any(
            r.start <= finding.start and finding.end <= r.end and r.score >= finding.score
            for r in reserved
        )
    ]


#: Entity → the invented value with this number, counted from 1.
_INVENTED_VALUES: dict[str, Callable[[int], str]] = {
    "EMAIL_ADDRESS": lambda number: f"person{number}@example.com",
    "PHONE_NUMBER": lambda number: f"202-555-01{number % 100:02d}",
    "CREDIT_CARD": lambda number: f"0000 0000 0000 {number:04d}",
    "US_SSN": lambda number: f"000-00-{number:04d}",
    "IP_ADDRESS": lambda number: f"192.0.2.{number % 256}",
    "ADDRESS": lambda number: f"{number} Example Street, Sampletown",
    "URL": lambda number: f"https://example.com/{number}",
}


def redacted(text: str, findings: Sequence[Finding]) -> str:
    """`text` with `<ENTITY_TYPE>` in place of every finding.

    Findings are in text order and do not overlap.
    """
    return _replaced(text, findings, lambda entity, _: f"<{entity}>")


class Pseudonyms:
    """The invented values of one conversation: in all its turns the same one for the same value."""

    def __init__(self, seed: int, conversation: tuple[str, str]) -> None:
        # An offset, so that not every conversation is about the same person.
        self._offset = int(digest([seed, *conversation])[:8], 16)
        self._assigned: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}

    def apply(self, text: str, findings: Sequence[Finding]) -> str:
        """`text` with an invented value in place of every finding."""
        return _replaced(text, findings, self._value)

    def _value(self, entity: str, original: str) -> str:
        key = (entity, normal_form(original))
        if key not in self._assigned:
            self._assigned[key] = self._invent(entity)
            if entity == "PERSON":
                self._assign_name_parts(original, self._assigned[key])
        return self._assigned[key]

    def _invent(self, entity: str) -> str:
        number = self._numbers[entity] = self._numbers.get(entity, 0) + 1
        if entity == "PERSON":
            index = self._offset + number - 1
            return f"{FIRST_NAMES[index % len(FIRST_NAMES)]} {LAST_NAMES[index % len(LAST_NAMES)]}"
        return (
            _INVENTED_VALUES[entity](number)
            if entity in _INVENTED_VALUES
            else f"EXAMPLE-{entity}-{number}"
        )

    def _assign_name_parts(self, original: str, invented: str) -> None:
        """A later "Anna" is the Anna Schmidt of before."""
        words = original.split()
        if len(words) > 1:
            for word, part in zip((words[0], words[-1]), invented.split(), strict=True):
                self._assigned.setdefault(("PERSON", normal_form(word)), part)


def normal_form(value: str) -> str:
    """The same value in another spelling: letters in one case, without separators."""
    return re.sub(r"[\W_]+", "", value.casefold()) or value


def _replaced(text: str, findings: Sequence[Finding], value: Callable[[str, str], str]) -> str:
    pieces, position = [], 0
    for finding in findings:
        original = text[finding.start : finding.end]
        pieces += [text[position : finding.start], value(finding.entity, original)]
        position = finding.end
    return "".join([*pieces, text[position:]])

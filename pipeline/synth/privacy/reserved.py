"""Values that are nobody's: reserved, published as examples, placeholders, and our own inventions.

    person1@example.com · git@github.com      RFC 2606 domains, and an account that all share
    127.0.0.1 · 10.0.0.7 · 2001:db8::1        what no outside machine has (`ipaddress`), versions
    202-555-0101 · 020 7946 0018              kept free for fiction; area codes that do not exist
    4111 1111 1111 1111                       printed in the payment providers' manuals
    AKIAIOSFODNN7EXAMPLE · YOUR_API_KEY       keys of manuals, and what stands where a key belongs
    Nemonia Examplesson                       invented by replace.py

Prompts and replies are full of them, and a text that holds nothing else gives nobody away. They are
found like all others, so that what is measured is the finding, and left out of what a policy acts
on.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

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

"""Person names that spaCy's small English model misses, by what stands around them.

announced   Dear Sébastien Blanc · my name is Lily Nolan · Contact: Maya Nagarajan · ask for Vitor Hugo Gomes
beside      Rosemary Doherty,r.doherty@example.com        a name next to an address, as in a CSV row
a line      Layla Gairbekov⏎                              two or three capitalised words that fill one, as in a signature
mislabelled "Zoe Young" taken for an organisation: likely, not sure, so it counts only below the usual threshold
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline.synth.privacy.finding import Finding

_SURE, _LIKELY, _WEAK = 0.85, 0.65, 0.4

_CAPITAL = r"[^\W\d_a-zß-öø-ÿ]"
_PART = rf"(?:{_CAPITAL}[^\W\d_]*(?:['’\-]{_CAPITAL}?[^\W\d_]+)*)"
_JOIN = r"(?:[ ](?:van|von|der|den|de|da|di|du|del|la|le|el|bin|ibn|dos|zu|y|e|of)){0,2}"
_NAME = rf"{_PART}(?:{_JOIN}[ ]{{1,2}}(?:{_PART}|{_CAPITAL}\.)){{0,3}}"
_FULL = rf"{_PART}(?:{_JOIN}[ ]{{1,2}}(?:{_PART}|{_CAPITAL}\.)){{1,3}}"
_LOWER_FULL = r"[^\W\d_]{2,}(?: [^\W\d_]\.?)? [^\W\d_]{2,}"

_TITLE = r"(?:mr|mrs|ms|miss|mx|dr|prof|professor|sir|madam|herr|frau|monsieur|madame|señora?|signora?)\b\.?"
_ROLE = r"(?:customer|client|patient|employee|colleague|agent|officer|tenant|applicant|user|analyst|nurse|doctor|contact)"

_LABELS = "name|contact|fn|author|attn|attention|from|signed|customer|patient|employee|holder|cardholder|directed by|billing address|cc|to"
_I_AM = "I am|I'm|it's|this is|I,|me llamo|ich heiße|je m'appelle|mi chiamo|meu nome é|ik ben|jag heter|nazywam się"
_VERBS = (
    r"ask for|authori[sz]e|letter (?:to|for)|called|named|follow up with|meet(?:ing)? with|spoke (?:to|with)|under|refer(?:red)? to|on behalf of|"
    r"(?:changed?|amend) (?:it|the name) to"
)

_ANNOUNCED = (
    rf"(?i:\b{_TITLE})[ ](?P<value>{_NAME})",
    rf"(?i:\b(?:dear|hi|hello|hey|cheers|regards|sincerely|thanks)),?[ \n](?P<value>{_FULL})",
    rf"(?i:\b(?:full )?name(?:'s| is|:)?)[ ](?P<value>{_NAME})",
    rf"(?i:\b(?:{_LABELS}):)\s{{0,8}}(?P<value>{_FULL})",
    rf"(?i:\b(?:{_I_AM}))[ ](?P<value>{_FULL})",
    rf"(?i:\b{_ROLE})[ ](?P<value>{_FULL})",
    rf"(?i:\b(?:{_VERBS}))[ ](?P<value>{_FULL})",
    rf"(?i:\b(?:my name is|add|follow up with|named|ask for)) (?P<value>(?i:{_LOWER_FULL}))(?= (?:as|in|and|on)\b|[.,?!]|$)",
    rf"(?P<value>{_FULL})(?=[ ]?[,;|<(][ ]?[\w.+\-]+@[\w\-]+\.\w)",
    rf"(?P<value>{_FULL})(?=(?:'s)?[ ](?:lives|resides|residing|born|passport|SSN)\b)",
)
_REGEXES = [re.compile(regex, re.MULTILINE) for regex in _ANNOUNCED]
_LINE = re.compile(
    rf"^[> \t]*(?P<value>{_PART}(?: {_CAPITAL}\.?)?(?:{_JOIN} {{1,2}}{_PART}){{1,2}}(?: (?:MD|PhD|DDS|Jr\.?|Sr\.?|II|III))?)[ \t]*$",
    re.MULTILINE,
)

#: Words that make a capitalised phrase something else than a person.
_NOT_NAMES = re.compile(
    r"(?i)\b(?:the|and|inc|ltd|llc|plc|gmbh|ag|corp|company|group|bank|university|school|college|street|road|avenue|city|united|states|north|south|"
    r"east|west|new|day|january|february|march|april|june|july|august|september|october|november|december|monday|tuesday|wednesday|thursday|friday|"
    r"saturday|sunday|write|explain|list|question|answer|example|input|output|note|step|act|chapter|part|section|department|ministry|museum|park|"
    r"javascript|python|java|sql|api|technologies|systems|data|science|war|world|national|international|association|institute|your|you|here|dear)\b"
)
_MISLABELLED = frozenset({"ORG", "GPE", "FAC", "WORK_OF_ART", "PRODUCT", "EVENT", "LOC", "NORP"})
_NAME_SHAPED = re.compile(_NAME)


def find_names(text: str) -> Iterator[Finding]:
    """Names by what announces them."""
    for regex in _REGEXES:
        for match in regex.finditer(text):
            if not _NOT_NAMES.search(match["value"]):
                yield Finding(*match.span("value"), "PERSON", _SURE)
    for match in _LINE.finditer(text):
        if not _NOT_NAMES.search(match["value"]):
            yield Finding(*match.span("value"), "PERSON", _LIKELY)


def mislabelled_names(document: Any) -> Iterator[Finding]:
    """Entities of a spaCy document that have the shape of a name under another label."""
    for entity in document.ents:
        text = entity.text
        if (
            entity.label_ in _MISLABELLED
            and _NAME_SHAPED.fullmatch(text)
            and not _NOT_NAMES.search(text)
        ):
            yield Finding(entity.start_char, entity.end_char, "PERSON", _WEAK)

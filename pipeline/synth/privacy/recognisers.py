"""Numbers, names and addresses, where presidio's own recognisers are weak.

Presidio trusts a number when its checksum or its country's numbering plan does. People write
numbers that pass neither: foreign, local, mistyped or made up. The words around them say what they
are, so every kind here has two readings:

    formatted as nothing else is   +44 20 8394 6571, (212) 555-0187 x12, 219-09-9999
    announced, or labelled after   call me on 481 7531 · 089 72 63 41 office
                                   account GB00 ABCD 1234 5678 9012 34
                                   {"pan": "4929526018159084"} · DOB: 1984-03-12

Cards of 12 to 19 digits are also valid by scheme and check digit in any grouping; with other digits
beside them ("12/27 4929 5260 1815 9081 123") they are looked for among the groups. Dates of birth
and national numbers (FR_NIR, BR_CPF, NL_BSN, CN_ID) count for runs that list them in
`synth.pii.entities`; presidio's recognisers of other countries are in analyzer.py.

No check digit is required of what is announced: 27 of 160 labelled IBANs, 75 of 394 cards and 8 of
72 social-security numbers fail theirs (python-stdnum 2.2), and `eagle3 pii-score` counts them.

Names that spaCy's small English model misses, by what stands around them:

    announced     Dear Sébastien Blanc · my name is Lily Nolan · ask for Vitor Hugo Gomes
    beside        Rosemary Doherty,r.doherty@example.com    next to an e-mail address, as in a CSV
    a line        Layla Gairbekov⏎      two or three capitalised words that fill one: a signature
    mislabelled   "Zoe Young" taken for an organisation: counts only below the usual threshold

Postal addresses, by the parts that make one; one part alone is weak ("5 apples", "Baker Street"),
two different parts that touch, or a part after words such as "lives at", score high:

    85 Kongshøj Allé 70        number and a street's name, in the order of its country
    Apt. 252                   a unit
    Kruså, CA 94110            a place with its postcode

Run time must not depend on what a text is made of: what is repeated is possessive (`++`) or has a
limit, and what may begin anywhere begins at the first character of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline.synth.privacy.finding import Finder, Finding, pattern_finder

_NAMED, _VALID, _ANNOUNCED, _FORMATTED = 0.95, 0.9, 0.85, 0.7
_NAME_FILLS_LINE, _NAME_MISLABELLED = 0.65, 0.4

# ── phone numbers ──
_NOT_INSIDE = r"(?<![\w./=#\-])(?<!\d,)"  # not the tail of a longer number, path or decimal
_EXTENSION = r"(?:[,;]?\s?(?:x|#|ext(?:\.|=|ension)?)\s?\d{1,6})?"
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
_AFTER_PHONE = (
    r"(?=\s?[\-(]?\s?(?:office|fax|mobile|home|cell|work)\b"
    r"|\sis\s(?:my|his|her|our|their)\s(?:\w{1,12}\s)?(?:landline|mobile|cell|phone|number)\b)"
)
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


# ── payment cards ──

_SEPARATOR = r"(?:[ .\-]| - )"
_DIGIT_GROUPS = re.compile(rf"(?<![\w#])(?<!\d\.)\d++(?:{_SEPARATOR}\d++){{0,30}}+(?![\w%]|\.\d)")
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
    for run in _DIGIT_GROUPS.finditer(text):
        if _IBAN_BEGINS.search(text, max(0, run.start() - 20), run.start()):
            continue
        groups = [
            (m.start() + run.start(), m.end() + run.start()) for m in _DIGITS.finditer(run[0])
        ]
        for first, last in _candidate_groups([end - start for start, end in groups]):
            start, end = groups[first][0], groups[last][1]
            if is_card(re.sub(r"\D", "", text[start:end])):
                yield Finding(start, end, "CREDIT_CARD", _VALID)


def _candidate_groups(sizes: list[int]) -> Iterator[tuple[int, int]]:
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
_CARD_WORD = (
    r"(?:(?:credit|debit|bank)?\s?card|kredit-?karte|karte|tarjeta|carte|carta|cart[aã]o|kaart|"
    r"visa|master ?card|amex|american express|discover|diners|maestro)s?(?:nummern?)?"
)
_CJK_CARD_WORD = "卡号|银行卡|信用卡|カード番号|카드\\s?번호"
_PAN = (
    r"(?:\w{0,20}card\w{0,20}|\w{0,20}kartennummer|pan|ccn?|cc_?(?:num(?:ber)?|no)|num_carte|"
    r"num_tarjeta|acct_?num)"
)
_CARD_DIGITS = rf"(?P<value>\d(?:{_SEPARATOR}?\d){{11,18}})(?![\w\-])"
_CARD_PATTERNS = (
    (rf"\b{_CARD_WORD}\b[^\n.;]{{0,40}}?(?<!\d){_CARD_DIGITS}", _FORMATTED),
    (rf"(?:{_CJK_CARD_WORD})[^\n.;]{{0,12}}?(?<!\d){_CARD_DIGITS}", _FORMATTED),
    (
        rf"(?<![^\W_]){_PAN}\\?[\"']?\]?[ \t]{{0,3}}(?:[:=,]|=>)?[ \t]{{0,3}}\\?[\"']?"
        rf"{_CARD_DIGITS}",
        _FORMATTED,
    ),
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

# ── dates of birth and national numbers ──

_MONTH = (
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mär|mai|okt|dez|janv|févr|avr|juin|juil|"
    r"août|ene|abr|ago|dic|gen|mag|giu|lug|set|ott)[^\W\d_]{0,7}\.?"
)
_DATE = (
    rf"(?:\d{{1,4}}[.\-/ ]\d{{1,2}}[.\-/ ]\d{{1,4}}|\d{{1,2}}(?:st|nd|rd|th|\.|er)?(?: de| of)? "
    rf"{_MONTH}(?: de|,)? \d{{2,4}}|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}"
    r"|\d{4}年\d{1,2}月\d{1,2}日)"
)
_BORN = (
    r"(?:\b(?:born|d\.?o\.?b\.?|birth ?da(?:y|te)|date of birth|geb(?:oren|\.|urtsdatum)|"
    r"date de naissance|née?|fecha de nacimiento|nacid[oa]|data di nascita|nat[oa]|geboortedatum|"
    r"data de nascimento|nascid[oa]|data urodzenia|urodzon[ya])|生年月日|出生日期|생년월일)"
)
_ID_PATTERNS: dict[str, tuple[tuple[str, float], ...]] = {
    "DATE_OF_BIRTH": ((rf"{_BORN}[^\n.;\d]{{0,20}}?(?P<value>{_DATE})(?!\d)", _ANNOUNCED),),
    "FR_NIR": (
        (
            r"(?<![\w.])[12][ ]?\d{2}[ ]?(?:0[1-9]|1[0-2]|[2-9]\d)[ ]?(?:\d{2}|2[AB])[ ]?\d{3}[ ]?"
            r"\d{3}[ ]?\d{2}(?![\w.])",
            _FORMATTED,
        ),
    ),
    "BR_CPF": (
        (r"(?<![\w.])\d{3}\.\d{3}\.\d{3}-\d{2}(?!\w)", _ANNOUNCED),
        (r"\bcpf\b[^\n\d]{0,12}(?P<value>\d{11})(?!\w)", _ANNOUNCED),
    ),
    "NL_BSN": (
        (
            r"\b(?:bsn|burgerservicenummer|sofi-?nummer)\b[^\n\d]{0,12}(?P<value>\d{9})(?!\w)",
            _ANNOUNCED,
        ),
    ),
    "CN_ID": (
        (
            r"(?<![0-9A-Za-z])[1-8]\d{5}(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])\d{3}[\dX]"
            r"(?![0-9A-Za-z])",
            _ANNOUNCED,
        ),
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
    r"technologies|systems|data|date|phone|convert|translate|summari[sz]e|science|war|world|national|international|association|institute|"
    r"your|you|here|dear)\b"
)
_MISLABELLED = frozenset({"ORG", "GPE", "FAC", "WORK_OF_ART", "PRODUCT", "EVENT", "LOC", "NORP"})
_NAME_SHAPED = re.compile(_NAME)
#: Before a lone capitalised word: it is a place or a thing, not a person.
_BEFORE_THINGS = re.compile(
    r"(?i)in|from|near|via|about|a|an|new|on|ein|eine|einen|nach|aus|en|un|une|una|nad|\W*[,;:(>/]\W*|"
    r"\s*\n\s*|\W*\d\S*"
)


def find_names(text: str) -> Iterator[Finding]:
    """Names by what announces them, and names that fill a line."""
    for regex, score in _NAME_REGEXES:
        for match in regex.finditer(text):
            if not _NOT_NAMES.search(match["value"]):
                yield Finding(*match.span("value"), "PERSON", score)


def mislabelled_names(document: Any) -> Iterator[Finding]:
    """Entities of a spaCy document that have the shape of a name under another label.

    A lone word is seldom one: it is none in capitals (CSV), after a word that stands before places
    and things (in Lisbon, an American), or within a list or an address (4 Main St, Springfield).
    """
    for entity in document.ents:
        is_name = _NAME_SHAPED.fullmatch(entity.text) and not _NOT_NAMES.search(entity.text)
        if len(entity) == 1 and is_name:
            before = document[entity.start - 1].text if entity.start else ""
            is_name = not (entity.text.isupper() or _BEFORE_THINGS.fullmatch(before))
        if entity.label_ in _MISLABELLED and is_name:
            yield Finding(entity.start_char, entity.end_char, "PERSON", _NAME_MISLABELLED)


# ── postal addresses ──

_HIGH, _MEDIUM, _LOW = 0.85, 0.65, 0.4
#: Characters between two parts of one address at most, none of them a digit or a sentence's end.
_MAX_GAP = 16
#: The same across lines and commas: "Apt. 252⏎ Črni Vrh⏎ Slovenia 15755".
_MAX_GAP_ACROSS_LINES = 45
_TERM = r"[^\W\d_][\w.'’\-]{0,40}+"  # with a limit: it may begin after each hyphen
_TERMS = rf"(?:{_TERM}[ ]){{0,4}}"
#: Words before a name that are part of it: "Alte" in Alte Lindenstraße.
_CAPITALISED_WORDS = r"(?-i:[A-ZÀ-Þ][\w.\-]{0,40}+[ ]){0,2}"
_HOUSE = r"\d{1,5}(?:[/\-]\d{1,4})?[A-Za-z]?"
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
#: Streets as their countries name them, each with a number. Most of these words are English or
#: names as well, so that case decides: "3 place Monge", but "3 Place Value".
_PARTICLES = (
    r"(?:(?:de la|de los|de las|de|du|des|del|dos|das|do|da|della|delle|dei|la|le|les|los|las|el)"
    r"\s|[dl]['’])?"
)
_PROPER = rf"{_PARTICLES}[A-ZÀ-ÞŁŚŻŹĆ][\w'’.\-]{{1,30}}"
_STREET_NAME = rf"{_PROPER}(?:\s(?:{_PROPER}|[IVX]{{1,4}}\b|y|e)){{0,3}}"
_COUNTED = (
    r"%|km|m²|years?|times|days?|people|points?|stars?|weeks?|stops?|metros|metri|años|anni|anos"
)
_NUMBER_AFTER = (
    r",?\s(?:n[º°.ro]{1,3}\s?|núm\.?\s|nr\.?\s)?(?!(?:19|20)\d\d\b)\d{1,4}"
    rf"(?:\s?[/\-]\s?[\dA-Za-z]{{1,3}}|[A-Za-z])?\b(?!\s?(?:{_COUNTED})(?!\w))"
)
_FRENCH_STREET = (
    r"rue|boulevard|bd\.?|bld\.?|avenue|av\.|allées?|impasse|quai|chemin|place|square|cours|route|"
    r"passage|sentier|ruelle|esplanade|promenade|montée|venelle|faubourg|fbg"
)
_ROMANCE_STREET = (
    r"[Cc]alle|[Cc]arrer|[Cc]\.?/|[Cc]l\.|[Aa]v(?:e?n?i?da)?\.|[Aa]vda|[Aa]venida|[Aa]vinguda|"
    r"[Pp]laza|"
    r"[Pp]laça|[Pp]za\.?|[Pp]aseo|[Pp]asseig|[Pp]\.?º|[Cc]amino|[Cc]arretera|[Cc]tra\.|[Rr]onda|"
    r"[Tt]ravesía|[Gg]lorieta|[Cc]allejón|[Rr]ambla|[Rr]ua|[Tt]ravessa|[Pp]raça|[Aa]lameda|[Ee]strada|"
    r"[Rr]odovia|[Ll]argo(?=\sd[aeio])|[Cc]orso|[Vv]iale|[Vv]icolo|[Pp]iazza(?:le|tta)?|"
    r"[Ll]ungo\w{3,10}|ul\.|al\.|os\.|ulica|aleja"
)
_SOFTWARE = r"Windows|Python|Java|Office|Excel|Android|Ubuntu|Chrome|Twitter|Email|Google"
_NAMED_STREETS = (
    r"(?<![\w.,/])\d{1,4}(?:\s?(?:bis|ter|quater|[A-D])\b)?,?\s"
    rf"(?:{_FRENCH_STREET})\s{_STREET_NAME}",
    rf"\b(?:{_ROMANCE_STREET})\s?{_STREET_NAME}{_NUMBER_AFTER}",
    rf"\bVia\s(?!(?:{_SOFTWARE})\b)(?:{_PARTICLES}[A-ZÀ-Þ][a-zà-ÿ'’]{{2,20}}\s?){{1,3}}(?<!\s)"
    rf"{_NUMBER_AFTER}",
    r"\b[A-ZÄÖÜ][a-zäöüß]{2,20}er\s(?:Allee|Straße|Strasse|Str\.|Platz|Weg|Damm|Ufer|Chaussee|Gasse|"
    r"Ring)\s\d{1,3}[a-z]?\b",
    r"\b(?:Am|An der|Auf der|Auf dem|Im|In der|In den|Zum|Zur|Lange|Alte|Neue|Hohe)\s"
    r"[A-ZÄÖÜ][a-zäöüß]{2,20}\s\d{1,3}[a-z]?(?=,\s?\d{5}\s[A-ZÄÖÜ])",
    r"\bUnter den Linden\s\d{1,3}\b",
)
_UNIT = (
    r"\b(?:suite|apt\.?|apartment|unit|flat|studio|floor|piso|piano|puerta|appartamento|"
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
_ADDRESS_PARTS: dict[str, tuple[str, ...]] = {
    "street": (
        rf"(?<![\w.]){_HOUSE},?[ ]{_TERMS}(?:{_STREET})\b\.?(?:[ ]\d{{1,4}}[a-z]?\b)?",
        rf"(?<![\w.])(?:{_HOUSE},?[ ])?{_CAPITALISED_WORDS}"
        rf"(?:[^\W\d_][\w\-]{{1,40}}{_COMPOUND}|Strasse|Straße|út)[ ]\d{{1,4}}(?:-\d+)?[a-z]?\b",
        rf"(?<!\w){_TERM}[ ](?:{_STREET_BEFORE_NUMBER})[ ]\d{{1,4}}\b\.?",
        rf"(?<![\w.])(?:{_HOUSE},?[ ])(?:{_STREET_BEFORE_NAME})[ ]{_TERMS}{_TERM}",
    ),
    "streetlike": (
        rf"(?<![\w.]){_HOUSE},?[ ]{_TERMS}(?:{_STREETLIKE})\b\.?(?:[ ]\d{{1,4}}[a-z]?\b)?",
        rf"(?<![\w.])(?:{_HOUSE},?[ ])(?:{_LEADING})\.?[ ]{_TERMS}{_TERM}",
        rf"(?<!\w)(?:{_HOUSE},?[ ])?(?:{_LEADING})\.?[ ]{_TERMS}{_TERM},?[ ]\d{{1,4}}[a-z]?\b",
        rf"(?<![\w.])\d{{1,5}}[ ]{_TERMS}{_TERM}[ ]\d{{1,5}}\b",
    ),
    "named": _NAMED_STREETS,
    "room": (r"\broom[ ]?#?\d{1,5}[A-Za-z]?\b",),
    "unit": (_UNIT,),
    "forces": (r"\b(?:APO|FPO|DPO)[ ](?:AA|AE|AP)[ ]\d{5}\b",),
    "city": (rf"\b{_TERMS}{_TERM}\s?,?\s+(?:{_STATE})\s+\d{{5}}(?:-\d{{4}})?\b",),  # City, ST 12345
    "place": (
        r"\b[A-Z]{1,2}\d[A-Z\d]?[ ]\d[A-Z]{2}\b",  # United Kingdom
        r"\b[A-Z]\d[A-Z][ ]?\d[A-Z]\d\b",  # Canada
        r"\b\d{4}[ ]?[A-Z]{2}\b",  # Netherlands
        r"\b\d{5}[ ](?=[^\W\d_]{3})" + _TERM,  # most of Europe: before the place
        r"\b\d{2}-\d{3}[ ]" + _TERM,  # Poland
        r"\b\d{5}-\d{3}\b",  # Brazil
        r"(?<=[^\W\d_][ \-])\d{5,6}\b",  # India, and 5 digits behind a name
    ),
    "corner": (
        rf"\bcorner of (?:the )?{_TERMS}{_TERM}(?: \d+)?\.? (?:St\.? )?and {_TERMS}{_TERM}",
    ),
}
_CASE_MATTERS = frozenset({"city", "place", "named"})
_NEEDS_CAPITAL = frozenset({"street", "streetlike"})  # some word of theirs begins with one
_WITHOUT_LINES = frozenset({"city", "corner"})  # may go over lines, or have no digit of its own
_PART_REGEXES = {
    kind: re.compile("|".join(regexes), 0 if kind in _CASE_MATTERS else re.IGNORECASE)
    for kind, regexes in _ADDRESS_PARTS.items()
}
_UPPER_CASE = re.compile(r"[A-ZÀ-ÞΑ-ΩА-Я]")
_LINE_WITH_DIGIT = re.compile(r"^[^\n\d]*+\d[^\n]*", re.MULTILINE)
#: What announces an address; the address then reaches to the end of the clause.
_ANNOUNCED_ADDRESS = re.compile(
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
    for match in _ANNOUNCED_ADDRESS.finditer(text):
        if any(regex.search(match["value"]) for regex in _PART_REGEXES.values()):
            yield Finding(*match.span("value"), "ADDRESS", _HIGH)
    yield from _join_neighbours(text, sorted(_find_parts(text)))


def _find_parts(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, kind) of every part."""
    lines = [line.span() for line in _LINE_WITH_DIGIT.finditer(text)]
    everything = [(0, len(text))] if lines else []
    for kind, regex in _PART_REGEXES.items():
        for span in everything if kind in _WITHOUT_LINES else lines:
            for match in regex.finditer(text, *span):
                if kind not in _NEEDS_CAPITAL or _UPPER_CASE.search(match[0]):
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
        yield Finding(start, end, "ADDRESS", _address_score(kinds))


def _is_gap_within_address(gap: str) -> bool:
    max_gap = _MAX_GAP_ACROSS_LINES if "\n" in gap or "," in gap else _MAX_GAP
    return len(gap) <= max_gap and not re.search(r"[!?;:]|[.](?=[ ][A-Z])|\d|\n\s*\n", gap)


def _address_score(kinds: set[str]) -> float:
    if len(kinds - {"streetlike"}) > 1 or kinds & {"forces"}:
        return _HIGH
    return (
        _MEDIUM if len(kinds) > 1 or kinds & {"street", "named", "corner", "unit", "city"} else _LOW
    )


#: This project's own finders by the entity that they look for.
FINDERS: dict[str, tuple[Finder, ...]] = {
    "PHONE_NUMBER": (
        pattern_finder("PHONE_NUMBER", _PHONE_PATTERNS, digits=5),
        _find_phones_beside_email,
    ),
    "CREDIT_CARD": (_find_valid_cards, pattern_finder("CREDIT_CARD", _CARD_PATTERNS, digits=12)),
    "IBAN_CODE": (
        pattern_finder("IBAN_CODE", [(_ANNOUNCED_IBAN, _FORMATTED), (_IBAN_FIELD, _NAMED)]),
    ),
    "CRYPTO": (pattern_finder("CRYPTO", [(_WALLET, _FORMATTED)], re.NOFLAG),),
    "US_SSN": (
        pattern_finder("US_SSN", [(_ANNOUNCED_SSN, _ANNOUNCED), (_FORMATTED_SSN, _FORMATTED)]),
    ),
    **{entity: (pattern_finder(entity, patterns),) for entity, patterns in _ID_PATTERNS.items()},
    "ADDRESS": (find_addresses,),
    "PERSON": (find_names,),
}

"""Dates of birth and national numbers, for runs that list them in `synth.pii.entities`.

    DATE_OF_BIRTH   born on 12 March 1984 · DOB: 1984-03-12 · geboren am 12.03.1984
    FR_NIR, BR_CPF, NL_BSN, CN_ID           what presidio has no recogniser for

A date is a date of birth only by the words before it. presidio's own recognisers of other countries
(UK_NINO, ES_NIF, IT_FISCAL_CODE, PL_PESEL, IN_AADHAAR, DE_TAX_ID, …) are there too: analyzer.py.
"""

from __future__ import annotations

from pipeline.synth.privacy.finding import Finder, pattern_finder

_ANNOUNCED, _FORMATTED = 0.85, 0.7

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

_PATTERNS: dict[str, tuple[tuple[str, float], ...]] = {
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

ID_FINDERS: dict[str, tuple[Finder, ...]] = {
    entity: (pattern_finder(entity, patterns),) for entity, patterns in _PATTERNS.items()
}

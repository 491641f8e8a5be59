"""Credentials in text, looked for whatever `synth.pii.entities` says.

detect-secrets' plugins read the text line by line; they know the issuers' key formats, credentials
in URLs, quoted passwords in code, and strings of high entropy. What they leave out is here: keys of
issuers that they do not know, a private key's body, and passwords in prose, where nothing is quoted
and only the look of a word tells a password from the next word of the sentence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from pipeline.synth.privacy.finding import Finding, pattern_finder

#: Entity types of this module.
SECRET_ENTITIES = ("API_KEY", "PASSWORD", "PRIVATE_KEY")

_SURE = 0.9

#: Not used: addresses are not secrets (IP_ADDRESS covers them), and a key's first line is not the key.
_UNUSED = frozenset({"IPPublicDetector", "PrivateKeyDetector"})
_PASSWORDS = frozenset({"BasicAuthDetector"})
_ENTROPY = frozenset({"Base64HighEntropyString", "HexHighEntropyString"})

_KEYS = (
    r"\bsk-(?:[A-Za-z]{2,10}-)*[A-Za-z0-9_\-]{20,}",  # OpenAI's newer forms, Anthropic
    r"\bASIA[0-9A-Z]{16}\b",  # AWS, temporary
    r"\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_[A-Za-z0-9_]{30,}\b",  # detect-secrets reports only the prefix
    r"\bAIza[0-9A-Za-z_\-]{35}(?![0-9A-Za-z_\-])",  # Google
    r"\bhf_[A-Za-z0-9]{30,}\b",  # Hugging Face
    r"\b(?:api|tok|token|key|secret|pat|pk|rk|sk|live|test)[_\-](?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{24,}\b",
    r"(?i:\b(?:api|access|secret|auth)[_\- ]?(?:key|token))['\"]?\s*(?:[:=]|\bis\b)\s*['\"]?"
    r"(?P<value>(?=[A-Za-z_\-]*[0-9])(?=[0-9_\-]*[A-Za-z])[A-Za-z0-9_\-/+]{16,})",
)
#: To the end of the text where the closing line is missing: half a key is a key.
_PEM = r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)"

_find_keys = pattern_finder("API_KEY", [(key, _SURE) for key in _KEYS], re.RegexFlag(0))
_find_pem = pattern_finder("PRIVATE_KEY", [(_PEM, _SURE)])

_PASSWORD_WORD = r"\b\w*(?:password|passwd|passphrase|passcode|pwd|kennwort|passwort|contraseña|mot de passe)s?\b"
_LINK = r"(?:\s(?:is|was|to|of|for \w+ (?:is|was))\b)?"
_QUOTED_PASSWORD = re.compile(
    rf"{_PASSWORD_WORD}[\"']?{_LINK}\s?[:=]?\s?(?P<quote>['\"`])(?P<value>[^'\"`\n]{{4,40}})(?P=quote)",
    re.IGNORECASE,
)
_BARE_PASSWORD = re.compile(
    rf"{_PASSWORD_WORD}{_LINK}\s?[:=]?\s?(?P<value>[^\s\"'`]{{6,40}})", re.IGNORECASE
)
_LOGIN_PAIR = re.compile(r"[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+\s?[/:]\s?(?P<value>[^\s\"'`|,]{6,40})")
_IN_URL = re.compile(r"\b[a-z][a-z0-9+.\-]{1,20}://[^\s:/@]+:[^\s:/@]{3,}@")


#: Whatever any plugin finds holds one of these; most lines of most prompts hold none, and are not looked at further.
_WORTH_A_LOOK = re.compile(
    r"(?i)(?=[A-Za-z_\-+/=.:]*[0-9])[A-Za-z0-9_\-+/=.:]{16,}|pass|pwd|secret|key|token|auth|contrase|cred|://\S*:\S*@"
)
_PASSWORD_HINT = re.compile(r"(?i)pass|pwd|kennwort|contrase")


def find_secrets(text: str) -> Iterator[Finding]:
    """Secrets of one text."""
    yield from _find_keys(text)
    yield from _find_pem(text)
    yield from _passwords(text)
    yield from _by_plugins(text)


def _passwords(text: str) -> Iterator[Finding]:
    named = _PASSWORD_HINT.search(text) is not None
    for match in _IN_URL.finditer(text) if "://" in text else ():
        yield Finding(match.start(), match.end(), "PASSWORD", _SURE)
    for match in _QUOTED_PASSWORD.finditer(text) if named else ():
        if _is_no_code(match["value"]):
            yield Finding(*match.span("value"), "PASSWORD", _SURE)
    for regex, possible in ((_BARE_PASSWORD, named), (_LOGIN_PAIR, "@" in text)):
        for match in regex.finditer(text) if possible else ():
            value = match["value"].rstrip(".,;:?")
            if _looks_chosen(value):
                yield Finding(
                    match.start("value"), match.start("value") + len(value), "PASSWORD", _SURE
                )


def _is_no_code(value: str) -> bool:
    """A quoted value, not a placeholder or a prompt such as 'Password: '."""
    return bool(value.strip()) and not re.fullmatch(
        r"[<{\[%$].*|.*[:?]\s*|[*x•.]+|[a-z_]+(?: [a-z_]+)+", value
    )


def _looks_chosen(value: str) -> bool:
    """Letters mixed with digits or signs inside, and nothing that only code contains."""
    if re.search(
        r"[(\[{][)\]}]|[()\[\]{}<>;]{2}|^\w+[(\[.]|[<>;{}]|://|@\w+\.\w", value
    ) and not re.search(r"\d.*[^\w\s]|[^\w\s].*\d", value):
        return False
    if re.fullmatch(
        r"[\w.]+\(.*|.*\)|[\w.]*=.*|\$\{?\w+\}?|\w+(?:\.\w+)+|[\w\-]+\[.*", value
    ) and not re.search(r"\d", value):
        return False
    letters, digits = (
        any(character.isalpha() for character in value),
        any(character.isdigit() for character in value),
    )
    signs = re.search(r"\w[^\w\s.,:;/'\-]+|^[!#$%&*+@^~]\w", value)
    return letters and (digits or bool(signs))


def _by_plugins(text: str) -> Iterator[Finding]:
    offset = 0
    for line in text.split("\n"):
        if _WORTH_A_LOOK.search(line):
            for start, end, entity in _line_secrets(line):
                yield Finding(offset + start, offset + end, entity, _SURE)
        offset += len(line) + 1


def _line_secrets(line: str) -> Iterator[tuple[int, int, str]]:
    for plugin in _plugins():
        name = type(plugin).__name__
        for secret in plugin.analyze_line(filename="prompt", line=line, line_number=1) or ():
            value = secret.secret_value
            start = line.find(value) if value else -1
            if start >= 0 and _is_plausible(name, line, start, value):
                yield (
                    start,
                    start + len(value),
                    "PASSWORD"
                    if name in _PASSWORDS or _names_password(name, line[:start])
                    else "API_KEY",
                )


def _names_password(plugin: str, before: str) -> bool:
    return plugin == "KeywordDetector" and re.search(r"(?i)pass|pwd|contrase", before) is not None


def _is_plausible(plugin: str, line: str, start: int, value: str) -> bool:
    """detect-secrets' own heuristics against false alarms; entropy counts only for an assigned value that is not named a hash."""
    from detect_secrets.filters import heuristic

    if (
        heuristic.is_sequential_string(value)
        or heuristic.is_templated_secret(value)
        or heuristic.is_not_alphanumeric_string(value)
    ):
        return False
    if plugin in _ENTROPY:
        assigned = re.search(r"(\w+)['\"]?\]?\s*(?:=|:|=>)\s*[rbf]?['\"]$", line[:start])
        return assigned is not None and not re.search(
            r"(?i)hash|sha|md5|digest|commit|sum|uuid|guid|id$|etag|expected|output|alphabet",
            assigned[1],
        )
    return plugin != "KeywordDetector" or not (
        heuristic.is_potential_uuid(value) or heuristic.is_indirect_reference(line)
    )


@functools.cache
def _plugins() -> tuple[Any, ...]:
    """detect-secrets' plugins with their default settings, made once."""
    from detect_secrets.core.plugins.initialize import from_plugin_classname
    from detect_secrets.settings import default_settings

    with default_settings() as settings:
        return tuple(
            from_plugin_classname(name) for name in sorted(settings.plugins) if name not in _UNUSED
        )

"""Credentials in text, detected whatever `synth.pii.entities` says.

detect-secrets' plugins read the text line by line; they know the issuers' key formats, credentials
in URLs, quoted passwords in code, and strings of high entropy. What they leave out is here: keys of
issuers that they do not know, a private key's body, and passwords in prose, where nothing is quoted
and only the look of a word tells a password from the next word of the sentence.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterator
from typing import Any

from pipeline.config.credentials import ISSUED_KEYS
from pipeline.synth.privacy.finding import Finding, pattern_finder

#: Entity types of this module.
SECRET_ENTITIES = ("API_KEY", "PASSWORD", "PRIVATE_KEY")

_SCORE = 0.9

#: Not used: addresses are not secrets (IP_ADDRESS covers them), a key's first line is not the key.
_UNUSED = frozenset({"IPPublicDetector", "PrivateKeyDetector"})
_PASSWORDS = frozenset({"BasicAuthDetector"})
#: Plugins that look for a name, a sign and a value, in time that grows with the square of a line's
#: length, or the third power of its blanks: they are given pieces of a long line.
_BY_NAME = frozenset(
    {"KeywordDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "CloudantDetector"}
    | {"SoftlayerDetector"}
)
#: Characters. A value that is longer than the overlap may be cut, and is left to the others.
_PIECE, _OVERLAP = 500, 200
_BLANKS = re.compile(r"[^\S\n]{8,}+")
_ENTROPY = frozenset({"Base64HighEntropyString", "HexHighEntropyString"})

_MIXED = r"(?=[A-Za-z_\-.=+/~]*+[0-9])(?=[0-9_\-.=+/~]*+[A-Za-z])"  # letters and digits
_WORD = r"(?:[a-z]+[0-9]{0,2}|[0-9]{1,4})"
#: A path, or words in a row, such as a table's or a cache's key has.
_NAME = rf"(?:/|{_WORD}(?:[_\-/]{_WORD})+(?![A-Za-z0-9_\-/+]))"


def _assigned(condition: str = "") -> str:
    """A value behind its name, and what else must hold where it begins. Not code such as
    `get_key_v2(…)` or `settings.key_v2`, nor the next line of an empty template."""
    mixed = r"(?=[A-Za-z_\-/+]*+[0-9])(?=[0-9_\-/+]*+[A-Za-z])"
    value = rf"(?P<value>{condition}{mixed}[A-Za-z0-9_\-/+]{{16,}}+)(?![(\w]|\.\w)"
    return rf"\s*(?:(?::|\bis\b)\s*|=[^\S\n]*)['\"]?{value}"


_KEYS = (
    *ISSUED_KEYS,
    r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/\w{6,}+/[\w\-/]{20,}+",
    r"\b(?:api|tok|token|key|secret|pat|pk|rk|sk|live|test)[_\-]"
    r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{24,}\b",
    rf"\b[Bb]earer\s(?P<value>{_MIXED}[A-Za-z0-9_\-.=+/~]{{20,}})",
    r"\bsig=(?P<value>(?:[A-Za-z0-9/+]|%2[BbFf]){43}(?:=|%3[Dd]))",  # Azure's signed addresses
    # In API_KEY, MY_API_KEY, my-api-key, myApiKey:
    r"(?:(?<![A-Za-z0-9])|(?<=[a-z])(?=[A-Z]))"
    r"(?i:(?:api|access|secret|auth|account)[_\- ]?(?:key|token)|client[_\- ]?secret)['\"]?"
    rf"{_assigned()}",
    # Other variables of an environment:
    rf"(?<=[A-Z0-9]_)(?:TOKEN|SECRET|KEY(?:_BASE)?){_assigned(f'(?!{_NAME})')}",
)
#: To the end of the text where the closing line is missing: half a key is a key.
_PEM = (
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    r"(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)"
)

_find_keys = pattern_finder("API_KEY", [(key, _SCORE) for key in _KEYS], re.NOFLAG)
_find_pem = pattern_finder("PRIVATE_KEY", [(_PEM, _SCORE)])

_PASSWORD_WORD = (
    r"(?:\b\w*(?:password|passwd|passphrase|passcode|pwd|kennwort|passwort|contraseña|mot de passe|"
    r"senha|hasło|wachtwoord|lösenord|passord|adgangskode|salasana|jelszó|şifre|пароль|heslo|"
    r"palavra-passe|parola|κωδικός|סיסמה)(?:s|m|nya)?\b|mật khẩu|كلمة (?:المرور|السر)"
    r"|(?<![^\W_])(?:pw|pass|psw|mdp|clave)(?=[\"']?\s?[:=])|\bpw(?=\s)|\bclave(?=\ses\s))"
)
#: Between the word and its value, as in "das Passwort für den Server lautet …".
_ANNOUNCES = (
    r"(?:\s(?:to|of)\b|(?:\s[^\W\d_](?:[^\W\d_]|['’\-]){0,14}){0,3}?"
    r"(?:\s?[:=]|\s[\-–—](?=\s)|\sc['’]est|\s(?:is|was|lautet|ist|est|es|è|é|jest|är|er|on|je|este|là|"
    r"هي|είναι|היא)\b:?))?"
)
_QUOTED_PASSWORD = re.compile(
    rf"(?:{_PASSWORD_WORD}[\"']?{_ANNOUNCES}|(?:密码|密碼|口令|パスワード|비밀번호|비번)\W?\w?)\s?[:=]?\s?"
    r"(?P<quote>['\"`])(?P<value>[^'\"`\n]{4,40})(?P=quote)",
    re.IGNORECASE,
)
_BARE_PASSWORD = re.compile(
    rf"{_PASSWORD_WORD}[\"']?{_ANNOUNCES}\s?[:=]?\s?"
    r"(?P<value>(?!@[\w.\-]+[:/])[^\s\"'`]{6,40})",
    re.IGNORECASE,
)
#: Between word and value stand particles, and no ASCII.
_CJK_PASSWORD = re.compile(
    r"(?:密码|密碼|口令|パスワード|暗証番号|비밀번호|비번)[^\x00-\x7f]{0,4}[\s:=\"']{0,3}"
    r"(?P<value>[!-~]{6,40})"
)
_LOGIN_PAIR = re.compile(
    r"(?<![\w.+\-])[\w.+\-]++@[\w\-]++(?:\.[\w\-]++)++\s?[/:]\s?(?P<value>[^\s\"'`|,]{6,40})"
)
_IN_URL = re.compile(r"\b[a-z][a-z0-9+.\-]{1,20}://[^\s:/@]*:[^\s:/@]{3,}@")
_USER = r"[^\s:'\"]{1,60}"
_ARGUMENTS = r"\b[^\n|;&]{0,120}?\s"
#: Command, and what precedes a password among its arguments.
_COMMANDS = (
    r"sshpass\s-p\s?",
    rf"(?:docker|podman|nerdctl|helm|az|oc|cf|heroku|skopeo|buildah){_ARGUMENTS}(?<=\slogin\s)"
    rf"(?:[^\n|;&]{{0,120}}?\s)?-p\s",
    rf"(?:mysql\w{{0,9}}|mariadb|7za?|rar){_ARGUMENTS}-p",
    rf"mongo\w{{0,7}}{_ARGUMENTS}-p\s",
    rf"(?:sqlcmd|bcp|isql|tsql|zip|unzip){_ARGUMENTS}-P\s?",
    rf"redis-cli{_ARGUMENTS}(?:-a|--pass)\s",
    rf"ldap[a-z]{{3,9}}{_ARGUMENTS}-w\s",
    rf"snmp[a-z]{{3,9}}{_ARGUMENTS}-[AX]\s",
    rf"openssl{_ARGUMENTS}(?:-k\s|-pass(?:in|out)?\spass:)",
    rf"(?:smbclient|rpcclient|smbget){_ARGUMENTS}-U\s?['\"]?{_USER}?%",
    rf"lftp{_ARGUMENTS}-u\s{_USER}?,",
    rf"(?:curl|http|https|xh){_ARGUMENTS}(?:-u|--user|--proxy-user|-a|--auth)[\s=]['\"]?{_USER}?:",
    rf"(?:xfreerdp|cmdkey|rdesktop){_ARGUMENTS}(?:/p(?:ass)?:|-p\s)",
    rf"htpasswd\s-\w*b\w*\s\S{{1,60}}\s{_USER}\s",
    r"wpa_passphrase\s\S{1,40}\s",
    rf"net\suse{_ARGUMENTS}/user:{_USER}\s",
    r"net\suse\s(?:\S{1,3}\s)?\\{2,4}\S{1,80}\s(?!/)",
    rf"net\suser\s{_USER}\s(?!/)",
    rf"echo\s(?:-n\s)?['\"]?(?:{_USER}:)?(?=[^\n|]{{4,60}}\|\s?(?:sudo\s-S|(?:sudo\s)?chpasswd)\b)",
    r"\w{2,12}\s[^\n]{0,120}?\s?--?\w{0,12}-?(?:pass|pwd)[\s=]",
    r"-(?:storepass|keypass)\s",
)
_IN_COMMAND = re.compile(
    rf"(?<![\w./\-])(?:{'|'.join(_COMMANDS)})['\"]?(?P<value>[^\s'\"]{{6,40}})"
)
_PROGRAMS = (
    *(
        "sshpass",
        "login",
        "mysql",
        "mariadb",
        "7z",
        "rar ",
        "mongo",
        "sqlcmd",
        "bcp",
        "isql",
        "tsql",
    ),
    *("zip ", "redis-cli", "ldap", "snmp", "openssl", "smb", "rpcclient", "lftp", "curl", "http "),
    *("xfreerdp", "cmdkey", "rdesktop", "htpasswd", "wpa_pass", "net use", "sudo -s", "chpasswd"),
    *("-pass", "--pwd", "storepass", "keypass", "https ", "xh "),
)
_BASIC = re.compile(r"(?i)\bbasic\s(?P<value>[a-z0-9+/]{8,}={0,2})")
_LOGIN = re.compile(
    r"(?<![\w/])(?:logins?|user ?name|user|credentials|creds|zugang|usuario|identifiants?|utente|"
    r"usuário)(?:\s?[:=]\s?|\s(?:is|are)\s)[\w.+\-]{2,40}(?:\s?[/|]\s?|:)(?P<value>[^\s\"'`|,]{6,40})",
    re.IGNORECASE,
)

#: Whatever any plugin reports contains one of these; most lines of most prompts do not, and are
#: skipped.
_MAY_CONTAIN_SECRET = re.compile(
    r"(?i)(?<![A-Za-z0-9_\-+/=.:])(?=[A-Za-z_\-+/=.:]*+[0-9])[A-Za-z0-9_\-+/=.:]{16,}+"
    r"|pass|pwd|secret|key|token|auth|contrase|cred|://[^\s:]{0,256}+:[^\s@]{0,256}+@"
)
_PLACEHOLDER = re.compile(r"[<{\[%$].*|.*[:?]\s*|[*x•.]+|[a-z_]+(?: [a-z_]+)+")
_CODE_INSIDE = re.compile(r"[(\[{][)\]}]|[()\[\]{}<>;]{2}|^\w+[(\[.]|[<>;{}]|://|@\w+\.\w")
_CODE_WHOLE = re.compile(r"[\w.]+\(.*|.*\)|[\w.]*=.*|\$\{?\w+\}?|\w+(?:\.\w+)+|[\w\-]+\[.*")
_SIGN_INSIDE = re.compile(r"\w[^\w\s.,:;/'\-]+|^[!#$%&*+@^~]\w")

#: An assigned value, and the names that say it is no secret.
_ASSIGNMENT = re.compile(r"(?<!\w)(\w++)['\"]?\]?\s*(?:=|:|=>)\s*[rbf]?['\"]$")
_LONGEST_NAME = 200  # characters before a value that are looked at
_NO_SECRET_NAME = re.compile(
    r"(?i)hash|sha|md5|digest|commit|sum|uuid|guid|id$|etag|expected|output|alphabet"
)
_PASSWORD_HINTS = (
    *("pass", "pwd", "pw", "psw", "mdp", "clave", "senha", "hasło", "heslo", "kennwort"),
    *(
        "contrase",
        "wachtwoord",
        "lösenord",
        "пароль",
        "adgangskode",
        "salasana",
        "jelszó",
        "parola",
    ),
    *("şifre", "mật khẩu", "كلمة", "סיסמה", "κωδικός"),
)
_LOGIN_HINTS = (
    *("login", "user", "creds", "credentials", "zugang", "usuario", "identifiant", "utente"),
    "usuário",
)
_CJK_HINTS = ("密码", "密碼", "口令", "パスワード", "暗証番号", "비밀번호", "비번")


def find_secrets(text: str) -> Iterator[Finding]:
    """Secrets of one text."""
    yield from _find_keys(text)
    yield from _find_pem(text)
    yield from _passwords(text)
    yield from _by_plugins(text)


def _passwords(text: str) -> Iterator[Finding]:
    lower = text.lower()
    if "://" in text:
        for match in _IN_URL.finditer(text):
            yield Finding(*match.span(), "PASSWORD", _SCORE)
    if any(hint in lower for hint in _PASSWORD_HINTS):
        for match in _QUOTED_PASSWORD.finditer(text):
            if not _is_placeholder(match["value"]):
                yield Finding(*match.span("value"), "PASSWORD", _SCORE)
        yield from _unquoted_passwords(text, _BARE_PASSWORD)
    if any(hint in text for hint in _CJK_HINTS):
        yield from _unquoted_passwords(text, _CJK_PASSWORD)
    if "@" in text:
        yield from _unquoted_passwords(text, _LOGIN_PAIR)
    if any(hint in lower for hint in _LOGIN_HINTS):
        yield from _unquoted_passwords(text, _LOGIN)
    if any(program in lower for program in _PROGRAMS):
        yield from _unquoted_passwords(text, _IN_COMMAND)
    if "basic " in lower:
        yield from _basic_credentials(text)


def _unquoted_passwords(text: str, regex: re.Pattern[str]) -> Iterator[Finding]:
    for match in regex.finditer(text):
        value, start = match["value"].rstrip(".,;:?"), match.start("value")
        if _looks_like_password(value):
            yield Finding(start, start + len(value), "PASSWORD", _SCORE)


def _basic_credentials(text: str) -> Iterator[Finding]:
    """HTTP's `Basic`, with a user and what looks like a password in base 64."""
    for match in _BASIC.finditer(text):
        try:
            user, _, password = (
                base64.b64decode(match["value"], validate=True).decode().partition(":")
            )
        except ValueError:
            continue
        if user and _looks_like_password(password):
            yield Finding(*match.span("value"), "PASSWORD", _SCORE)


def _is_placeholder(value: str) -> bool:
    """A quoted value that stands for one, is code, or is a prompt such as 'Password: '."""
    return not value.strip() or bool(_PLACEHOLDER.fullmatch(value))


def _looks_like_password(value: str) -> bool:
    """Letters mixed with digits or signs inside, and nothing that only code contains."""
    if _CODE_INSIDE.search(value) and not re.search(r"\d.*[^\w\s]|[^\w\s].*\d", value):
        return False
    if _CODE_WHOLE.fullmatch(value) and not re.search(r"\d", value):
        return False
    has_letters = any(character.isalpha() for character in value)
    has_digits = any(character.isdigit() for character in value)
    return has_letters and (has_digits or bool(_SIGN_INSIDE.search(value)))


def _by_plugins(text: str) -> Iterator[Finding]:
    offset = 0
    for line in text.split("\n"):
        if _MAY_CONTAIN_SECRET.search(line):
            for start, end, entity in _line_secrets(line):
                yield Finding(offset + start, offset + end, entity, _SCORE)
        offset += len(line) + 1


def _line_secrets(line: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, entity) of what detect-secrets reports in one line."""
    pieces = list(_pieces(line))
    for plugin in _plugins():
        name = type(plugin).__name__
        for part in pieces if name in _BY_NAME else [line]:
            for secret in plugin.analyze_line(filename="prompt", line=part, line_number=1) or ():
                value = secret.secret_value
                start = line.find(value) if value else -1
                if start >= 0 and _is_plausible(name, line, start, value):
                    yield start, start + len(value), _entity(name, line[:start])


def _pieces(line: str) -> Iterator[str]:
    """Overlapping ones, with short blanks; a short line is one."""
    narrow = _BLANKS.sub(" " * 8, line)
    for start in range(0, max(1, len(narrow) - _OVERLAP), _PIECE - _OVERLAP):
        yield narrow[start : start + _PIECE]


def _entity(plugin: str, before: str) -> str:
    names_password = plugin == "KeywordDetector" and re.search(r"(?i)pass|pwd|contrase", before)
    return "PASSWORD" if plugin in _PASSWORDS or names_password else "API_KEY"


def _is_plausible(plugin: str, line: str, start: int, value: str) -> bool:
    """detect-secrets' own heuristics against false alarms.

    Entropy counts only for an assigned value that is not named a hash.
    """
    from detect_secrets.filters import heuristic

    if (
        heuristic.is_sequential_string(value)
        or heuristic.is_templated_secret(value)
        or heuristic.is_not_alphanumeric_string(value)
    ):
        return False
    if plugin in _ENTROPY:
        assigned = _ASSIGNMENT.search(line, max(0, start - _LONGEST_NAME), start)
        return assigned is not None and not _NO_SECRET_NAME.search(assigned[1])
    if plugin == "KeywordDetector":
        return not (heuristic.is_potential_uuid(value) or heuristic.is_indirect_reference(line))
    return True


@functools.cache
def _plugins() -> tuple[Any, ...]:
    """detect-secrets' plugins with their default settings, made once."""
    from detect_secrets.core.plugins.initialize import from_plugin_classname
    from detect_secrets.settings import default_settings

    with default_settings() as settings:
        return tuple(
            from_plugin_classname(name) for name in sorted(settings.plugins) if name not in _UNUSED
        )

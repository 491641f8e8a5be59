"""Keys where a name or an address belongs: refused before anything can show them.

    api_key_env: sk-…                        not a variable's name
    https://user:key@host, …/v1?token=…      not an address alone
    wandb_project: 0123…cdef, hf_…, Bearer … what a key looks like, whatever it is the value of

Whatever the configuration holds is shown: by `eagle3 show`, in manifests, messages and jobs.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from pipeline.errors import ConfigError

_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
#: Capitals and digits without a break, as key ids of clouds and base32 have them.
_KEY_IN_CAPITALS = re.compile(r"(?=.*[0-9])[A-Z0-9]{16,}")
_IN_ADDRESS = re.compile(
    r"https?://[^/?#\s]+@|://[^/?#\s]*:[^/?#\s]*@"
    r"|://\S*[?&;]([\w-]*(key|token|secret|password|signature)|auth|pwd|sig)=",
    re.IGNORECASE,
)
#: What issuers write before their keys.
_PREFIXES = (
    r"AIza|gh[pousr]_|github_pat_|hf_|npm_|gsk_|r8_|ntn_|nvapi-|pplx-|xai-|fw_|tvly-|wandb_v\d_|"
    r"[spr]k_(?:live|test)_|whsec_|shp(?:at|ca|pa|ss)_|sq0(?:atp|csp)-|EAA[A-Z]|"  # payments, shops
    r"xapp-\d-|xox[a-z]-|GOCSPX-|ya29\.|SG\.|lin_api_|figd_|key-|pat[A-Za-z0-9]{14}\.|ATATT3x|"
    r"hvs\.|gl(?:sa|pat|rt|dt)[_\-]|do[op]_v1_|dckr_pat_|dapi|pypi-AgE|sbp_|pscale_tkn_|dp\.pt\.|"
    r"NRAK-|AKCp|tok-|AGE-SECRET-KEY-1|sntrys_"
)
#: Keys of these issuers, of OpenAI and Anthropic, and JSON web tokens.
ISSUED_KEYS = (
    rf"\b(?:{_PREFIXES})(?=[A-Za-z_\-.]*+[0-9])[A-Za-z0-9_\-.]{{19,}}+",
    r"\bhf_[A-Za-z0-9]{30,}\b",  # often letters alone; with a `_` it is a name in code
    r"\bsk-(?:[A-Za-z]{2,10}-)*[A-Za-z0-9_\-]{20,}",
    r"\beyJ[\w\-]{8,}+\.[\w\-]{8,}+(?:\.[\w\-]*+)?",
)
#: A whole value that is a key: one of those, a cloud's key id, or 32 digits of a hexadecimal number
#: and more, as Weights & Biases and many others have them.
_KEY = re.compile(
    rf"(?i:(?:bearer|basic|token)\s+)?(?:{'|'.join(ISSUED_KEYS)}|(?:AKIA|ASIA)[A-Z0-9]{{16}}"
    r"|[0-9a-fA-F]{32,})|(?i:bearer|basic)\s+\S{8,}"
)
#: Hexadecimal without being a secret: a commit.
_COMMITS = ("revision",)


def _is_a_name(value: str) -> str:
    if not _NAME.fullmatch(value) or _KEY_IN_CAPITALS.fullmatch(value):
        raise ValueError(
            "must be the name of an environment variable, in capitals, not the value itself"
        )
    return value


#: A field of it is declared with `repr=False`, so that no message shows what was there instead.
VariableName = Annotated[str, AfterValidator(_is_a_name)]


def refuse_credentials(tree: dict[str, Any], where: str) -> None:
    """Raises ConfigError, which never quotes it, for a key in `tree`, or an address with one."""
    for key, text in texts(tree):
        is_key = _KEY.fullmatch(text.strip()) and key.rpartition(".")[2] not in _COMMITS
        if is_key or holds_credentials(text):
            what = (
                "this looks like a key" if is_key else "an address here holds a key or a password"
            )
            raise ConfigError(
                what,
                where=f"{where}: {key}",
                fix="take it out, and change it where others saw it; "
                "servers' keys are read from the variable that synth.generator.api_key_env names, "
                "WANDB_API_KEY and HF_TOKEN from the environment, "
                "those of a store from its own configuration",
            )


def holds_credentials(address: str) -> bool:
    """Whether there is a key or a password in an address."""
    is_one_word = not re.search(r"\s", address.strip())
    return is_one_word and _IN_ADDRESS.search(address) is not None


def key_headers(variable: str | None, *, where: str) -> dict[str, str]:
    """What sends the key in an environment variable; nothing without a name.

    Raises ConfigError, which never quotes it, for a key that is not there or fits into no header.
    """
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        what = "no header can carry the value of" if key else "the environment has no"
        raise ConfigError(f"{what} {variable}", where=where, fix=f"export {variable}=…")
    return {"Authorization": f"Bearer {key}"}


def without_key(text: str, headers: Mapping[str, str]) -> str:
    """`text` without the key that `headers` send: a refusal may quote what it refuses."""
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    return text.replace(key, "…") if key else text


def check_endpoint(url: str, *, with_key: bool) -> None:
    """Raises ValueError, which never quotes it, for a base URL that cannot be asked safely."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not url.startswith(("http://", "https://")) or not host:
        raise ValueError("an endpoint is no URL; write http:// or https:// and a host")
    if parts.username is not None or "?" in url or "#" in url:
        raise ValueError("an endpoint is more than an address; leave user, key and query out")
    if with_key and parts.scheme == "http" and not is_this_machine(host):
        raise ValueError(
            "the API key would cross the network unencrypted; use https://, "
            "or set allow_plain_http=true beside it where nobody else can listen"
        )


def is_this_machine(host: str) -> bool:
    """Whether nobody else can listen at an address, or reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Texts anywhere in a tree, with their dotted keys."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from texts(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from texts(child, f"{key}.{index}")
    elif isinstance(value, str):
        yield key, value

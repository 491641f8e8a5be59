"""Patterns of credentials, looked for whatever `synth.pii.entities` says.

Issued keys are recognised by their fixed prefixes; a password only where something is assigned to
it that a program would not contain: a quoted literal, or a bare word with letters and digits.
"""

from __future__ import annotations

from typing import Any

#: Entity types of the recognisers below.
SECRET_ENTITIES = ("API_KEY", "PASSWORD", "PRIVATE_KEY")

_SCORE = 0.9

_PATTERNS: dict[str, dict[str, str]] = {
    "API_KEY": {
        "OpenAI or Anthropic": r"\bsk-(?:[A-Za-z]{2,10}-)*[A-Za-z0-9_\-]{20,}",
        "Stripe": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}\b",
        "AWS access key id": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_[A-Za-z0-9_]{30,}\b",
        "GitLab": r"\bglpat-[A-Za-z0-9_\-]{20,}",
        "Slack": r"\bxox[abposr]-[A-Za-z0-9\-]{10,}",
        "Google": r"\bAIza[0-9A-Za-z_\-]{35}(?![0-9A-Za-z_\-])",
        "Hugging Face": r"\bhf_[A-Za-z0-9]{30,}\b",
        "JSON web token": r"\beyJ[A-Za-z0-9_\-]{10,}\.eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}",
        "assigned": r"\b(?:api|access|secret|auth)[_\- ]?(?:key|token)['\"]?\s*[:=]\s*['\"]?(?=[A-Za-z_\-]*[0-9])(?=[0-9_\-]*[A-Za-z])[A-Za-z0-9_\-/+]{16,}",
    },
    "PRIVATE_KEY": {
        # To the end of the text where the closing line is missing: half a key is a key.
        "PEM block": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    },
    "PASSWORD": {
        "quoted": r"\b\w*(?:password|passwd|pwd|passphrase)['\"]?\s*[:=]\s*(['\"])[^'\"\s]{4,}\1",
        "bare": r"\b(?:password|passwd|pwd|passphrase)\s*(?:[:=]|\bis\b:?)\s*(?=[^\s'\"(){}\[\],;]*[0-9])(?=[^\s'\"(){}\[\],;]*[A-Za-z])[^\s'\"(){}\[\],;]{6,}",
        "in a URL": r"\b[a-z][a-z0-9+.\-]{1,20}://[^\s:/@]+:[^\s:/@]{3,}@",
    },
}


def secret_recognizers() -> list[Any]:
    """One presidio PatternRecognizer an entity type."""
    from presidio_analyzer import Pattern, PatternRecognizer

    def recognizer(entity: str) -> Any:
        patterns = [Pattern(name, regex, _SCORE) for name, regex in _PATTERNS[entity].items()]
        return PatternRecognizer(supported_entity=entity, name=f"{entity} patterns", patterns=patterns)

    return [recognizer(entity) for entity in SECRET_ENTITIES]

"""Credentials: what detect-secrets finds, what it leaves out, and what only looks like one."""

from __future__ import annotations

import pytest

from pipeline.config import PiiSection
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import without_overlap
from pipeline.synth.privacy.reserved import redacted
from pipeline.synth.privacy.secrets import find_secrets

AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYZZMPLEKEY"
SLACK = "xoxb-" + "123456789012-abcdefghijkl"
STRIPE = "sk_live_" + "a1B2c3D4e5F6g7H8i9J0k1L2"
GITLAB = "glpat-" + "a1B2c3D4e5F6g7H8i9J0"
GITHUB = "ghp_" + "a1B2c3D4" * 5
OPENAI = "sk-proj-abcdefghijklmnop1234567890"
HIGH_ENTROPY = "kX9vT2qLr8Zm4WcPn6Yb1HsJd3Gf5AeU"
RANDOM = "Wq7xZ2mKp9RtLv4NbYc8HsJd3Gf5AeUo"
HUGGING_FACE = "hf_" + "DiDpexNbalZBfriWPxvXnjsHSJfshgPzxt"
SENTRY = "sntrys_" + "eyJpYXQiOjE3MDAwMDAwMDAuMTIz"
SIGNATURE = "pQ7xZ2mKp9RtLv4NbYc8%2FHsJd3Gf5A%2BeUoWq1xCvBnM%3D"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"

#: value → (type, text around it)
PLANTED = {
    "AKIAIOSFODNN7EXBMPLE": ("API_KEY", "aws_id AKIAIOSFODNN7EXBMPLE"),
    AWS_SECRET: ("API_KEY", f'aws_secret_access_key = "{AWS_SECRET}"'),
    SLACK: ("API_KEY", f"slack: {SLACK}"),
    STRIPE: ("API_KEY", f"{STRIPE} is ours"),
    GITLAB: ("API_KEY", f"git: {GITLAB}"),
    HIGH_ENTROPY: ("API_KEY", f"session_seed = '{HIGH_ENTROPY}'"),
    GITHUB: ("API_KEY", f"git clone with {GITHUB} please"),
    OPENAI: ("API_KEY", f"Use {OPENAI} for the call."),
    "tok-a8F3kQ9zXw2LmN5vB7cD1eR4": ("API_KEY", "export KEY=tok-a8F3kQ9zXw2LmN5vB7cD1eR4"),
    "MIIEpAIBAAKCAQEA": ("PRIVATE_KEY", f"What is this?\n{PEM}\nThanks"),
    "hunter2secret": ("PASSWORD", "In the config I wrote password = 'hunter2secret' and it fails."),
    "s3cretpw": ("PASSWORD", "connect to postgres://admin:s3cretpw@db/main"),
    "ca(wZUnimb80q": ("PASSWORD", "The wifi password ca(wZUnimb80q stopped working."),
    "R3boot!Now": ("PASSWORD", "User jess and password R3boot!Now appeared in a log."),
    "W!nter2024": ("PASSWORD", "Login was exposed: edward.kim@example.com / W!nter2024."),
    "Winter Is Coming!": ("PASSWORD", "The password is 'Winter Is Coming!' as always."),
}

HARMLESS = [
    "password = input('Password: ')",
    "def login(user: str, password: str = field(default=None)) -> bool: ...",
    "Explain how a private key differs from a public key.",
    "Reset my password, please; the password field is empty.",
    "password = os.environ['DB_PASSWORD']",
    "token = get_token(user_id=42)",
    "commit = '9f86d081884c7d659a2feaa0c55ad015a3bf4f1b'",
    "sha256: '2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae'",
    "Visit https://example.com/very/long/path/with-many-parts/index.html?id=12345678",
    "api_key = '<your key here>' and password: ********",
    "from huggingface_hub import hf_hub_download",
    "openai_api_key = settings.OPENAI_API_KEY2024abc",
    "let user_secret_key = generateSecretKey256(user)",
    "OPENAI_API_KEY=\nAZURE_OPENAI_ENDPOINT_V2=\n",
    "ENCRYPTION_KEY=/etc/ssl/private/server2.key",
    "export GITHUB_TOKEN=${{ secrets.GITHUB_TOKEN_2024 }}",
    "The function returns abcdefghijklmnopqrstuvwxyz0123456789.",
]


@pytest.mark.parametrize("value", PLANTED)
def test_planted_secrets_are_found_and_replaced(value: str) -> None:
    entity, text = PLANTED[value]
    findings = without_overlap(find_secrets(text))
    assert [finding.entity for finding in findings] == [entity]
    assert value not in redacted(text, findings)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"export AWS_SECRET_ACCESS_KEY={AWS_SECRET}", AWS_SECRET),
        (f"[default]\naws_secret_access_key = {AWS_SECRET}\n", AWS_SECRET),
        (f"SecretAccessKey: {AWS_SECRET}", AWS_SECRET),
        (f"Authorization: Bearer abc.{RANDOM}", f"abc.{RANDOM}"),
        (f"huggingface-cli login --token {HUGGING_FACE}", HUGGING_FACE),
        (f"auth {SENTRY}", SENTRY),
        (f"https://a.blob.core.windows.net/c?sv=2022-11-02&sig={SIGNATURE}&se=2026", SIGNATURE),
        *(
            (f"{before}{RANDOM}", RANDOM)
            for before in (
                *("OPENAI_API_KEY=", "MISTRAL_API_KEY=", "WANDB_API_KEY=", "DJANGO_SECRET_KEY="),
                *("my_api_key: ", "openaiApiKey: ", "client_secret=", "AZURE_CLIENT_SECRET="),
                *("GITHUB_TOKEN=", "JWT_SECRET=", "SECRET_KEY_BASE=", "my api key is "),
            )
        ),
    ],
)
def test_unquoted_keys_are_found_and_replaced(text: str, value: str) -> None:
    findings = without_overlap(find_secrets(f"{text}."))
    assert [finding.entity for finding in findings] == ["API_KEY"]
    assert value not in redacted(text, findings)


@pytest.mark.parametrize("text", HARMLESS)
def test_code_and_prose_about_secrets_pass(text: str) -> None:
    assert [text[finding.start : finding.end] for finding in find_secrets(text)] == []


def test_offsets_are_those_of_the_whole_text() -> None:
    text = "first line\n" * 3 + "aws_id AKIAIOSFODNN7EXBMPLE\nlast"
    (secret,) = without_overlap(find_secrets(text))
    assert text[secret.start : secret.end] == "AKIAIOSFODNN7EXBMPLE"


def test_half_a_private_key_is_a_key() -> None:
    (secret,) = without_overlap(find_secrets(f"See: {PEM[:40]}"))
    assert secret.entity == "PRIVATE_KEY"


def test_secrets_are_looked_for_whatever_the_entities() -> None:
    text, section = f"{GITHUB} anna@example.com", PiiSection(entities=("CREDIT_CARD",))
    assert PiiFilter(section).check(text) == ["API_KEY"]
    assert PiiFilter(section.model_copy(update={"secrets": False})).check(text) == []

"""Texts written to slip through: which are caught is written down, and why the others are not.

A line of provocations.jsonl: {"class", "text", "entities": [[type, characters], …], "out_of_reach":
false or why}. All values are invented.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import PiiSection
from pipeline.records import digest
from pipeline.synth.privacy.filter import FINDERS_VERSION, PiiFilter
from pipeline.synth.privacy.recognisers import FINDERS
from pipeline.synth.privacy.secrets import SECRET_ENTITIES, find_secrets

LINES = (Path(__file__).parent / "provocations.jsonl").read_text(encoding="utf-8").splitlines()
PROVOCATIONS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
ON = {*PiiSection().entities, *SECRET_ENTITIES}

#: What looks like personal data and is none.
LOOKALIKES = [
    "PRIMARY_KEY: users_table_2024_index, SORT_KEY: created_at_2024_01_01",
    "CACHE_KEY = 'user_profile_cache_v2_data'; PAD_TOKEN: reserved_special_token_0",
    "S3_KEY=uploads/2024/report-final and TLS_KEY=/etc/ssl/private/server1/tls",
    "api_key=YOUR_API_KEY_GOES_HERE=1",
    "Bind to 0.0.0.0:8080, ping 127.0.0.1 and ::1, and route 10.0.0.0/8 and 172.16.4.9 elsewhere.",
    "The mask 255.255.255.0 hides 192.168.1.17; RFC 5737 has 192.0.2.7, 198.51.100.7, 203.0.113.7.",
    "Documentation uses 2001:db8::17 and 2001:0db8:85a3::8a2e:0370:7334; DNS asks 8.8.8.8.",
    "We moved from version 10.4.12.7 to v11.0.3.25 last week.",
    "git clone git@github.com:org/repo.git && ssh deploy@buildhost",
    "Mail user@example.com, sales@shop.example, root@localhost or me@mail.test.",
    "Write your_name@your-company.com into the form.",
    "In films people call 555-0123, (212) 555-0187 or +1 202-555-0101; Ofcom has 020 7946 0018.",
    "The usual 555-123-4567 and 123-456-7890 are nobody's phones.",
    "Stripe's test card is 4242 4242 4242 4242, PayPal's 4111111111111111 and 378282246310005.",
    "aws_access_key_id = AKIAIOSFODNN7EXAMPLE",
    "aws_secret_access_key = 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY'",
    'export OPENAI_API_KEY="YOUR_API_KEY"  # or sk-xxxxxxxxxxxxxxxxxxxxxxxx',
    'api_key = "your-api-key-here"; password = "<password>"',
    "postgresql://user:password@localhost:5432/shop",
    "SSN: 000-12-3456, or 078-05-1120 from the wallet of 1938.",
    "I live at 123 Main Street, Anytown.",
    "Write to Nemonia Examplesson, 3 Example Street, Sampletown, person1@example.com.",
    "Look at amazon.com, meet me at the dot com bar, and at this point in time stop.",
    "f(a) = g(at) and x[.]y; see <a> and [dot] in HTML; 5 @ 3.50 each.",
    "Das Ergebnis ist 3,14159265358979 – also etwa 22/7 – und 2–3 Äpfel … (Seite 12–15).",
    "圆周率是3.1415926535。版本是2.1.0。共有1024个。",
    "価格は12,800円で、型番はAB-1234-5678です。",
    "https://shop.example/search?q=red%20shoes&page=2&amp;sort=asc",
    "pan: a flat vessel, 28 cm; cc: the team; card: the queen of hearts; pass: the Brenner.",
    "The matrix is 4 5 6 7 / 1 2 3 4 / 9 8 7 6 and the ISBN 978-3-16-148410-0.",
    "Order 20261120-000173 weighs 4929 g; the log has 1732281600000 and 1732281600123.",
    "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b fixes #4929526018159084x",
    "Bearer tokens expire; a bearer of good news does not.",
    "The npm_config_registry and npm_package_version variables are set by npm.",
    "Version 3.10.2 replaced 3.9.18 last Tuesday.",
    "ISBN 978-0-306-40615-7 and 0-306-40615-2",
    "The meeting is on 12.03.2024 at 14.30.",
    "Coordinates 48.8566, 2.3522 and 51°30'26\"N 0°7'39\"W",
    "Compute 12 * (3 + 4) - 56 / 7 and (415) * 555 = ?",
    "(123) 456 + (789) 12 = ?",
    "f(415) = 555.2671 x 12",
    "Multiply 020.7946 by 0.958.",
    "The tensor is 4.12 x 7.33 x 12",
    "pi is 3.1415926535, e is 2.7182818284",
    "IP 10.0.0.12 and 192.168.100.200",
    "Llama-3.1-8B-Instruct and Qwen2.5-72B",
    "We rue the day we bought it 12 years ago.",
    "She would rue it in 2012.",
    "There is place for 12 people.",
    "12 points in place of 3",
    "Take the 3rd route 12 times",
    "In 1999 we walked 12 km via Rome 3 times",
    "calle is the Spanish word for street, 12 letters",
    "Place 3 apples on 4 plates.",
    "The plaza had 12 trees and 3 benches.",
    "Paseo means a walk.",
    "Via email 12 people answered.",
    "Corso 2 is a course.",
    "The passage from chapter 12 is on page 147.",
    "Sherlock Holmes lives at Baker Street.",
    "What is the capital of France?",
    "Avenue Q is a musical.",
    "Boulevard of Broken Dreams was released in 2004.",
    "5 chemin de fer games",
    "Rue Morgue, a story by Poe, 1841",
    "How do I reset my password?",
    "Passwort vergessen? Klicken Sie hier.",
    "Das Passwort muss mindestens 8 Zeichen haben.",
    "Le mot de passe doit contenir 12 caractères.",
    "La contraseña debe tener 8 caracteres.",
    "A senha deve ter pelo menos 8 caracteres.",
    "密码必须包含8个字符",
    "パスワードは8文字以上必要です",
    "Пароль должен содержать не менее 8 символов",
    "Hasło musi mieć co najmniej 8 znaków",
    "password = input('Password: ')",
    "password = os.environ['DB_PASSWORD']",
    "mysql -u root -p shop",
    "mysql -u root -p",
    "sshpass -e ssh host",
    "sshpass -p \"$PASS\" ssh host",
    "curl -u \"$USER:$PASS\" https://x",
    "curl -u user:password https://example.com",
    "docker login -u user --password-stdin",
    "docker run -p 8080:80 nginx",
    "mkdir -p src/main2/java",
    "psql -h localhost -p 5432",
    "ssh -p 2222 host",
    "scp -P 2222 a b",
    "PGPASSWORD=$SECRET psql",
    "export PGPASSWORD=<your password>",
    "Authorization: Basic <base64>",
    "Authorization: Basic realm",
    "Basic authentication uses base64",
    "net use Z: \\\\srv\\share",
    "net use",
    "tar -xzf a.tar.gz -C dir2",
    "The clave is a rhythm in 3-2 or 2-3.",
    "La clave es la simplicidad.",
    "la clave es usar 3 capas",
    "Senha is Portuguese for password.",
    "grep -P '\\d+' file",
    "zip -r a.zip b",
    "7z a -p archive.7z",
    "git commit -m 'add password field to login2'",
    "The password field is named pwd1 in HTML.",
    "Phone models: iPhone 15, Pixel 8",
    "The (2023) 555-page report",
    "Table (12) 3.45 x10",
    "E = 1.602e-19 C; N = 6.022e23",
    "SHA1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "room 12, 3rd floor",
    "Order #20231107-4415",
    "RFC 7946 section 3.1",
    "ext. 3 of the law",
    "What is 12 x 34 x 56?",
    "Who was Albert Einstein?",
    "Harry Potter and Hermione Granger fight Lord Voldemort.",
    "Write a poem about Mona Lisa",
    "2020.12.31 08:30:00.123",
    "(1) 2.5 (2) 3.5 (3) 4.5 (4) 5.5",
    "10.1038/s41586-020-2649-2",
    "arXiv:2401.15077v3",
    "0x7fff5fbff8c0",
    "1,234,567.89",
    "EUR 1.234.567,89",
    "bus 12 to Piazza Navona, 3 stops",
    "the 2 de mayo 1808 uprising",
    "3º izquierda means third left",
    "Article 12 bis of the code",
    "12 bis 15 Uhr",
    "Seite 12 bis 20",
    "Chapter 3 ter",
    "el 5 de mayo de 2021",
    "Calle 13 is a band",
    "Plaza 2 wins",
    "Avenida 5 stars",
    "Via 4 of the PCB",
]  # fmt: skip


def caught(provocation: dict[str, Any], pii: PiiFilter) -> bool:
    """Every named value has a finding of its type."""
    text = provocation["text"]
    findings = pii.find_all([text])[0]
    spans = [(kind, text.index(value), len(value)) for kind, value in provocation["entities"]]
    return all(
        any(f.entity == kind and f.start < start + size and start < f.end for f in findings)
        for kind, start, size in spans
    )


def wants(provocation: dict[str, Any]) -> set[str]:
    return {kind for kind, _ in provocation["entities"]}


@pytest.fixture(scope="module")
def default() -> PiiFilter:
    return PiiFilter(PiiSection())


@pytest.fixture(scope="module")
def wide() -> PiiFilter:
    """With the entities on that are off by default."""
    more = set().union(*map(wants, PROVOCATIONS)) - {*SECRET_ENTITIES}
    return PiiFilter(PiiSection(entities=tuple(sorted(more | {*PiiSection().entities}))))


def test_exactly_those_slip_through_that_are_said_to(default: PiiFilter, wide: PiiFilter) -> None:
    filters = [default if wants(one) <= ON else wide for one in PROVOCATIONS]
    missed = [
        one["text"] for one, pii in zip(PROVOCATIONS, filters, strict=True) if not caught(one, pii)
    ]
    assert missed == [one["text"] for one in PROVOCATIONS if one["out_of_reach"]]
    assert len(PROVOCATIONS) >= 120 and len(PROVOCATIONS) - len(missed) >= 90


@pytest.mark.parametrize("text", LOOKALIKES)
def test_lookalikes_pass(default: PiiFilter, text: str) -> None:
    findings = default.find_all([text])[0]
    assert [(finding.entity, text[finding.start : finding.end]) for finding in findings] == []


def test_the_finders_version_stands_for_what_they_find() -> None:
    """Where this fails on purpose, write another FINDERS_VERSION, and then the digest here."""
    texts = [*LOOKALIKES, *(one["text"] for one in PROVOCATIONS)]
    searches = [*(finder for of_entity in FINDERS.values() for finder in of_entity), find_secrets]
    findings = [
        sorted(map(list, (finding for search in searches for finding in search(text))))
        for text in texts
    ]
    assert (FINDERS_VERSION, digest(findings)[:16]) == ("9067cbdc638dd99d", "db703f0038a4c9de")

"""A head that leaves its run says nothing of whose machine and bucket it was made on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.heads.checkpoint import last_part, without_places

Write = Callable[..., Path]


def test_no_file_of_an_exported_head_holds_a_local_path(
    write_config: Write, tiny_target: Path, tmp_path: Path
) -> None:
    config = str(write_config("anna-private-run", train={"wandb_project": "anna-project"}))
    assert main(["run", "-c", config]) == 0
    own = tmp_path / "anna-private-run/train/head"
    telling = [
        str(tmp_path),
        str(tiny_target.parent),
        "anna",
        socket.gethostname(),
        "/tmp",
        "/home",
    ]
    for dialect in ("sglang", "speculators"):
        out = tmp_path / dialect
        assert main(["export", str(own), "--format", dialect, "--out", str(out)]) == 0
        for file in out.iterdir():
            assert not [word for word in telling if word.encode() in file.read_bytes()], file
        card = json.loads((out / "eagle3.json").read_text())
        assert card["contract"]["source"] == tiny_target.name
        assert card["contract"]["fingerprint"] and card["provenance"]["manifests"]["synth"]
        [source] = card["provenance"]["config"]["synth"]["sources"]
        assert source["source"] == "prompts.jsonl"
    card = json.loads((own / "eagle3.json").read_text())
    assert str(tmp_path) not in json.dumps(card["provenance"]), "only its target, to be found"
    assert (own / "model.safetensors").read_bytes() == (
        tmp_path / "sglang/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ("/home/anna/data/train.jsonl.gz", "train.jsonl.gz"),
        ("gs://team-bucket/anna/train.jsonl", "train.jsonl"),
        ("data/train.jsonl", "train.jsonl"),
        ("C:\\Users\\anna\\train.jsonl", "train.jsonl"),
        ("~/models/llama/", "llama"),
        ("runs/anna/train/head", "head"),
        *((name, name) for name in ("hub:org/name", "package:evals", "builtin:instructions")),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_of_a_place_the_last_part_is_left(place: str, left: str) -> None:
    facts = {"synth": {"sources": [{"source": place, "category": "a/b/c"}], "system_prompt": "/x"}}
    expected = {
        "synth": {"sources": [{"source": left, "category": "a/b/c"}], "system_prompt": "/x"}
    }
    assert without_places(facts) == expected
    assert last_part("gs://team-bucket/") == last_part("gs://team-bucket") == "unnamed"

"""Heads and samples to the Hub and back; its own client, too, reads what the commands uploaded."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import yaml
from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.repocard import DatasetCard

from pipeline.cli import main
from pipeline.config import load
from pipeline.records import sealed_json
from pipeline.server.start import make_app
from pipeline.store.hub import resolved
from pipeline.store.manifest import read_manifest, read_report, stage_location
from pipeline.store.samples import read_samples
from tests.conftest import QUESTIONS
from tests.end_to_end.conftest import config_file
from tests.hub_server import Fault, HubServer

PII = {"enabled": True, "action": "redact"}
MAIL = "Who is anna.schmidt@gmx.de, and why would that be so?"
Run = Callable[..., int]


@pytest.fixture
def again(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command as another process would run it: its code, what it printed, its errors."""

    def run(*command: str) -> tuple[int, str, str]:
        resolved.cache_clear()
        capsys.readouterr()
        code = main(command)
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "hf_" not in out + err
        return code, out, err

    return run


Again = Callable[..., tuple[int, str, str]]


def test_a_head_goes_to_the_hub_and_comes_back(
    hub: HubServer, trained: Path, tiny_target: Path, tmp_path: Path, again: Again
) -> None:
    head = trained / "run/train/head"
    command = ["export", str(head), "--format", "sglang", "--out", "hub:org/head"]
    code, out, _ = again(*command, "--license", "Apache-2.0")
    assert code == 0 and hub.repositories == {}
    assert "licence of the head: Apache-2.0" in out and "prompts by licence: MIT" in out
    assert "add --upload" in out
    code, out, _ = again(*command, "--license", "Apache-2.0", "--upload")
    assert code == 0 and "uploaded: " in out
    repository = hub.repositories["model", "org/head"]
    commit = repository.branches["main"]
    for name, data in repository.files.items():
        assert str(tmp_path).encode() not in data and str(tiny_target).encode() not in data, name

    # The Hub's own client, and the libraries that people load with.
    folder = Path(snapshot_download("org/head"))
    card = ModelCard.load(folder / "README.md").data
    assert card.license == "apache-2.0" and "eagle3" in card.tags
    from safetensors import safe_open
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained("org/head").draft_vocab_size == 200
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        assert "midlayer.self_attn.q_proj.weight" in set(stored.keys())

    # Our commands.
    code, out, _ = again("inspect", "hub:org/head", "--json")
    assert code == 0 and json.loads(out)["provenance"]["licenses"] == {"MIT": 24}
    back = ["import", "hub:org/head", "--target", str(tiny_target), "--out"]
    assert again(*back, str(tmp_path / "back"))[0] == 0
    provenance = json.loads((tmp_path / "back/eagle3.json").read_text())["provenance"]
    assert provenance["imported from"] == f"hub:org/head@{commit}"
    same = [(tmp_path / "back" / name).read_bytes() for name in ("model.safetensors",)]
    assert same == [(head / "model.safetensors").read_bytes()]
    own = ["eval.head=hub:org/head", f"run.uri={tmp_path}/evaluated", "eval.hf_prompts=0"]
    assert again("eval", "-c", str(trained / "run.yaml"), *own)[0] == 0
    assert read_report(f"{tmp_path}/evaluated").commits == {"hub:org/head": commit}
    code, _, err = again("inspect", "hub:org/head@v7")
    assert code == 2 and "there is no revision v7" in err


def test_every_other_place_of_a_head_takes_one_from_the_hub(
    hub: HubServer, trained: Path, tmp_path: Path, again: Again
) -> None:
    """Synth drafts with it, training goes on from it, eval compares with it, a server opens it."""
    config, named = str(trained / "run.yaml"), "hub:org/head"
    head = trained / "run/train/head"
    command = ["export", str(head), "--format", "sglang", "--out", named, "--upload"]
    assert again(*command)[0] == 0
    commit = hub.repositories["model", "org/head"].branches["main"]
    uri = f"run.uri={tmp_path}/answered"
    assert again("synth", "-c", config, uri, f"synth.head={named}")[0] == 0
    plain, drafted = samples_of(f"{trained}/run"), samples_of(f"{tmp_path}/answered")
    assert [each["token_ids"] for each in drafted] == [each["token_ids"] for each in plain]

    run = tmp_path / "continued"
    shutil.copytree(trained / "run", run, ignore=shutil.ignore_patterns("train", "eval"))
    settings = [f"run.uri={run}", f"train.start_from={named}", "train.epochs=1"]
    assert again("train", "-c", config, *settings)[0] == 0
    provenance = json.loads((run / "train/head/eagle3.json").read_text())["provenance"]
    assert commit in json.dumps(provenance)

    prompts = tmp_path / "evaluated.jsonl"
    asked = [
        {"id": str(n), "category": "math", "turns": [f"What is {n} times {n + 3}?"]}
        for n in range(8)
    ]
    prompts.write_text("".join(json.dumps(each) + "\n" for each in asked))
    settings.append(f"eval.sources=[{{source: {prompts}}}]")
    rival = f"eval.compare=[{{name: published, head: '{named}'}}]"
    code, _, err = again("eval", "-c", config, *settings, "eval.hf_prompts=0", rival)
    assert code == 0, err
    report = read_report(str(run))
    assert report.commits == {named: commit}
    assert [each.rival for each in report.comparisons] == ["published"]
    settings = [f"run.uri={tmp_path}/served", f"eval.head={named}", "serve.port=0"]
    make_app(load(Path(config), settings), None)


def test_an_upload_that_is_killed_shows_nothing(hub: HubServer, trained: Path) -> None:
    """A process of its own, which finds the Hub by HF_ENDPOINT as its users set it."""
    fault = Fault("PUT /large/", 0, times=1, reached=threading.Event())
    hub.faults.append(fault)
    command = [sys.executable, "-m", "pipeline.cli", "export", str(trained / "run/train/head")]
    command += ["--format", "sglang", "--out", "hub:org/head", "--upload"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    assert fault.reached and fault.reached.wait(120)
    process.kill()
    process.wait()
    repository = hub.repositories["model", "org/head"]
    assert list(repository.files) == [".gitattributes"] and len(repository.commits) == 1
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "uploaded: " in done.stdout and "hf_" not in done.stderr
    files = {"README.md", "config.json", "eagle3.json", "model.safetensors", ".gitattributes"}
    assert set(repository.files) == files and len(repository.commits) == 2


def test_what_is_no_head_is_refused(hub: HubServer, tiny_target: Path, again: Again) -> None:
    hub.put("model", "org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."})
    code, _, err = again("inspect", "hub:org/pickle")
    assert code == 2 and "head hub:org/pickle: has no " in err
    command = ["import", "hub:org/pickle", "--target", str(tiny_target), "--out", "x"]
    code, _, err = again(*command)
    assert code == 2 and "pytorch_model.bin" not in "".join(hub.requests)
    code, _, err = again("inspect", "hub:org/absent")
    assert code == 2 and "there is no such model on the Hub" in err


@pytest.fixture(scope="module")
def answered(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml and a run whose prompts were screened: one has personal data."""
    folder = tmp_path_factory.mktemp("answered")
    prompts = [
        {"id": str(index), "turns": [text], "license": "MIT" if index % 2 else "CC-BY-4.0"}
        for index, text in enumerate([MAIL, *QUESTIONS[:12]])
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    (folder / "held-out.jsonl").write_text(json.dumps(prompts[1]) + "\n")
    config = config_file(tiny_target, folder)
    tree = yaml.safe_load(config.read_text())
    tree["synth"]["pii"] = PII
    config.write_text(yaml.safe_dump(tree))
    assert main(["synth", "-c", str(config)]) == 0
    return folder


def samples_of(uri: str) -> list[dict[str, Any]]:
    location = stage_location(uri, "synth")
    shards = read_manifest(uri, "synth").shards
    return [each.model_dump() for shard in shards for each in read_samples(location, shard)]


def test_samples_go_to_the_hub_and_come_back(
    hub: HubServer, answered: Path, tiny_target: Path, tmp_path: Path, again: Again
) -> None:
    uri = f"{answered}/run"
    command = ["export-samples", uri, "--out", "hub:org/samples"]
    code, out, _ = again(*command)
    assert code == 0 and hub.repositories == {} and "(new, private)" in out
    assert "prompts by licence: CC-BY-4.0 7, MIT 6" in out
    assert (
        "EMAIL_ADDRESS 1 in prompts" in out and "(redacted in prompts, dropped in replies)" in out
    )
    assert "shards/00000-" in out and "datasheet.md" in out
    assert again(*command, "--upload")[0] == 0
    repository = hub.repositories["dataset", "org/samples"]
    commit = repository.branches["main"]
    for name, data in repository.files.items():
        assert b"anna.schmidt" not in data and str(tiny_target).encode() not in data, name

        if name.endswith(".parquet"):
            assert b"eagle3" not in (pq.read_schema(io.BytesIO(data)).metadata or {}), "the notes"
    audit = json.loads(repository.files["audit.json"])
    assert audit["personal_data"]["findings"]["prompts"]["EMAIL_ADDRESS"]["frequent"] == {}

    from datasets import load_dataset  # type: ignore[import-untyped]

    rows = list(load_dataset("org/samples", split="train"))
    ours = samples_of(uri)
    assert [row["token_ids"] for row in rows] == [list(each["token_ids"]) for each in ours]
    assert {row["generator"].split("@")[0] for row in rows} == {tiny_target.name}
    card = DatasetCard(repository.files["README.md"].decode()).data
    assert (card["license"], card["license_name"]) == ("other", "CC-BY-4.0, MIT")

    # As the samples of another run: the stages after synth go on from them.
    other = f"{tmp_path}/other"
    hub.faults.append(Fault("HEAD .*/audit.json", 500))  # when the shards are there
    assert again("import-samples", "hub:org/samples", "--out", other)[0] == 75
    hub.faults.clear()
    assert again("import-samples", "hub:org/samples", "--out", other)[0] == 0
    manifest = read_manifest(other, "synth")
    assert manifest.details["imported from"] == f"hub:datasets/org/samples@{commit}"
    assert again("import-samples", "hub:org/samples", "--out", other)[0] == 0, "complete"
    theirs = samples_of(other)
    fields = ("sample_id", "token_ids", "supervised", "messages", "license", "source")
    assert [[row[name] for name in fields] for row in theirs] == [
        [row[name] for name in fields] for row in ours
    ]
    config = ["-c", str(answered / "run.yaml"), f"run.uri={other}", "train.epochs=1"]
    for stage in ("features", "train"):
        assert again(stage, *config)[0] == 0, stage
    code, out, err = again("verify", other)
    assert code == 0 and "sound: synth, features, train" in out, err
    card_ = json.loads((tmp_path / "other/train/head/eagle3.json").read_text())
    assert card_["provenance"]["samples"] == f"hub:datasets/org/samples@{commit}"
    assert card_["provenance"]["licenses"] == {"CC-BY-4.0": 7, "MIT": 6}

    # As prompts: pinned, without the replies, and with the licences that they came with.
    prompts = f"{tmp_path}/prompts"
    source = ['synth.sources=[{"source": "hub:org/samples"}]', f"run.uri={prompts}"]
    assert again("synth", "-c", str(answered / "run.yaml"), *source)[0] == 0
    manifest = read_manifest(prompts, "synth")
    assert manifest.licenses == {"CC-BY-4.0": 7, "MIT": 6}
    assert manifest.details["commits"] == {"hub:org/samples": commit}


@pytest.mark.parametrize("fault", ["absent", "changed", "unscreened", "unlicensed"])
def test_samples_that_no_datasheet_vouches_for_stay(
    hub: HubServer, answered: Path, tmp_path: Path, again: Again, fault: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(answered / "run", run)
    synth = run / "synth"
    if fault == "absent":
        (synth / "datasheet.md").unlink()
    elif fault == "changed":
        text = (synth / "datasheet.md").read_text()
        (synth / "datasheet.md").write_text(text.replace("redact", "no data"))
    else:
        audit = json.loads((synth / "audit.json").read_text())
        if fault == "unscreened":
            audit["personal_data"]["policy"] = {"enabled": False}
        else:
            audit["licenses"] = {"unknown": 3, "MIT": 10}
        rewrite(synth, "audit.json", json.dumps(audit).encode())
    code, _, err = again("export-samples", str(run), "--out", "hub:org/samples", "--upload")
    expected = {
        "absent": "datasheet.md: is missing, so nothing is given away",
        "changed": "datasheet.md: has ",
        "unscreened": "nobody looked for personal data",
        "unlicensed": "without a licence that lets them be given away: 3 unknown",
    }
    assert code == 2 and expected[fault] in err and hub.repositories == {}


def rewrite(stage: Path, name: str, data: bytes) -> None:
    """Another file, and a manifest that vouches for it, as by somebody who may write both."""
    import hashlib

    (stage / name).write_bytes(data)
    manifest = json.loads((stage / "manifest.json").read_text())
    manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    manifest.pop("checksum")
    (stage / "manifest.json").write_bytes(sealed_json(manifest))


@pytest.mark.parametrize("fault", ["shard", "licences", "unsealed", "outside", "other"])
def test_a_data_set_that_lies_is_refused(
    hub: HubServer, answered: Path, tmp_path: Path, again: Again, fault: str
) -> None:
    assert again("export-samples", f"{answered}/run", "--out", str(tmp_path / "set"))[0] == 0
    files = {
        str(path.relative_to(tmp_path / "set")): path.read_bytes()
        for path in (tmp_path / "set").rglob("*")
        if path.is_file()
    }
    shards = sorted(name for name in files if name.startswith("shards/"))
    fields = json.loads(files["manifest.json"])
    fields.pop("checksum")
    if fault == "shard":
        files[shards[0]] = files[shards[0]][:-8] + b"\0" * 8
    elif fault == "licences":
        fields["licenses"] = {"MIT": 13}
    elif fault == "outside":
        fields["shards"][0]["name"] = "../../escaped.parquet"
    elif fault == "other":
        files = {"train.jsonl": b'{"prompt": "Why?"}\n'}
    if fault in ("licences", "outside"):
        files["manifest.json"] = sealed_json(fields)
    if fault == "unsealed":
        files["manifest.json"] = json.dumps(fields).encode()
    hub.put("dataset", "org/samples", files)
    code, _, err = again("import-samples", "hub:org/samples", "--out", str(tmp_path / "run"))
    expected = {
        "shard": "SHA-256",
        "licences": "manifest.json: licenses: names MIT 13; the samples CC-BY-4.0 7, MIT 6",
        "unsealed": "has no checksum",
        "outside": "shards.0.name",
        "other": "has no manifest.json",
    }
    assert code == 2 and expected[fault] in err, err
    assert not (tmp_path / "run/synth/manifest.json").exists()
    assert not list(tmp_path.rglob("escaped*"))

"""A finished run that somebody or something has changed: `eagle3 verify` and those who read it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.flips import KINDS, flip_files, print_outcomes
from pipeline.cli import main
from pipeline.config import load
from pipeline.errors import CorruptShard
from pipeline.server.start import make_app
from pipeline.store.verify import verify_run
from pipeline.train.checkpoints import stored_checkpoints
from tests.shard_files import reseal
from tests.train.runs import stop_at

Write = Callable[..., Path]


@contextmanager
def restored(path: Path) -> Iterator[bytes]:
    """The bytes of a file, which are there again after the block."""
    data = path.read_bytes()
    try:
        yield data
    finally:
        path.write_bytes(data)


def problems(run: Path) -> tuple[str, ...]:
    return verify_run(str(run), {"train": stored_checkpoints}).problems


def test_every_byte_of_a_run_is_covered(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = str(write_config()), tmp_path / "run"
    assert main(["run", "-c", config]) == 0
    assert main(["verify", str(run)]) == 0
    assert "not checked" not in capsys.readouterr().out

    outcomes = flip_files(run, flips=300, seed=0)
    assert print_outcomes(outcomes)
    kinds = Counter(each.kind for each in outcomes)
    assert set(KINDS) - set(kinds) == {"results of servers"} and "others" not in kinds
    assert problems(run) == (), "all flips are undone"
    _forgeries_are_found(run)
    _readers_refuse_a_forged_report(config, run, tmp_path, capsys)
    _another_head_is_refused(config, run, capsys)
    _pages_are_written_anew(config, run)
    _begun_stages_are_covered_by_their_checkpoints(config, run)


def _forgeries_are_found(run: Path) -> None:
    extra = run / "train/head/pytorch_model.bin"
    extra.write_bytes(b"not a head")
    (problem,) = problems(run)
    assert f"{extra}: is not a file that the stage wrote (fix: delete it" in problem
    extra.unlink()
    for name in ("synth/datasheet.md", "synth/begin.json", "eval/report.json", "eval/report.html"):
        with restored(run / name) as data:
            (run / name).write_bytes(data + b" ")
            assert f"{run / name}: " in problems(run)[0]
            (run / name).unlink()
            (problem,) = problems(run)
            assert f"{run / name}: the file is missing" in problem
    manifest = run / "train/manifest.json"
    with restored(manifest) as data:  # τ of the card in a manifest that is sealed no more
        manifest.write_bytes(data.replace(b'"wall_seconds": ', b'"wall_seconds": 1'))
        assert "manifest.json: is not what was written: its checksum" in problems(run)[0]
        fields = json.loads(data)
        del fields["checksum"]
        manifest.write_text(json.dumps(fields))
        assert "manifest.json: has no checksum" in problems(run)[0]
    assert problems(run) == ()


def _readers_refuse_a_forged_report(
    config: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """τ of 9.9."""
    report, copy, head = run / "eval/report.json", tmp_path / "copy.json", str(run / "train/head")
    shutil.copy(report, copy)
    assert main(["compare", str(report), str(copy)]) in (0, 2)  # too few prompts for a verdict
    assert "manifest" not in capsys.readouterr().err
    with restored(report) as data:
        fields = json.loads(data)
        report.write_text(json.dumps({**fields, "acceptance_length": 9.9}))
        server = ["--server", "http://127.0.0.1:9"]
        out = ["--format", "sglang", "--out", str(tmp_path / "exported")]
        for argv in (
            ["compare", str(run), str(copy)],
            ["compare", str(copy), str(report)],
            ["check-serving", *server, "-c", config],
            ["check-serving", *server, "--report", str(report)],
            ["export", head, *out, "--report", str(run)],
        ):
            assert main(argv) == 2, argv
            message = capsys.readouterr().err
            assert f"{report}: has " in message and "; the manifest names" in message
        with pytest.raises(CorruptShard, match="the manifest names"):
            make_app(load(config), None)
    manifest = run / "eval/manifest.json"
    with restored(manifest):
        manifest.unlink()
        assert main(["compare", str(report), str(copy)]) == 75
        assert "stage eval is not finished" in capsys.readouterr().err


def _another_head_is_refused(config: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a server, and by an evaluation that is to follow."""
    weights, elsewhere = run / "train/head/model.safetensors", run.parent / "elsewhere"
    with restored(weights) as data:
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptShard, match=rf"{weights}: has .*; the manifest names"):
            make_app(load(config), None)
        shutil.copytree(run / "train", elsewhere / "train")
        assert main(["eval", "-c", config, f"run.uri={elsewhere}"]) == 2
        assert f"{elsewhere}/train/head/model.safetensors: has " in capsys.readouterr().err
        (elsewhere / "train/head/model.safetensors").unlink()
        (elsewhere / "train/head/model.safetensors").symlink_to(weights)
        assert main(["eval", "-c", config, f"run.uri={elsewhere}"]) == 2
        assert "model.safetensors: is a link that leads out of " in capsys.readouterr().err
    shutil.rmtree(elsewhere)


def _pages_are_written_anew(config: str, run: Path) -> None:
    page = run / "eval/report.html"
    data = page.read_bytes()
    page.write_bytes(data.replace(b"1", b"9"))
    (problem,) = problems(run)
    assert f"{page}: is not the page that was written (fix: run `eagle3 eval` again" in problem
    assert main(["eval", "-c", config]) == 0
    assert page.read_bytes() == data and problems(run) == ()


def _begun_stages_are_covered_by_their_checkpoints(config: str, run: Path) -> None:
    """Without a manifest: the files of checkpoints, and the lines of metrics up to the newest."""
    shutil.rmtree(run / "eval")
    steps = sorted((run / "train/checkpoints").glob("step-*.json"))
    stop_at(load(config), int(steps[0].stem.removeprefix("step-")))
    metrics = run / "train/metrics.jsonl"
    lines = metrics.read_bytes()
    metrics.write_bytes(lines + b'{"step": ')  # a line that is being written
    assert problems(run) == ()
    metrics.write_bytes(lines.replace(b"loss", b"lass", 1))
    (problem,) = problems(run)
    assert f"{metrics}: does not begin with the lines of the newest checkpoint" in problem
    metrics.write_bytes(lines)
    weights = next((run / "train/checkpoints").glob(f"{steps[0].stem}-*/weights.safetensors"))
    with restored(weights) as data:
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        (problem,) = problems(run)
        assert f"{weights}: is not what the checkpoint's marker names" in problem
    assert main(["train", "-c", config]) == 0, "and it goes on"
    assert problems(run) == ()


def test_runs_of_earlier_versions(write_config: Write, tmp_path: Path) -> None:
    """Their manifests name shards alone: verify says so, and is not weaker where they are newer."""
    config, run = str(write_config()), tmp_path / "run"
    assert main(["synth", "-c", config]) == 0
    manifest = run / "synth/manifest.json"
    fields = json.loads(manifest.read_text())
    reseal(run / "synth")
    assert problems(run) == ()
    del fields["checksum"], fields["files"]
    manifest.write_text(json.dumps({**fields, "schema_version": 4}, indent=2, sort_keys=True))
    check = verify_run(str(run))
    assert check.problems == ()
    assert f"{run}/synth: its manifest, of schema 4, names shards alone" in check.uncovered[0]
    assert main(["features", "-c", config]) == 0, "and the next stage goes on with it"
    assert problems(run) == ()

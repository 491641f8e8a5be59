"""Two processes at one evaluation, or at one place that a head is written to, at the same moment.

One of each pair stops itself at the instant that would do most harm, and goes on when the other one
has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.heads.registry import open_head
from pipeline.store.manifest import read_report
from pipeline.store.verify import verify_run
from tests.gcs_server import GcsServer
from tests.scenes import play

pytestmark = pytest.mark.slow

TOGETHER = """
first, other = stage("first", "eval"), stage("other", "eval")
end(first, other)
"""

SILENT = """
quick = "run.claim_seconds=3"
silent = stage("silent", "eval", quick, stop_at="pipeline.serve_eval.stage:_as_json")
stopped(silent)
end(stage("live", "eval", quick))
report = (run / "eval" / "report.json").read_bytes()
go_on(silent)
end(silent)
assert (run / "eval" / "report.json").read_bytes() == report
"""

DISCARDED = """
quick = "run.claim_seconds=3"
silent = stage("silent", "eval", quick, stop_at="pipeline.serve_eval.stage:_as_json")
stopped(silent)
time.sleep(4)
options = quick, "eval.max_new_tokens=8", "--force"
forced = stage("forced", "eval", *options, stop_at="pipeline.serve_eval.stage:_Evaluation.report")
stopped(forced)
go_on(silent)
end(silent)
there = (run / "eval" / "report.json").read_text()
assert '"max_new_tokens": 16' in there, "which was written into the work of the other"
go_on(forced)
end(forced)
end(stage("again", "eval", *options))
(run / "eval" / "report.json").unlink()
end(stage("mended", "eval", *options))
"""

FORCED = """
first = stage("first", "eval", stop_at="pipeline.serve_eval.stage:open_target")
stopped(first)
end(stage("forced", "eval", "eval.max_new_tokens=8", "--force"))
go_on(first)
end(first)
"""


WHO = "first", "other"
GGUF = "--format", "gguf", "--out"
PLACES = """
heads = {"first": run / "train" / "head", "other": folder / "other" / "train" / "head"}
target = importlib.import_module("yaml").safe_load((folder / "run.yaml").read_text())["target"]
out = folder / "out"
kinds = {
    "sglang": ("export", "--format", "sglang", "--out", str(out / "sglang")),
    "file": ("export", "--format", "gguf", "--out", str(out / "x.gguf")),
    "import": ("import", "--target", target["source"], "--out", str(out / "import")),
    "remote": ("export", "--format", "sglang", "--out", "gs://heads/out"),
}
for kind, (command, *options) in kinds.items():
    place = "heads.eagle3.gguf:_check" if kind == "file" else "heads.checkpoint:_stored"
    words = command, str(heads["first"]), *options
    first = start(f"first-{kind}", *words, stop_at=f"pipeline.{place}")
    stopped(first)
    end(start(f"other-{kind}", command, str(heads["other"]), *options))
    go_on(first)
    end(first)
"""


def test_of_two_evaluations_one_measures_and_the_other_waits(folder: Path) -> None:
    codes, said = play(TOGETHER, folder)
    assert codes == {"first": 0, "other": 0}, said
    waited = [text for text in said.values() if "waiting for another process" in text]
    assert len(waited) == 1 and "tokens a round; report at" in waited[0]
    assert "loading the target" not in waited[0]
    assert verify_run(str(folder / "run")).problems == ()


def test_an_evaluation_that_was_stopped_ends_with_the_report_of_the_next(folder: Path) -> None:
    codes, said = play(SILENT, folder)
    assert codes == {"silent": 0, "live": 0}, said
    assert "another process has taken its work over" in said["silent"]
    assert "tokens a round; report at" in said["silent"]
    assert verify_run(str(folder / "run")).problems == ()


def test_force_is_refused_beside_a_live_evaluation(folder: Path) -> None:
    codes, said = play(FORCED, folder)
    assert codes == {"first": 0, "forced": 2}, said
    assert "another process is at work on it" in said["forced"]
    assert read_report(str(folder / "run")).settings.max_new_tokens == 16


def test_a_report_of_work_that_was_discarded_is_nobodys(folder: Path) -> None:
    """The one that was stopped had just looked whether the stage is still its own."""
    codes, said = play(DISCARDED, folder)
    assert codes == {"silent": 2, "forced": 2, "again": 2, "mended": 0}, said
    assert "has been begun anew by another process" in said["silent"]
    for name in ("forced", "again"):
        assert "report.json: is of other work (fix: delete it and run" in said[name]
    assert read_report(str(folder / "run")).settings.max_new_tokens == 8
    assert verify_run(str(folder / "run")).problems == ()


def test_of_two_heads_for_one_place_the_first_that_is_whole_stays(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    try:
        server.create_bucket("heads")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        codes, said = play(PLACES, folder)
        kinds = {name.split("-")[1] for name in codes}
        assert kinds == {"sglang", "file", "import", "remote"}
        assert codes == {f"{who}-{kind}": 2 * (who == "first") for who in WHO for kind in kinds}, (
            said
        )
        for kind in kinds:
            [error] = [line for line in said[f"first-{kind}"].splitlines() if "error: " in line]
            assert "exists already" in error if kind == "file" else "is not empty" in error
        other = weights(folder / "other/train/head")
        assert other != weights(folder / "run/train/head")
        for out in (folder / "out/sglang", folder / "out/import", "gs://heads/out"):
            assert weights(out) == other
        assert {path.name for path in (folder / "out").iterdir()} == {"sglang", "import", "x.gguf"}
        assert (
            main(["export", str(folder / "other/train/head"), *GGUF, str(folder / "y.gguf")]) == 0
        )
        written = [(folder / name).read_bytes() for name in ("out/x.gguf", "y.gguf")]
        assert written[0] == written[1]
    finally:
        server.kill()


def weights(head: Path | str) -> dict[str, Any]:
    """Of a head that loads, by name."""
    return {name: each.tolist() for name, each in open_head(str(head))[0].state_dict().items()}

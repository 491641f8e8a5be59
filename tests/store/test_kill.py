"""kill -9 at random instants of a commit loop; the same command again ends with the same bytes."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from pipeline.store.stage import find_manifest, read_manifest, stage_location, verify_shard

LOOP = """
import sys
from pipeline.config import parse
from pipeline.records import TargetContract
from pipeline.store.stage import open_stage

config = parse({"run": {"uri": sys.argv[1]}, "target": {"source": "dir"}, "synth": {"sources": [{"source": "x"}]}})
contract = TargetContract(source="d", revision="r", fingerprint="f", dtype="bfloat16", hidden_size=1, num_layers=8, vocab_size=9, rope={},
                          capture_layers=(1, 3, 4), tokenizer_hash="t", chat_template_hash="c", parameters=1)
print("ready", flush=True)
work = open_stage(config, "synth", None)
if work.manifest is None:
    for index in range(40):
        name = f"{index:05d}.bin"
        if name not in work.shards:
            work.commit(name, bytes([index]) * 300_000, rows=1, tokens=index, rejected={"too_short": 1})
    work.finish(contract=contract, licenses={}, sources={}, details={})
"""


def start(uri: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", LOOP, str(uri)], stdout=subprocess.PIPE, text=True)


def test_killed_runs_end_with_the_same_checksums(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")
    assert whole.stdout and whole.stdout.readline() == "ready\n"
    began = time.monotonic()
    assert whole.wait() == 0
    duration = time.monotonic() - began
    whole.stdout.close()
    expected = read_manifest(str(tmp_path / "whole"), "synth")

    draw, killed = random.Random(20), 0
    for _ in range(8):
        process = start(tmp_path / "killed")
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0, duration / 5))
        process.kill()
        killed += process.wait() != 0
        process.stdout.close()
    assert killed >= 3, "the kills came too late to interrupt anything"

    last = start(tmp_path / "killed")
    assert last.wait() == 0 and last.stdout
    last.stdout.close()
    found = find_manifest(str(tmp_path / "killed"), "synth")
    assert found and found.shards == expected.shards and found.content_hash == expected.content_hash
    for shard in found.shards:
        verify_shard(stage_location(str(tmp_path / "killed"), "synth"), shard)
    assert not list(tmp_path.rglob("*.tmp"))

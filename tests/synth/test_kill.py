"""kill -9 at random instants: the same command again ends with the same bytes.

The runs are children forked from one process that has already imported everything: a kill then
costs milliseconds, and hits the stage rather than the imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.store.gc import find_orphans, remove
from pipeline.store.manifest import find_manifest, read_manifest, stage_location
from pipeline.store.samples import read_samples

Configure = Callable[..., RunConfig]

KILLS = 12

PARENT = """
import os, pathlib, random, signal, sys, time

import torch
torch.set_num_threads(1)
from pipeline.config import RunConfig
from pipeline.target.parallel import Group
from pipeline.synth.stage import SynthPipeline, run
import pyarrow.parquet

whole, cut = (
    RunConfig.model_validate_json(pathlib.Path(path).read_text()) for path in sys.argv[1:3]
)
SynthPipeline(whole, Group())  # loads libraries and kernels once for all children
folder = pathlib.Path(cut.run.uri) / "synth"


def start(config):
    child = os.fork()
    if child:
        return child
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        run(config)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


began = time.monotonic()
assert os.waitpid(start(whole), 0)[1] == 0
duration = time.monotonic() - began

shards = len(list(pathlib.Path(whole.run.uri).rglob("*.entry.json")))
draw, killed, halfway, attempts, entries = random.Random(7), 0, 0, 0, []
while killed < int(sys.argv[3]) and attempts < 90:
    attempts += 1
    child = start(cut)
    # What is committed is not made again: a run that goes on takes its share of the time.
    time.sleep(draw.uniform(0.2, 1) * duration * (shards - len(entries)) / shards)
    os.kill(child, signal.SIGKILL)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        killed += 1
    else:
        duration *= 0.7  # it had ended: the first run, whose time this was, found cold caches
    before, entries = len(entries), sorted(folder.rglob("*.entry.json"))
    if len(entries) == before:
        duration *= 1.2  # nothing was committed: the machine has become slower
    halfway += 0 < len(entries) and not (folder / "manifest.json").exists()
    if len(entries) > 5:  # nearly done: go back, as if what was committed last had not been
        for name in ("manifest.json", "selection.json"):  # a finished stage has no prompts left
            (folder / name).unlink(missing_ok=True)
        for entry in draw.sample(entries, 5):
            entries.remove(entry)
            entry.unlink()
assert os.waitpid(start(cut), 0)[1] == 0
print(killed, halfway, attempts)
"""


def test_killed_over_and_over_it_ends_with_the_same_bytes(
    make_config: Configure, tmp_path: Path
) -> None:
    """Two shards' replies are generated side by side, so a resumed run batches them differently."""
    configs = []
    for name in ("whole", "cut"):
        made = make_config(name, max_new_tokens=32, shard_prompts=3, batch_size=4, max_turns=2)
        config = made.model_copy(
            update={"target": made.target.model_copy(update={"dtype": "bfloat16"})}
        )
        (tmp_path / f"{name}.json").write_text(config.model_dump_json(), encoding="utf-8")
        configs.append(config)
    paths = [str(tmp_path / "whole.json"), str(tmp_path / "cut.json")]
    command = [sys.executable, "-W", "ignore", "-c", PARENT, *paths, str(KILLS)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    killed, halfway, attempts = map(int, done.stdout.split())
    assert killed == KILLS and halfway > KILLS // 3, (killed, halfway, attempts)
    whole, cut = (read_manifest(config.run.uri, "synth") for config in configs)
    assert cut.shards == whole.shards and cut.content_hash == whole.content_hash
    for name in ("audit.json", "datasheet.md"):
        one, other = (tmp_path / run / "synth" / name for run in ("cut", "whole"))
        assert one.read_bytes() == other.read_bytes()
    remove(find_orphans(str(tmp_path / "cut")))
    assert files(tmp_path / "cut") == files(tmp_path / "whole"), "nothing is left over"
    asked = [
        sample.sample_id
        for shard in cut.shards
        for sample in read_samples(stage_location(configs[1].run.uri, "synth"), shard)
    ]
    assert asked == [str(index) for index in range(24)], "every prompt once"
    assert find_manifest(configs[1].run.uri, "synth") == cut


def files(folder: Path) -> list[str]:
    """Without what only this attempt's names hold, and without claims of processes that died."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    own = re.compile(r"\.[0-9a-f]{16}\.")
    return [own.sub(".", name) for name in names if "/claims/" not in name]

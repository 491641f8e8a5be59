"""Processes of a real launcher: who decides, whose error stops all, how long one waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.learning.corpus import join_surveys, survey
from pipeline.store.states import StatesSample
from pipeline.train.group import own_part
from tests.train.memory_corpus import MemoryCorpus

#: What each of two processes sees, one JSON file each.
PROGRAM = """
import atexit, json, sys
from pathlib import Path
import torch
from pipeline.errors import CorruptShard, Eagle3Error
from pipeline.train.group import *

device, seen = torch.device("cpu"), {}

@atexit.register
def write():
    seen["left"] = not torch.distributed.is_initialized()
    Path(sys.argv[1], f"{rank()}.json").write_text(json.dumps(seen))

join_group(device, minutes=7)
options = torch.distributed.distributed_c10d._get_default_group()._get_backend(device).options
seen["timeout"] = options._timeout.total_seconds()

def fails_on(number):
    if rank() == number:
        raise CorruptShard(f"broken on {number}", where="here", fix="mend it")
    return f"value of {rank()}"

def error_of(action):
    try:
        return action()
    except Eagle3Error as error:
        return [type(error).__name__, error.problem, error.where, error.fix]

seen["decided"] = broadcast_from_rank0(lambda: rank())
seen["refused"] = error_of(lambda: broadcast_from_rank0(lambda: fails_on(0)))
seen["together"] = all_gather_or_raise(lambda: fails_on(None))
seen["failed"] = error_of(lambda: all_gather_or_raise(lambda: fails_on(1)))
seen["not first"] = error_of(lambda: rank0_first(lambda: fails_on(0)))
mark = Path(sys.argv[1], "mark")
seen["before"] = rank0_first(lambda: (mark.exists(), mark.touch())[0])
tensor = torch.full((3,), float(rank() + 1))
broadcast_tensor(tensor, device)
seen["tensor"] = tensor.tolist()
"""


def seen_by(directory: Path, processes: int) -> list[dict[str, object]]:
    """Without a launcher for one process."""
    program = directory / "program.py"
    program.write_text(PROGRAM)
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={processes}".split()
    command = [sys.executable, *(launcher if processes > 1 else []), str(program), str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_all_see_the_same(tmp_path: Path, processes: int) -> None:
    refused = ["CorruptShard", "broken on 0", "here", "mend it"]
    failed = ["CorruptShard", "broken on 1", "here", "mend it"]
    values = [f"value of {rank}" for rank in range(processes)]
    for rank, seen in enumerate(seen_by(tmp_path, processes)):
        assert seen == {
            "timeout": 420.0,
            "decided": 0,
            "refused": refused,
            "together": values,
            "failed": failed if processes > 1 else values,
            "not first": refused,
            "before": rank > 0,  # the mark of the first is there when another one looks
            "tensor": [1.0] * 3,
            "left": True,  # before the interpreter ends: gloo's threads abort it now and then
        }


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_parts_of_a_survey_are_the_whole(
    states: list[StatesSample], monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    corpus = MemoryCorpus(states[:5], states[5:6], states[6:9], states[9:])
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    parts = []
    for rank in range(processes):
        monkeypatch.setenv("RANK", str(rank))
        parts.append(own_part(len(corpus)))
    assert [shard for part in parts for shard in part] == list(range(len(corpus)))
    joined = join_surveys([survey(corpus, part, vocab_size=96, budget=20) for part in parts])
    whole = survey(corpus, vocab_size=96, budget=20)
    assert joined._replace(counts={}) == whole._replace(counts={})
    assert list(joined.counts) == list(whole.counts)
    assert all((joined.counts[source] == whole.counts[source]).all() for source in whole.counts)

"""What the processes of test_parallel.py do: `python -m tests.target.ranks FOLDER TARGET…`.

Each case is a group of two, forked from a process that has imported everything; all run side by
side. Their output is left in FOLDER, their exit codes are printed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401  before the fork

from pipeline.config import TargetSection
from pipeline.console import fail, notice
from pipeline.errors import DataError, Eagle3Error, StageIncomplete
from pipeline.features.capture import differences
from pipeline.target.forward import capture_alone, capture_states, register_packed_attention
from pipeline.target.open import open_target
from pipeline.target.parallel import Group, joined


def states(group: Group, *directories: str) -> None:
    """Each target in two slices against the whole one: what is held, and how far states differ."""
    notice("features", f"rank {group.rank} speaks")
    measured = {Path(directory).name: _compare(directory, group) for directory in directories}
    print(json.dumps(measured))


def in_lockstep(items: Iterable[Any], group: Group) -> Iterator[Any]:
    """Rank 0's items, one by one, on every rank; those of the others are not looked at."""
    if group.rank == 0:
        for item in items:
            yield group.broadcast((item,))[0]
        group.broadcast(())
        return
    received: tuple[Any, ...] = ()
    while received := group.broadcast(received):
        yield received[0]


def words(group: Group) -> None:
    """The other rank's own iterator may not be asked."""

    def said() -> Iterator[Any]:
        assert group.rank == 0
        yield from ("one", {"two": [2]}, None)

    print(json.dumps(list(in_lockstep(said(), group))))


def rank_zero_fails(group: Group) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise StageIncomplete("parts are missing", where="here", fix="wait")

    for _ in in_lockstep(broken(), group):
        pass


def all_fail(group: Group) -> None:
    for _ in in_lockstep(range(2), group):
        raise DataError("a bad sample", where="here", fix="none")


def one_cannot_load(group: Group) -> None:
    with group.all_or_raise():
        if group.rank == 1:
            raise DataError("no weights on this machine", where="rank 1", fix="copy them")


def rank_one_fails_alone(group: Group) -> None:
    for _ in in_lockstep(range(9), group):
        if group.rank == 1:
            raise DataError("a card without memory", where="rank 1", fix="another card")
        torch.distributed.all_reduce(torch.zeros(1))  # as a forward would


def rank_one_is_killed(group: Group) -> None:
    for word in in_lockstep(range(9), group):
        if group.rank == 1 and word == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def rank_one_hangs(group: Group) -> None:
    group.timeout = 1
    for word in in_lockstep(range(9), group):
        if group.rank == 1 and word == 1:
            time.sleep(4)


CASES = (
    states,
    words,
    rank_zero_fails,
    all_fail,
    one_cannot_load,
    rank_one_fails_alone,
    rank_one_is_killed,
    rank_one_hangs,
)


def _compare(directory: str, group: Group) -> dict[str, Any]:
    target = open_target(TargetSection(source=directory, device="cpu", dtype="float32"))
    attention = register_packed_attention()
    split = target.load(attention=attention, processes=group.size)
    whole = target.load(attention=attention)
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 96, (n,), generator=draw).tolist() for n in (5, 23, 9, 40)]
    pairs = zip(capture_states(split, documents), capture_states(whole, documents), strict=True)
    apart = [difference for pair in pairs for difference in differences(*pair)]
    for document in documents:
        alone = [capture_alone(one, document) for one in (split, whole)]
        apart += differences(alone[0], alone[1])
    query = split.model.get_decoder().layers[0].self_attn.q_proj.weight
    return {"held": list(query.to_local().shape), "apart": max(apart)}


def _run(case: Any, arguments: list[str]) -> int:
    """As the command line runs a stage."""
    try:
        target = TargetSection(source="none", device="cpu")
        with joined("tensor", target, stage="features") as group:
            case(group, *arguments)
    except Eagle3Error as error:
        return fail(str(error), error.exit_code)
    return 0


def main(folder: str, *directories: str) -> None:
    torch.set_num_threads(1)
    started: dict[str, list[int]] = {}
    for case in CASES:
        name = case.__name__
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": "2"}
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                for descriptor, suffix in ((1, "out"), (2, "err")):
                    file = os.open(f"{folder}/{name}.{rank}.{suffix}", os.O_CREAT | os.O_WRONLY)
                    os.dup2(file, descriptor)
                sys.exit(_run(case, list(directories) if case is states else []))
            started.setdefault(name, []).append(pid)
    print(
        json.dumps(
            {
                name: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
                for name, pids in started.items()
            }
        )
    )


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Scenes of several `eagle3` commands at once, and of one that is stopped at a chosen instant.

The commands run in children forked from one process that has imported everything, so that each
costs a second and a signal meets the work rather than the imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PARENT = '''
import contextlib, faulthandler, importlib, json, os, resource, signal, sys, time
from pathlib import Path

import torch
torch.set_num_threads(1)
import pandas, pyarrow.parquet, torch._dynamo, transformers.models.llama.modeling_llama
import pipeline.exchange.imports, pipeline.exchange.inspect, pipeline.features.stage
import pipeline.serve_eval.stage, pipeline.synth.stage, pipeline.train.stage, pipeline.train.group
from pipeline import cli
pipeline.train.group._deepspeed()

folder, run = Path(sys.argv[1]), Path(sys.argv[1]) / "run"
train = run / "train"
codes = {}


def start(name, *command, room=None, stop_at=None):
    """A command. `room` is the bytes of memory that it may add, and where that makes it hang, its
    stacks are printed and it ends with 1; before its first call of `stop_at`, "module:function",
    it stops itself."""
    child = os.fork()
    if child:
        return name, child
    for number in (1, 2):
        os.dup2(os.open(folder / f"{name}.{number}", os.O_WRONLY | os.O_CREAT), number)
    code = 1
    with contextlib.suppress(BaseException):
        try:
            if stop_at is not None:
                _stop_at(*stop_at.split(":"))
            if room is not None:
                faulthandler.dump_traceback_later(60, exit=True)
                used = int(Path("/proc/self/statm").read_text().split()[0]) << 12
                resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
            code = cli.main(command)
        except BaseException:
            import traceback
            traceback.print_exc()
            raise
        sys.stdout.flush()
    os._exit(code)


def _stop_at(module, path):
    owner, *names, name = importlib.import_module(module), *path.split(".")
    for each in names:
        owner = getattr(owner, each)
    whole = getattr(owner, name)

    def stopping(*arguments, **options):
        setattr(owner, name, whole)
        os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*arguments, **options)

    setattr(owner, name, stopping)


def stage(name, stage, *options, **limits):
    return start(name, stage, "-c", str(folder / "run.yaml"), *options, **limits)


def stopped(attempt):
    """Wait until it has stopped itself."""
    _, status = os.waitpid(attempt[1], os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"{attempt[0]} ended with {os.waitstatus_to_exitcode(status)}"


def go_on(attempt):
    os.kill(attempt[1], signal.SIGCONT)


def until(condition, *attempts):
    while not condition():
        assert not any(os.waitpid(pid, os.WNOHANG)[0] for _, pid in attempts), "ended too early"
        time.sleep(0.005)


def end(*attempts):
    for name, pid in attempts:
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
'''


def play(scene: str, folder: Path, timeout: float = 900) -> tuple[dict[str, int], dict[str, str]]:
    """Exit codes of the commands of a scene in `folder`, and what they printed, errors last."""
    script = PARENT + scene + "\nprint(json.dumps(codes))\n"
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    codes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    said = {
        name: "".join((folder / f"{name}.{number}").read_text() for number in (1, 2))
        for name in codes
    }
    return codes, said

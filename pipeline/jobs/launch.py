"""`python -m pipeline.jobs.launch`: torchrun, with the exit code of a stage's processes.

torchrun itself ends with 1 whatever they ended with, and a scheduler could not tell "try again"
from "needs a person". The arguments are torchrun's, and `--grace SECONDS`: how long processes that
were sent SIGTERM have to write a checkpoint. On several nodes the node's number, which the
scheduler leaves in the environment, says who holds the rendezvous.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pipeline.console import fail
from pipeline.jobs import INTERRUPTED, TRY_AGAIN

_NEEDS_A_PERSON = 2
#: Of processes that the launcher sent SIGTERM because another one ended.
_ENDED_BY_LAUNCHER = (INTERRUPTED, -15)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the processes, wait for all, and return their exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--grace", default="150")  # torch's default is 30
    options, words = parser.parse_known_args(argv)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", options.grace)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    arguments = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    if arguments.rdzv_backend == "c10d" and not arguments.rdzv_conf:
        arguments.rdzv_conf = f"is_host={_node_number() == 0}"
    stage = next(iter(arguments.training_script_args), None)
    try:
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        in_order = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return exit_code([failure.exitcode for failure in in_order])
    except SignalException:
        return fail("interrupted (fix: run the same command again)", INTERRUPTED, stage=stage)
    except RendezvousError as error:
        fix = "run the same command again on all nodes"
        return fail(f"the nodes did not meet: {error} (fix: {fix})", TRY_AGAIN, stage=stage)
    return 0


def exit_code(codes: Sequence[int]) -> int:
    """The one for processes that ended with `codes`, the earliest first; -9 is a signal's.

    A code that a stage chose says more than the crash of a process that lost the others.
    """
    chosen = [code for code in (_NEEDS_A_PERSON, TRY_AGAIN) if code in codes]
    crashed = [code for code in codes if code not in _ENDED_BY_LAUNCHER]
    code = (chosen or crashed or codes)[0]
    return code if code >= 0 else 128 - code


def _node_number() -> int:
    """The pod's index in its Job, or the task's node in its Slurm job."""
    environment = os.environ
    return int(environment.get("JOB_COMPLETION_INDEX") or environment.get("SLURM_NODEID") or 0)


if __name__ == "__main__":
    sys.exit(main())

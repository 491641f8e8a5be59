"""`python -m pipeline.cli`, for launchers that start modules."""

import atexit
import os
import sys

from pipeline.cli import main
from pipeline.config import is_launched

_codes: list[int] = []


def _end_at_once() -> None:
    """The last of all exit handlers, as it is the first that was registered.

    What libraries still hold of a process group may abort the interpreter while it is taken down,
    and a launcher then calls a finished run failed.
    """
    if _codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_codes[0])


if __name__ == "__main__":
    if is_launched():
        atexit.register(_end_at_once)
    _codes.append(main())
    sys.exit(_codes[0])

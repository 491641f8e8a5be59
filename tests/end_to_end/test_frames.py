"""How deep the paths are that a reader follows: frames of this package, from the command down.

eagle3 train ─ … ─ UnrolledModel.forward    the unrolled head and its loss
eagle3 eval  ─ … ─ decode_round             one round of the decoder
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pipeline
from pipeline.cli import main

pytestmark = pytest.mark.slow

PACKAGE = str(Path(pipeline.__file__).parent)
#: What a reader holds in mind at once, with some to spare.
DEEPEST = 9


def deepest_path(arguments: list[str], file: str, function: str) -> list[str]:
    """The longest stack of this package's functions that reaches `function` of `file`."""
    paths: list[list[str]] = [[]]

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name != function or not code.co_filename.endswith(file):
            return
        path: list[str] = []
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith(PACKAGE):
                path.insert(0, f"{Path(caller.f_code.co_filename).name}:{caller.f_code.co_name}")
            caller = caller.f_back
        paths.append(path)

    sys.setprofile(record)
    try:
        assert main(arguments) == 0
    finally:
        sys.setprofile(None)
    return max(paths, key=len)


def test_a_training_step_and_a_decode_round_are_few_frames_deep(
    write_config: Callable[..., Path],
) -> None:
    config = str(write_config(train={"max_steps": 2}, eval={"max_new_tokens": 4}))
    for stage in ("synth", "features"):
        assert main([stage, "-c", config]) == 0
    train = deepest_path(["train", "-c", config], "heads/unrolled.py", "forward")
    evaluation = deepest_path(["eval", "-c", config], "decoder/round.py", "decode_round")
    for path in (train, evaluation):
        assert path[0] == "__init__.py:main" and len(path) > 3, path
        assert len(path) <= DEEPEST, "\n".join(path)

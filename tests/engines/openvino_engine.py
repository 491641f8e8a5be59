"""Targets and heads as optimum-intel converts them, and what OpenVINO GenAI makes of prompts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from pipeline.config import TreeSection
from pipeline.reports import GoldenFigure, GoldenPrompt
from tests.engines.environments import OPENVINO, ROOT

_VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_MODEL = "openvino_model.xml"


@dataclass(frozen=True)
class Reply:
    """Of a prompt."""

    ids: tuple[int, ...]
    emitted: tuple[int, ...]  # tokens that each forward of the target added; prefill first

    @property
    def rounds(self) -> int:
        return len(self.emitted) - 1

    @property
    def accepted_lengths(self) -> tuple[int, ...]:
        """Entry n: rounds that accepted n drafted tokens."""
        counts = [0] * max(self.emitted)
        for tokens in self.emitted[1:]:
            counts[tokens - 1] += 1
        return tuple(counts)


def converted(source: Path, out: Path) -> Path:
    """A target's directory, or a head's, by `optimum-cli export openvino`, with float32 weights."""
    command = [str(OPENVINO.make().with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(source), "--task", "text-generation-with-past"]
    command += ["--weight-format", "fp32", "--trust-remote-code", str(out)]
    # It copies its module with the head's class to there.
    variables = {**_VARIABLES, "HF_MODULES_CACHE": str(out.with_name("modules"))}
    subprocess.run(command, env={**os.environ, **variables}, check=True)
    return out


def converted_head(head: Path, out: Path) -> Path:
    """With the head's aux layers, which optimum-intel leaves out: GenAI would read the outputs of
    layers 2, L//2 and L - 3, each one later than those that EAGLE-3 heads are trained with."""
    converted(head, out)
    config = json.loads((head / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    tree = ElementTree.parse(out / _MODEL)
    information = tree.getroot().find("rt_info")
    assert information is not None
    listed = " ".join(map(str, layers))
    ElementTree.SubElement(information, "hidden_layers_list", value=listed)
    tree.write(out / _MODEL)
    return out


def generate(
    target: Path,
    head: Path,
    golden: GoldenFigure,
    prompts: Iterable[GoldenPrompt],
    shape: TreeSection,
) -> list[Reply]:
    """Greedy replies to `prompts`, one after the other, with drafts of `shape`."""
    is_tree = shape.top_k > 1
    settings = {
        **{"target": str(target), "head": str(head)},
        "prompts": [each.prompt_ids for each in prompts],
        **{"new_tokens": golden.max_new_tokens, "stop_ids": golden.stop_ids},
        "drafts": shape.nodes - 1,
        **{"top_k": shape.top_k * is_tree, "depth": shape.steps * is_tree},
    }
    done = subprocess.run(
        [str(OPENVINO.make()), str(ROOT / "tests/engines/openvino_generate.py")],
        input=json.dumps(settings),
        env={**os.environ, **_VARIABLES},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    return [Reply(tuple(row["ids"]), tuple(row["emitted"])) for row in rows]

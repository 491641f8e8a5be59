"""SpecForge's heads as published, computed by its own class and by ours after an import:

    EAGLE3_SPECFORGE_PYTHON=venv/bin/python make test ARGS=tests/heads/test_specforge.py

`pip install --no-deps -r bench/peers/requirements.txt` beside torch and transformers is enough.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.target.weights import TargetWeights
from tests.heads.conftest import logits_of
from tests.heads.test_published import HEADS, REFUSED, imported, sequence, write

PYTHON = os.environ.get("EAGLE3_SPECFORGE_PYTHON")
STEPS = 3
#: SpecForge 0.2.0 is older than this field's meaning (its pull request 879).
LATER = "norm_output"
#: Of a class that it has.
NAMES = [
    head["name"]
    for head in HEADS
    if head["config"].get("architectures") == ["LlamaForCausalLMEagle3"]
    and head["name"] not in REFUSED
    and LATER not in head["config"]
]

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="EAGLE3_SPECFORGE_PYTHON names no interpreter that has specforge"
)


@pytest.mark.parametrize("name", NAMES)
def test_specforge_computes_our_logits(name: str, tiny_target: Path, tmp_path: Path) -> None:
    made = write(name, tmp_path / "head")
    head, _ = imported(made, tiny_target, tmp_path / "back")
    assert isinstance(head, Eagle3Head)
    embedding = TargetWeights(tiny_target).embedding().float()
    tokens, aux = sequence(len(made.states))
    inputs, out = tmp_path / "inputs.safetensors", tmp_path / "logits.safetensors"
    save_file({"token_ids": tokens, "aux_states": aux, "embedding": embedding}, inputs)
    script = Path(__file__).with_name("run_specforge.py")
    command = [str(PYTHON), str(script), str(made.directory), str(inputs), str(out), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(out)
    with torch.no_grad():
        ours = logits_of(head, embedding, tokens, aux, steps=STEPS)
    for step, expected in enumerate(ours):
        computed = theirs[f"step_{step}"][: len(expected)]  # later positions have no token to read
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4, msg=f"step {step}")

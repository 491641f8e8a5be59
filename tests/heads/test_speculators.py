"""Our export, loaded and run by speculators' own class, by an interpreter that has the package:

    EAGLE3_SPECULATORS_PYTHON=venv/bin/python make test ARGS=tests/heads/test_speculators.py

The package has an environment of its own because its dependencies exclude ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from pipeline.errors import HeadError
from pipeline.exchange.export import export_head
from pipeline.exchange.imports import import_head
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.dflash.shape import BlockQkv, ContextKeys, DflashHead, Sight
from pipeline.heads.eagle3.shape import HeadShape
from pipeline.heads.registry import load_head, save_head
from pipeline.records import TargetContract
from pipeline.target.rotary import RotaryTable, rotate
from tests.heads.conftest import logits_of, make_head, sequence
from tests.heads.test_dflash_import import drafter as block_drafter

PYTHON = os.environ.get("EAGLE3_SPECULATORS_PYTHON")
STEPS = 3

#: Fields of a head.
SWITCHES: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "biases": {"attention_bias": True},
    "two layers of qwen3": {"num_hidden_layers": 2, "qk_norm": True},
    "five states": {"aux_layers": 5, "norm_output": True},
    # Their window stays where it is while the steps move on: the first step is what serving does.
    "their defaults": {
        **{"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        "sliding_window": 64,
    },
}

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="EAGLE3_SPECULATORS_PYTHON names no interpreter that has speculators"
)


def run_speculators(
    exported: Path,
    own: Path,
    target: Path,
    inputs: dict[str, Tensor],
    folder: Path,
    steps: int | str = STEPS,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and the logits of every step; `folder` also holds what they saved and converted."""
    save_file(inputs, folder / "inputs.safetensors")
    arguments = [exported, own, target, folder / "inputs.safetensors", folder, steps]
    command = [
        str(PYTHON),
        str(Path(__file__).with_name("run_speculators.py")),
        *map(str, arguments),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), load_file(folder / "logits.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_speculators_computes_our_logits(
    switches: dict[str, Any],
    shape: HeadShape,
    contract: TargetContract,
    embedding: Tensor,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    head = make_head(shape.model_copy(update=switches))
    if layers := switches.get("aux_layers"):
        contract = contract.model_copy(update={"capture_layers": tuple(range(1, layers + 1))})
    own, exported = tmp_path / "own", tmp_path / "exported"
    save_head(own, head, HeadCard(contract))
    export_head(str(own), format="speculators", out=str(exported))
    tokens, aux = sequence(head.shape, 90)
    inputs = {"token_ids": tokens, "aux_states": aux}
    facts, logits = run_speculators(exported, own, tiny_target, inputs, tmp_path)
    print(facts)
    assert facts["layers"] == [layer + 1 for layer in contract.capture_layers]
    assert facts["rope_theta"] == 700.0
    from_target = ["verifier_lm_head.weight", "verifier_norm.weight"]
    assert facts["missing"] == from_target and facts["surplus"] == []
    steps = 1 if head.shape.sliding_window else STEPS
    for step, expected in enumerate(
        logits_of(head, embedding.bfloat16(), tokens, aux, steps=steps)
    ):
        computed = logits[f"step_{step}"][: len(expected)]  # later positions have no token to read
        difference, largest = (expected - computed).abs().max(), expected.abs().max()
        print(f"step {step}: largest difference {difference:.1e}, logits up to {largest:.1f}")
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)
    # What they save comes home unchanged, and so does what they convert from SGLang's dialect.
    check_import(tmp_path / "resaved", tiny_target, contract, head)
    if not switches:
        check_import(tmp_path / "converted", tiny_target, contract, head)
    # Their converter drops the three tensors of fc_norm without a word.
    if switches.get("fc_norm"):
        converted, back = str(tmp_path / "converted"), str(tmp_path / "back")
        with pytest.raises(HeadError, match=r"has no tensor fc_norm\.0\.weight"):
            import_head(converted, target=str(tiny_target), out=back)


@torch.no_grad()
def block_states(head: DflashHead, embedding: Tensor, tokens: Tensor, aux: Tensor) -> Tensor:
    """What lm_head reads [b, H] of the block after `tokens` [T], whose last one is its root.

    No mask at all: a block sees the states [T-1, 3H] of all tokens before it and the whole block.
    """
    past, size = len(tokens) - 1, head.shape.block_size
    rotary = RotaryTable(
        head.shape.rope_config(), past + size, device=torch.device("cpu"), dtype=torch.float32
    )

    def attend(block: BlockQkv, context: ContextKeys, sight: Sight) -> Tensor:
        keys = rotate(torch.cat((context.key, block.key)), *rotary.at(torch.arange(past + size)))
        query = rotate(block.query, *rotary.at(torch.arange(past, past + size)))
        values = torch.cat((context.value, block.value))
        query, keys, values = (each.transpose(0, 1) for each in (query, keys, values))
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(0, 1)

    embedded = embedding.float()[head.block_tokens(tokens[-1:])[0]]
    return head.run(embedded, head.context(aux[:past]), attend)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_speculators_computes_the_logits_of_our_blocks(
    layers: int,
    kind: str,
    contract: TargetContract,
    embedding: Tensor,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    options = {"markov_rank": 4, "confidence": True} if kind == "dspark" else {}
    head = block_drafter(tiny_target, layers=layers, **options)
    with torch.no_grad():
        for parameter in head.parameters():  # what bfloat16 holds exactly
            parameter.copy_((parameter * (4 if parameter.dim() > 1 else 1)).bfloat16())
    own, exported = tmp_path / "own", tmp_path / "exported"
    save_head(own, head, HeadCard(contract))
    export_head(str(own), format="speculators", out=str(exported), verifier=str(tiny_target))
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, contract.vocab_size, (24,), generator=generator)
    aux = torch.randn(24, 3 * contract.hidden_size, generator=generator)
    anchors = torch.zeros(24, dtype=torch.long)
    anchors[[1, 7, 15]] = 1
    inputs = {"token_ids": tokens, "aux_states": aux, "anchors": anchors}
    facts, logits = run_speculators(exported, own, tiny_target, inputs, tmp_path, "anchors")
    print(facts)
    assert facts["layers"] == [layer + 1 for layer in contract.capture_layers]
    of_target = ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    assert facts["missing"] == of_target and facts["surplus"] == []
    for anchor, computed in zip((1, 7, 15), logits["blocks"], strict=True):
        states = block_states(head, embedding, tokens[: anchor + 1], aux)
        read = head.proposing(states, tokens[anchor : anchor + head.shape.block_size])
        expected = read @ head.output_rows().T
        difference, largest = (expected - computed).abs().max(), expected.abs().max()
        print(f"anchor {anchor}: largest difference {difference:.1e}, logits up to {largest:.1f}")
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)
        if head.confidence_head is not None:
            odds = logits["confidence"][(1, 7, 15).index(anchor)]
            own_odds = head.confidence_head.proj(read)[:, 0]
            torch.testing.assert_close(odds, own_odds, rtol=1e-5, atol=1e-5)
    check_import(tmp_path / "resaved", tiny_target, contract, head)


def check_import(written: Path, target: Path, contract: TargetContract, head: DraftingHead) -> None:
    """Import what they wrote and find our head again."""
    import_head(str(written), target=str(target), out=str(written.with_name("back")))
    back, _ = load_head(written.with_name("back"), expected=contract)
    shutil.rmtree(written.with_name("back"))
    assert back.shape == head.shape
    for name, tensor in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name

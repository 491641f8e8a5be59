"""A DSpark head's directory: its tensors and fields, both dialects there and back, and SGLang's own
classes.

    EAGLE3_SGLANG_PYTHON=.venvs/sglang/bin/python make test ARGS=tests/heads/test_dspark.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import HeadError
from pipeline.exchange.export import export_head
from pipeline.exchange.imports import import_head
from pipeline.exchange.inspect import inspect_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.registry import algorithm_of, load_head, save_head
from pipeline.records import TargetContract
from tests.heads.conftest import CARD, CONFIG, METRICS, PROVENANCE, VD, WEIGHTS, edit
from tests.heads.test_dflash_import import drafter, same_tensors

RANK = 4
#: An interpreter that has SGLang 0.5.23.
SGLANG = os.environ.get("EAGLE3_SGLANG_PYTHON", "")


def dspark(tiny_target: Path, **changes: Any) -> DflashHead:
    return drafter(tiny_target, **{"markov_rank": RANK, "confidence": True, **changes})


@pytest.fixture
def own(tiny_target: Path, contract: TargetContract, tmp_path: Path) -> Path:
    """Ours, of a part of the vocabulary."""
    card = HeadCard(contract, PROVENANCE, METRICS)
    save_head(tmp_path / "own", dspark(tiny_target), card)
    return tmp_path / "own"


@pytest.fixture
def whole(tiny_target: Path, contract: TargetContract, tmp_path: Path) -> Path:
    """Ours, with the target's rows."""
    card = HeadCard(contract, PROVENANCE, METRICS)
    save_head(tmp_path / "whole", dspark(tiny_target, target_lm_head=True), card)
    return tmp_path / "whole"


def test_tensors_and_fields_are_those_that_servers_read(
    own: Path, contract: TargetContract, tiny_target: Path
) -> None:
    tensors = load_file(own / WEIGHTS)
    added = {name: [*each.shape] for name, each in tensors.items() if "_head." in name}
    del added["lm_head.weight"]
    assert added == {
        "markov_head.markov_w1.weight": [contract.vocab_size, RANK],
        "markov_head.markov_w2.weight": [VD, RANK],
        "confidence_head.proj.weight": [1, contract.hidden_size + RANK],
        "confidence_head.proj.bias": [1],
    }
    body = json.loads((own / CONFIG).read_text())
    assert body["architectures"] == ["DSparkDraftModel"] and body["model_type"] == "qwen3"
    inside, layers = body["dflash_config"], list(contract.capture_layers)
    for place in (body, inside):  # SGLang and vLLM read the one, SpecForge the other
        assert place["markov_rank"] == RANK and place["markov_head_type"] == "vanilla"
        assert place["enable_confidence_head"] is place["confidence_head_with_markov"] is True
        assert place["sample_from_anchor"] is True
        assert place["block_size"] == 6 and place["mask_token_id"] == 4
        assert place["target_layer_ids"] == layers, "output indices"
    head, card = load_head(own, expected=contract)
    assert isinstance(head, DflashHead) and head.shape == dspark(tiny_target).shape
    assert algorithm_of(head).name == "dspark" and card.metrics == METRICS
    assert inspect_head(str(own)).shape["markov_rank"] == RANK


def test_a_head_without_markov_s_is_a_plain_block_drafter(tiny_target: Path) -> None:
    assert algorithm_of(drafter(tiny_target)).name == "dflash"


def brought(directory: Path, target: Path) -> Path:
    out = directory.with_name(f"{directory.name}-back")
    import_head(str(directory), target=str(target), out=str(out))
    return out


@pytest.mark.parametrize("format", ["sglang", "speculators"])
@pytest.mark.parametrize("kind", ["own", "whole"])
def test_exports_come_back_bit_for_bit(
    kind: str, format: Any, request: pytest.FixtureRequest, tiny_target: Path
) -> None:
    directory: Path = request.getfixturevalue(kind)
    out = directory.with_name("given")
    if (kind, format) == ("own", "sglang"):
        with pytest.raises(HeadError, match="SGLang drafts with the target's"):
            export_head(str(directory), format=format, out=str(out))
        return
    verifier = "/models/target" if format == "speculators" else None
    export_head(str(directory), format=format, out=str(out), verifier=verifier)
    body = json.loads((out / CONFIG).read_text())
    if format == "speculators":
        assert body["speculators_model_type"] == "dspark" and body["sample_from_anchor"] is True
        assert body["markov_rank"] == RANK and body["enable_confidence_head"] is True
        (proposal,) = body["speculators_config"]["proposal_methods"]
        assert proposal["speculative_tokens"] == 6, "every position of a block predicts"
        draft = '{"method": "dspark", "model": "HEAD", "num_speculative_tokens": 6}'
        assert draft in (out / "README.md").read_text()
    (out / CARD).unlink()
    back = brought(out, tiny_target)
    same_tensors(directory, back)
    assert (back / CONFIG).read_text() == (directory / CONFIG).read_text()


def test_sglang_has_no_bias_for_a_part_of_the_vocabulary(
    tiny_target: Path, contract: TargetContract, tmp_path: Path
) -> None:
    """Even with the target's rows, of which SGLang takes all."""
    from pipeline.target.weights import TargetWeights

    head = dspark(tiny_target)
    with torch.no_grad():
        head.lm_head.weight.copy_(TargetWeights(tiny_target).lm_head()[head.target_ids()])
    save_head(tmp_path / "frozen", head, HeadCard(contract))
    with pytest.raises(HeadError, match="bias of a part of the vocabulary"):
        export_head(str(tmp_path / "frozen"), format="sglang", out=str(tmp_path / "given"))


def test_readers_disagree_on_an_anchor_that_is_not_said(own: Path, tiny_target: Path) -> None:
    out = own.with_name("given")
    export_head(str(own), format="speculators", out=str(out), verifier="/models/target")
    (out / CARD).unlink()
    edit(out, sample_from_anchor=...)
    with pytest.raises(HeadError, match="lacks sample_from_anchor"):
        brought(out, tiny_target)
    edit(out, sample_from_anchor=False)  # vLLM's other layout: the root predicts nothing
    head, _ = load_head(brought(out, tiny_target))
    assert isinstance(head, DflashHead) and head.shape.predicted == 5


#: Loads a directory by SGLang's own configuration and classes; bias of one step and confidences.
_PROGRAM = """
import json, sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
folder, inputs, out = sys.argv[1:]
set_global_server_args_for_scheduler(ServerArgs(model_path=folder, device="cpu"))
from sglang.srt.models.dspark import DSparkConfidenceHead, EntryClass
from sglang.srt.speculative.dspark_components import dspark_config
tensors, given = load_file(f"{folder}/model.safetensors"), load_file(inputs)
config = AutoConfig.from_pretrained(folder)
parsed = dspark_config.parse_dspark_draft_config(draft_hf_config=config)
runtime = dspark_config.resolve_runtime_config(draft_hf_config=config,
    speculative_num_draft_tokens=None, target_vocab_size=config.vocab_size)
(kind,) = (each for each in EntryClass if each.__name__ in config.architectures)
model = kind(config)
model.load_weights(tensors.items())
unread = set(tensors)
def parts(name):
    for fused, names in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        if fused in name:
            return [name.replace(fused, f"{part}_proj") for part in names]
    return [name]
for name, parameter in model.named_parameters():
    unread -= set(parts(name))
    expected = torch.cat([tensors[part] for part in parts(name)])
    assert torch.equal(parameter.bfloat16(), expected), name
sure = DSparkConfidenceHead(hidden_size=config.hidden_size, markov_rank=config.markov_rank,
    with_markov=config.confidence_head_with_markov)
prefix = "confidence_head."
sure.load_state_dict({name.removeprefix(prefix): tensors[name].float()
    for name in tensors if name.startswith(prefix)})
states, before = given["states"], given["before"]  # [n, b, H], [n, b + 1]
markov = model.markov_head.float()
with torch.no_grad():
    bias, _ = markov.step_bias(before[:, 0], hidden_states=None, state=None)
    confidence, _ = sure.predict(states, anchor_tokens=before[:, 0], draft_tokens=before[:, 1:],
        markov_head=markov)
save_file({"bias": bias, "confidence": confidence}, out)
print(json.dumps({"gamma": runtime.gamma, "block": model.gamma, "mask": runtime.mask_token_id,
    "layers": parsed.target_layer_ids, "rank": parsed.markov_rank,
    "anchor": model.sample_from_anchor, "unread": sorted(unread)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not SGLANG, reason="EAGLE3_SGLANG_PYTHON names no interpreter with SGLang")
def test_sglang_s_classes_load_a_head_and_compute_its_bias_and_confidence(
    whole: Path, tiny_target: Path, contract: TargetContract, tmp_path: Path
) -> None:
    export_head(str(whole), format="sglang", out=str(tmp_path / "given"))
    head, _ = load_head(whole)
    assert isinstance(head, DflashHead)
    generator = torch.Generator().manual_seed(2)
    count = head.shape.predicted
    states = torch.randn(5, count, contract.hidden_size, generator=generator)
    before = torch.randint(0, contract.vocab_size, (5, count + 1), generator=generator)
    save_file({"states": states, "before": before}, tmp_path / "inputs")
    arguments = [str(tmp_path / name) for name in ("given", "inputs", "outputs")]
    shim = Path(__file__).parents[1] / "engines/sglang_cpu"
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(shim)}
    done = subprocess.run(
        [SGLANG, "-c", _PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    # Their default verification has no use for a confidence and leaves it out.
    confidence_tensors = ["confidence_head.proj.bias", "confidence_head.proj.weight"]
    assert facts == {
        **{"gamma": 6, "block": 6, "mask": 4, "rank": RANK, "anchor": True},
        "layers": list(contract.capture_layers),
        "unread": [*confidence_tensors, "d2t", "t2d"],
    }
    theirs = load_file(tmp_path / "outputs")
    markov, sure = head.markov_head, head.confidence_head
    assert markov is not None and sure is not None
    with torch.no_grad():
        bias = markov.markov_w2(markov.markov_w1(before[:, 0]))
        read = head.proposing(states.flatten(0, 1), before[:, :count].flatten())
        confidence = torch.sigmoid(sure.proj(read)).view(5, count)
    torch.testing.assert_close(theirs["bias"], bias, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs["confidence"], confidence, rtol=1e-5, atol=1e-6)

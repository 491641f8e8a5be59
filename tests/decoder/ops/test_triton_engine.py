"""The engine over Triton kernels, built as on CUDA: buckets, overlapped rounds, every drafter.

A dimension of 1, or a chain where a tree was, makes views of what is a copy elsewhere; kernels read
by address. So every shape of tree meets every drafter in one row and in several. Without a GPU
these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from bench.random_target import random_head, random_model
from bench.report import ROOT
from pipeline.config import DrafterSection, TreeSection, load
from pipeline.decoder.engine import Engine
from pipeline.decoder.graphs import default_buckets
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import Float8Rows
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.decoder.request import Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter, drafter_factory
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.reports import RoundCounters
from pipeline.tuning.verification import log_probabilities
from tests.decoder.random_drafters import DRAFTERS, every_drafter, in_float8
from tests.gpu import cases

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,  # the least of which products are fused
    max_position_embeddings=64,
)
TREES = {
    "one draft": TreeSection(top_k=1, steps=1, nodes=2),
    "chain": TreeSection(top_k=1, steps=3, nodes=4),
    "level": TreeSection(top_k=3, steps=1, nodes=4),
    "tree": TreeSection(top_k=2, steps=3, nodes=6),
}

CONFIGS = [load(file) for file in sorted((ROOT / "configs").glob("*.yaml"))]
#: The trees of the configurations and of the GPU's checks, by label.
SHAPES = {
    tree.label: tree
    for tree in (
        *(tree for each in CONFIGS for tree in (each.eval.tree, each.train.evaluate_tree)),
        *(each.synth.tree for each in CONFIGS if each.synth),
        TreeSection(),
        *cases.TREES.values(),
        *cases.TREES_OF_ALL,
    )
    if isinstance(tree, TreeSection)
}


@pytest.fixture(scope="module")
def target(device: torch.device) -> DecoderModel:
    return model_of(TritonOps(torch.float32), device)


@pytest.fixture(scope="module")
def plain(device: torch.device) -> DecoderModel:
    """The same weights, computed by the definition of every operation; they look at values, which
    a captured round on a GPU must not."""
    ops = TritonOps if device.type == "cuda" else TorchOps
    return model_of(ops(torch.float32), device)


def model_of(ops: TorchOps, device: torch.device) -> DecoderModel:
    return random_model(
        CONFIG, (0, 1, 2), device=device, dtype=torch.float32, max_length=32, scale=0.5, ops=ops
    )


#: Fused layers: products that are split, biases, norms of heads, heads that are turned in part, and
#: behind a window. And Gemma's, which are not fused.
FORMS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024},
    "qwen2": {},
    "qwen3": {},
    "phi3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "pad_token_id": 0,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "mistral": {"sliding_window": 64},
    "gemma3_text": {
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": None,
        "pad_token_id": 0,
    },
}


def random_family(family: str, directory: Path) -> Any:
    """transformers' model of a family, left in a directory."""
    settings = {**CONFIG.to_dict(), "hidden_size": 96, "max_position_embeddings": 128}
    config = AutoConfig.for_model(**{**settings, "model_type": family, **FORMS[family]})
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in hf.parameters():  # zeros and ones would hide a missing term
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() < 2 else 0.1))
    hf.save_pretrained(directory)
    return hf


def loaded_family(directory: Path, device: torch.device) -> DecoderModel:
    kind: dict[str, Any] = {"dtype": torch.float32, "ops": TritonOps(torch.float32)}
    return DecoderModel.load(directory, (0, 1, 2), device=device, max_length=110, **kind)


@pytest.mark.parametrize("family", FORMS)
def test_log_probabilities_are_transformers(
    device: torch.device, tmp_path: Path, family: str
) -> None:
    hf = random_family(family, tmp_path)
    own = loaded_family(tmp_path, device)
    prompt, reply = (3, 1, 4, 1, 5, 9, 2, 6, 5), (3, 5, 8, 9, 7, 9, 3)
    with torch.inference_mode():
        logits = hf.to(device)(torch.tensor([[*prompt, *reply[:-1]]], device=device)).logits[0]
    theirs = logits[len(prompt) - 1 :].float().log_softmax(-1)  # [T, V]
    difference = (log_probabilities(own, prompt, reply) - theirs).abs().max()
    assert difference < 1e-4 and theirs.std() > 0.5


LAYER_FAULTS: dict[str, Callable[[Tensor], object]] = {
    "no scales": lambda scales: scales.fill_(1),
    "scales of another row": lambda scales: scales.copy_(scales.roll(1)),
}


@pytest.mark.parametrize("fault", [None, *LAYER_FAULTS])
def test_a_rounded_target_is_transformers_in_float8(
    device: torch.device, tmp_path: Path, fault: str | None
) -> None:
    """Log-probabilities, and what a tree generates; the matrices are found to be float8's."""
    hf = random_family("qwen2", tmp_path / "stored")
    assert not float8_matrices(loaded_family(tmp_path / "stored", device))
    with torch.no_grad():
        for matrix in (each for each in hf.model.layers.parameters() if each.dim() == 2):
            matrix.mul_(1 + torch.arange(len(matrix))[:, None] % 3)
            matrix.copy_(Float8Rows.of(matrix).widened())
    hf.save_pretrained(tmp_path / "rounded")
    hf.to(device)
    own = loaded_family(tmp_path / "rounded", device)
    held = float8_matrices(own)
    assert len(held) == 4 * len(own.layers)
    for each in held:
        if fault is not None:
            LAYER_FAULTS[fault](each.scales)
    prompt, reply = (3, 1, 4, 1, 5, 9, 2, 6, 5), (3, 5, 8, 9, 7, 9, 3)
    ids = torch.tensor([[*prompt, *reply[:-1]]], device=device)
    with torch.inference_mode():
        logits = hf(ids).logits[0]
    theirs = logits[len(prompt) - 1 :].float().log_softmax(-1)  # [T, V]
    difference = (log_probabilities(own, prompt, reply) - theirs).abs().max()
    assert (difference < 1e-4) == (fault is None) and theirs.std() > 0.5
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    whole = hf.generate(ids, attention_mask=mask, **settings)[0, ids.shape[1] :].tolist()
    drafter = Eagle3Drafter(random_head(own.config, torch.arange(16)), own, TREES["tree"])
    request = Request("0", tuple(ids[0].tolist()), 5, ())
    given = replies(Engine(own, drafter=drafter, slots=2, overlap=True), [request])
    assert fault is not None or given["0"] == tuple(whole)


def float8_matrices(model: DecoderModel) -> list[Float8Rows]:
    packed = ((w.qkv, w.output, w.gate_up, w.down) for w in model.layers)
    return [each for layer in packed for each in layer if isinstance(each, Float8Rows)]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_tree_behind_a_window_gives_what_transformers_generates(
    device: torch.device, tmp_path: Path, family: str
) -> None:
    hf = random_family(family, tmp_path).to(device)
    own = loaded_family(tmp_path, device)
    prompt = torch.randint(16, (1, 90), generator=torch.Generator().manual_seed(2)).to(device)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = hf.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    drafter = Eagle3Drafter(random_head(own.config, torch.arange(16)), own, TREES["tree"])
    request = Request("0", tuple(prompt[0].tolist()), 5, ())
    given = replies(Engine(own, drafter=drafter, slots=2, overlap=True), [request])
    assert given["0"] == tuple(whole[0, 90:].tolist())


def requests(count: int, temperature: float = 0.0) -> list[Request]:
    settings: dict[str, Any] = {"temperature": temperature, "top_k": 8 if temperature else 0}
    prompts = (3, 1, 4, 1), (5, 9), (2, 6, 5), (3,), (5, 8, 9, 7, 9)
    return [
        Request(str(index), prompts[index], 3, (), seed=index, **settings) for index in range(count)
    ]


def replies(engine: Engine, submitted: list[Request]) -> dict[str, tuple[int, ...]]:
    done = list(engine.generate(submitted))
    assert all(each.error is None for each in done)
    return {each.request_id: each.token_ids for each in done}


def check(
    target: DecoderModel,
    plain: DecoderModel,
    name: str,
    tree: TreeSection,
    slots: int,
    temperature: float = 0.0,
) -> None:
    drafter = every_drafter(target)[name](tree)
    buckets = default_buckets(slots)
    engine = Engine(target, drafter=drafter, slots=slots, buckets=buckets, overlap=True)
    submitted = requests(slots, temperature)
    assert replies(engine, submitted) == replies(Engine(plain), submitted)


# Where a view is no copy: a chain of several rows is strided, a tree of one row has stride 0.
@pytest.mark.parametrize(("tree", "slots"), [("chain", 3), ("tree", 1)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_changes_no_token(
    target: DecoderModel, plain: DecoderModel, name: str, tree: str, slots: int
) -> None:
    check(target, plain, name, TREES[tree], slots)


@pytest.mark.parametrize(
    ("tree", "slots"), [("one draft", 1), ("one draft", 3), ("level", 1), ("chain", 1)]
)
def test_other_shapes(target: DecoderModel, plain: DecoderModel, tree: str, slots: int) -> None:
    check(target, plain, "eagle3", TREES[tree], slots)


@pytest.mark.parametrize(
    ("name", "tree", "slots", "temperature"),
    [
        ("mtp", TreeSection(), 2, 0.8),
        ("ngram", TreeSection(top_k=10, steps=6, nodes=60), 5, 0.0),
    ],
)
def test_shapes_of_configurations_and_of_the_gpu_check(
    target: DecoderModel,
    plain: DecoderModel,
    name: str,
    tree: TreeSection,
    slots: int,
    temperature: float,
) -> None:
    check(target, plain, name, tree, slots, temperature)


def test_a_sampled_tree_of_several_rows(target: DecoderModel, plain: DecoderModel) -> None:
    check(target, plain, "eagle3", TREES["tree"], 3, temperature=0.8)


FLOAT8_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "no scales": torch.ones_like,
    "scales of another row": lambda scales: scales.roll(1),
}


def uneven_head() -> Eagle3Head:
    """Its matrices' rows have different scales in float8; some of its drafts are accepted."""
    head = random_head(CONFIG, torch.arange(1, 16, 2), intermediate_size=96, scale=6, seed=5)
    with torch.no_grad():
        for rows in (each for each in head.parameters() if each.dim() == 2):
            rows.mul_(1 + torch.arange(len(rows))[:, None] % 3)
    return head


def plant(drafter: Eagle3Drafter, fault: str | None) -> None:
    """A fault in every matrix of a head that is in float8."""
    stack = drafter._head.stack.layers[0]
    packed = (drafter._fc, stack.qkv, stack.output, stack.gate_up, stack.down)
    for each in (*packed, drafter._head.lm_head):
        assert isinstance(each, Float8Rows)
        if fault is not None:
            each.scales.copy_(FLOAT8_FAULTS[fault](each.scales))


@pytest.mark.parametrize(
    ("tree", "slots", "fault"),
    [("chain", 3, None), ("tree", 1, None), *(("tree", 1, fault) for fault in FLOAT8_FAULTS)],
)
def test_a_head_in_float8(
    target: DecoderModel, plain: DecoderModel, tree: str, slots: int, fault: str | None
) -> None:
    """No token is changed, and drafts are those of a head that was rounded beforehand."""
    head = uneven_head()
    drafter = Eagle3Drafter(head, target, TREES[tree], float8=True)
    plant(drafter, fault)
    submitted = requests(slots)
    own, wanted = (
        (drafter, target),
        (Eagle3Drafter(in_float8(head), plain, TREES[tree]), plain),
    )
    logits = list[list[Tensor]]()
    for each, model in (own, wanted):
        each.trace = []
        engine = Engine(model, drafter=each, slots=slots, buckets=[slots], overlap=False)
        assert replies(engine, submitted) == replies(Engine(plain), submitted)
        logits.append(each.trace)
    # Of the first round, in which all rows are the requests'; a fault may change how many follow.
    pairs = list(zip(*logits, strict=False))[: TREES[tree].steps]
    assert len(pairs) == TREES[tree].steps
    same = all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in pairs)
    assert same == (fault is None)


@pytest.mark.parametrize("fault", [None, "no scales"])
def test_a_head_in_float8_with_a_tree_for_each_batch(
    target: DecoderModel, plain: DecoderModel, fault: str | None
) -> None:
    """As `tree: auto` has it: as requests end, plain rounds become a level's, and those a tree's.
    No token is changed, and rounds accept what a head that was rounded beforehand drafts."""
    trees = {
        1: TreeSection(top_k=4, steps=3, nodes=8),
        2: TreeSection(top_k=4, steps=1, nodes=5),
        3: None,
    }
    section = DrafterSection.model_validate({"name": "eagle3", "weights": "fp8"})
    drafter = drafter_factory(section, head := uneven_head(), target)(trees)
    assert isinstance(drafter, Eagle3Drafter)
    plant(drafter, fault)
    ends = zip(requests(3), (3, 6, 11), strict=True)
    submitted = [replace(request, max_new_tokens=count) for request, count in ends]
    counters = list[dict[str, RoundCounters]]()
    for model, each in ((target, drafter), (plain, Eagle3Drafter(in_float8(head), plain, trees))):
        engine = Engine(model, drafter=each, slots=3, buckets=list(trees), overlap=True)
        done = list(engine.generate(submitted))
        tokens = {each.request_id: each.token_ids for each in done}
        assert tokens == replies(Engine(plain), submitted)
        counters.append({each.request_id: each.statistics.counters() for each in done})
    own, rounded = counters
    assert [len(rounded[name].proposed) for name in "012"] == [0, 1, 3]
    assert all(sum(rounded[name].accepted_lengths[1:]) for name in "12")
    assert (own == rounded) == (fault is None)


@pytest.mark.matrix
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampling"])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_shape_and_batch(
    target: DecoderModel,
    plain: DecoderModel,
    name: str,
    shape: str,
    slots: int,
    temperature: float,
) -> None:
    check(target, plain, name, SHAPES[shape], slots, temperature)

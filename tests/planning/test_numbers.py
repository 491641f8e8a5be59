"""Formulas of docs/planning.md against numbers worked out by hand, and against the real thing.

Llama-3.3-70B: H 8,192, I 28,672, 80 layers, 64 query and 8 key/value heads of 128, V 128,256.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from pipeline.config import TrainSection, parse
from pipeline.errors import TargetError
from pipeline.heads.eagle3.init import solve_least_squares
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.registry import algorithm, solves_least_squares
from pipeline.heads.unrolled import Objective
from pipeline.learning import least_squares as ridge
from pipeline.learning import losses as divergence
from pipeline.learning.batches import TrainBatch
from pipeline.planning.heads import (
    CHUNK_LOGITS,
    RIDGE_COMPARED,
    RIDGE_STRENGTHS,
    HeadSize,
    activation_bytes,
    init_bytes,
    zero_memory,
)
from pipeline.planning.targets import KNOWN, read_shape, shape_of
from pipeline.records import ZeroStage
from pipeline.train.trainer import Trainer

LLAMA = KNOWN["llama-3.3-70b-instruct"]
SECTION = TrainSection.model_validate(
    {"head_config": {"draft_vocab_size": 32000}, "batch_tokens": 4096, "ttt_steps": 5}
)
HEAD = algorithm(SECTION).size(SECTION, LLAMA)
#: fc 3·8192², q 16384·8192, k and v 16384·1024 each, o 8192², MLP 3·8192·28672, lm_head
#: 32000·8192, four norms.
HEAD_PARAMETERS = (
    201_326_592 + 134_217_728 + 2 * 16_777_216 + 67_108_864 + 704_643_072 + 262_144_000 + 32_768
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.3-70b-instruct", 70_553_706_496),
        ("llama-3.1-405b-instruct", 405_853_388_800),
        ("llama-3.1-8b-instruct", 8_030_261_248),
        ("llama-3.2-3b-instruct", 3_212_749_824),
        ("llama-3.2-1b-instruct", 1_235_814_400),
        ("qwen2.5-72b-instruct", 72_706_203_648),
        ("qwen2.5-7b-instruct", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b-instruct-v0.3", 7_248_023_552),
        ("smollm2-135m-instruct", 134_515_008),
    ],
)
def test_well_known_targets_have_their_published_parameters(name: str, parameters: int) -> None:
    assert KNOWN[name].parameters == parameters


def test_the_shape_is_that_of_the_model_that_transformers_builds(tiny_target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert read_shape(tiny_target / "config.json").parameters == built


def test_a_target_is_taken_from_where_its_numbers_are(tiny_target: Path, tmp_path: Path) -> None:
    def shape(source: str, **plan: Any) -> Any:
        return shape_of(parse({"target": {"source": source}, "plan": plan}))

    assert shape(str(tiny_target)).hidden == 32
    assert shape("meta-llama/Llama-3.3-70B-Instruct").layers == 80
    assert shape("/models/Llama-3.3-70B-Instruct/").layers == 80
    assert shape("no/model", target_config=str(tiny_target)).hidden == 32
    assert shape("no/model", target_config=str(tiny_target / "config.json")).hidden == 32
    unknown = shape("no/model")
    assert unknown.parameters == 8_030_261_248 and "assumed, no/model" in unknown.origin
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="num_attention_heads"):
        shape(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "numbers", "parameters", "active"),
    [
        (
            "qwen3_moe",  # Qwen3-30B-A3B
            {
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "vocab_size": 151936,
            },
            30.5e9,
            3.3e9,
        ),
        ("mixtral", {}, 46.7e9, 12.9e9),  # Mixtral 8x7B
        ("gpt_oss", {}, 116.8e9, 5.7e9),  # gpt-oss-120b, its embedding counted
        (
            "llama4_text",  # Llama 4 Maverick: every other layer is dense
            {"num_local_experts": 128, "interleave_moe_layer_step": 2},
            400.7e9,
            17.2e9,
        ),
        ("glm4_moe", {}, 103.5e9, 10.05e9),  # the first layer is dense
    ],
)
def test_experts_count_where_they_are_held_and_where_they_compute(
    kind: str, numbers: dict[str, int], parameters: float, active: float, tmp_path: Path
) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    make: Any = CONFIG_MAPPING[kind]
    build: Any = AutoModelForCausalLM.from_config
    config = make(**numbers)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        built = build(config)
    shape = read_shape(tmp_path / "config.json")
    assert shape.parameters == pytest.approx(built.num_parameters(), rel=2e-3)
    assert shape.parameters == pytest.approx(parameters, rel=2e-3)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)
    half = replace(shape, counted=round(parameters / 2))
    assert half.active_parameters == pytest.approx(active / 2, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("mistral", {"sliding_window": 4096}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": 262144}),
        ("phi3", {"sliding_window": 2047}),
        ("llama", {}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 7}),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 40}),
        ("gemma2", {"sliding_window": 4096}),
        ("gemma3_text", {"sliding_window": 512}),
        ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 4}),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 8 + ["full_attention"] * 4}),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_windows_are_those_that_transformers_reads(
    kind: str, numbers: dict[str, Any], written: bool, tmp_path: Path
) -> None:
    """From what a model's owner writes, and from what transformers makes of it."""
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96}
    fields = {**sizes, "num_hidden_layers": 12, "vocab_size": 50, "head_dim": 16, **numbers}
    config = AutoConfig.for_model(kind, **fields)
    body = config.to_dict() if written else {"model_type": kind, **fields}
    if not written and kind == "gemma3_text" and "sliding_window" not in fields:
        body["sliding_window"] = config.sliding_window
    (tmp_path / "config.json").write_text(json.dumps(body, default=str))
    window = getattr(config, "sliding_window", None) or 0
    always = "sliding_attention" if kind in ("mistral", "phi3") else "full_attention"
    types = getattr(config, "layer_types", None) or [always] * 12
    layers = types.count("sliding_attention") if window else 0
    shape = read_shape(tmp_path / "config.json")
    expected = (window, layers) if layers else (0, 0)
    assert (shape.sliding_window, shape.sliding_layers) == expected
    seen = [min(5000, window if each == "sliding_attention" and window else 5000) for each in types]
    assert shape.mean_seen(5000) == pytest.approx(sum(seen) / 12)
    assert shape.attention_flops(5000) == 4 * sum(seen) * 4 * 16


def test_a_head_for_70b_in_numbers() -> None:
    assert HEAD.parameters == HEAD_PARAMETERS == 1_403_027_456


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("aux_layers", [1, 3, 5])
def test_the_heads_parameters_are_those_that_are_built(fc_norm: bool, aux_layers: int) -> None:
    head = Eagle3Head(shape(fc_norm=fc_norm, aux_layers=aux_layers))
    target = replace(LLAMA, hidden=64, heads=4, groups=2, head_dim=16, aux_layers=aux_layers)
    settings = {"draft_vocab_size": 40, "intermediate_size": 96, "fc_norm": fc_norm}
    size = HeadSize.of(TrainSection.model_validate({"head_config": settings}), target)
    assert size.parameters == head.count_parameters()


#: P head's parameters; W 64. Bytes: weights 4P and 2P, gradients likewise, moments 8P or 12P/W with
#: masters, gradients 4P/W; buckets of 500 M numbers of 4 bytes.
ZERO = {
    0: (8_418_164_736, 8_418_164_736, 11_224_219_648, 0, 0),
    1: (8_418_164_736, 8_418_164_736, 263_067_648, 87_689_216, 2_000_000_000),
}


@pytest.mark.parametrize("stage", [0, 1])
def test_memory_by_zero_stage(stage: ZeroStage) -> None:
    memory = zero_memory(SECTION, HEAD, LLAMA, stage=stage, ranks=64, bf16=True)
    parts = (
        memory.weights,
        memory.gradients,
        memory.optimiser,
        memory.stepping,
        memory.buffers,
    )
    assert parts == ZERO[stage]
    assert memory.frozen == (128_256 + 32_000) * 8_192 * 2
    weights, gradients, optimiser, _, buffers = ZERO[stage]
    # The activations are more than the gradients in fp32, and both are never held together.
    total = weights + gradients + optimiser + buffers + memory.frozen + memory.activations
    assert memory.total == total


def test_fp32_training_has_no_copy_of_the_weights() -> None:
    each = [zero_memory(SECTION, HEAD, LLAMA, stage=stage, ranks=1, bf16=False) for stage in (0, 1)]
    assert [memory.optimiser for memory in each] == [8 * HEAD_PARAMETERS, 12 * HEAD_PARAMETERS]
    assert {memory.weights for memory in each} == {4 * HEAD_PARAMETERS} and each[0].stepping == 0


def test_activations_in_numbers() -> None:
    # A step's: 7·8192 + 2·8192 + 2·1024 + 3·28672; chains of 0 to 4 times 2·1024; once 4·8192;
    # the loss 3·8192.
    step = 57_344 + 16_384 + 2_048 + 86_016
    numbers = 4_096 * (5 * step + 10 * 2_048 + 32_768 + 5 * 24_576) + 134_217_728
    assert activation_bytes(SECTION, HEAD, width=2) == 2 * numbers + 4 * (
        4_096 * step + 262_144_000
    )
    checkpointed = SECTION.model_copy(update={"activation_checkpointing": True})
    saved = 4_096 * (step + 4 * 2_048 + 5 * (24_576 + 2_048) + 32_768 + 5 * 24_576) + 134_217_728
    assert activation_bytes(checkpointed, HEAD, width=2) == 2 * saved + 4 * (
        4_096 * step + 262_144_000
    )
    dropped = SECTION.model_copy(update={"dropout": 0.1})
    factors = activation_bytes(dropped, HEAD, width=2) - activation_bytes(SECTION, HEAD, width=2)
    assert factors == 2 * 4_096 * 5 * 16_384
    assert CHUNK_LOGITS == divergence._CUDA_CHUNK_LOGITS


def test_the_start_in_numbers() -> None:
    # 6 bytes of each of 128,256 · 8,192; 32,768² in float32 and in float64, 32,768 · 8,192 twice
    # in float32, 32,768 · 1,024 five times in float32 and once in float64.
    sums = 12 * 1_073_741_824 + 8 * 268_435_456 + 28 * 33_554_432
    assert init_bytes(HEAD, LLAMA) == 6 * 1_050_673_152 + sums
    other = SECTION.model_copy(update={"start_from": "head"})
    assert not solves_least_squares(other)
    assert (len(ridge.STRENGTHS), ridge._COMPARED) == (RIDGE_STRENGTHS, RIDGE_COMPARED)


def test_a_block_drafter_has_a_start_too() -> None:
    """Regressors of the first regression are as many; of the second, what attention gives."""
    section = TrainSection.model_validate({"algorithm": "dflash"})
    head, narrow = algorithm(section).size(section, LLAMA), replace(HEAD, intermediate=8_192)
    assert init_bytes(head, LLAMA) == init_bytes(narrow, LLAMA)
    plain = TrainSection.model_validate(
        {"algorithm": "dflash", "dflash": {"init_layers": "random"}}
    )
    assert not solves_least_squares(plain)


@pytest.mark.parametrize("wide", [64, 256], ids=["narrow MLP", "MLP as wide as the regressors"])
def test_a_start_takes_what_is_planned(wide: int) -> None:
    """torch's own account. As many regressors of the MLP take as much as those of the linear part,
    if nothing of that is held any longer."""
    torch.manual_seed(0)
    head, embedding = Eagle3Head(shape(intermediate_size=wide)), torch.randn(50, 64).bfloat16()
    batches = [supervised_batch(32, torch.float32) for _ in range(9)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        solve_least_squares(head, embedding, batches)
    target = replace(KNOWN["smollm2-135m-instruct"], vocabulary=50)
    planned = init_bytes(HeadSize(64, wide, 64, 32, 40), target)
    stored = embedding.numel() * embedding.itemsize
    assert most_held(profiler) + stored == pytest.approx(planned, rel=0.03)


def shape(*, intermediate_size: int = 96, **switches: Any) -> HeadShape:
    return HeadShape(
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
        draft_vocab_size=40,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=512,
        **switches,
    )


def most_held(profiler: Any) -> int:
    """Bytes of all tensors together, at most, beyond those of the beginning."""
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def ttt_model(steps: int, *, tokens: int, dtype: torch.dtype, **switches: Any) -> TttModel:
    head = Eagle3Head(shape())
    head.set_vocabulary(torch.arange(40))
    embedding, output = torch.randn(50, 64), torch.randn(50, 64)
    objective = Objective(steps, 0.8)
    return TttModel(head, embedding, output, objective, max_length=tokens, dtype=dtype, **switches)


def supervised_batch(tokens: int, dtype: torch.dtype) -> TrainBatch:
    """Documents of 32 tokens, supervised from their third one on."""
    flat = torch.arange(tokens)
    labels = flat[flat % 32 >= 2]
    ids, aux = torch.randint(0, 40, (tokens,)), torch.randn(tokens, 192, dtype=dtype)
    teachers = torch.randn(len(labels), 64, dtype=dtype)
    count = tokens // 32
    return TrainBatch(("a",) * count, (32,) * count, ids, aux, labels, labels % 32, teachers)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_are_about_what_a_step_allocates(dropout: float, checkpointing: bool) -> None:
    """torch's own account of a forward and backward pass."""
    torch.manual_seed(0)
    tokens, steps, dtype = 512, 6, torch.float32
    switches = {"checkpointing": checkpointing, "dropout": dropout}
    model = ttt_model(steps, tokens=tokens, dtype=dtype, **switches)
    batch = supervised_batch(tokens, dtype)
    model(batch)  # tables that stay
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(batch).loss.backward()
    peak = most_held(profiler)
    settings = {"activation_checkpointing": checkpointing, "dropout": dropout}
    section = TrainSection.model_validate({"batch_tokens": tokens, "ttt_steps": steps, **settings})
    planned = activation_bytes(section, HeadSize(64, 96, 64, 32, 40), width=4)
    assert 0.75 * peak < planned < 1.5 * peak


@pytest.mark.parametrize("stage", [0, 1])
def test_the_optimiser_holds_what_is_planned(stage: ZeroStage) -> None:
    """DeepSpeed's own masters and moments, in bf16, by one process."""
    section = TrainSection(dtype="bfloat16", zero_stage=stage, batch_tokens=32)
    dtype = torch.bfloat16
    model = ttt_model(2, tokens=32, dtype=dtype)
    trainer = Trainer(model, section, torch.device("cpu"))
    trainer.step([supervised_batch(32, torch.float32)], 1e-3)
    optimizer = trainer._engine.optimizer
    masters = optimizer.single_partition_of_fp32_groups if stage else []
    base = optimizer.optimizer if stage else optimizer
    moments = [
        value for part in base.state.values() for value in part.values() if value.numel() > 1
    ]
    held = sum(part.numel() * part.itemsize for part in [*masters, *moments])
    head = HeadSize(64, 96, 64, 32, 40)
    planned = zero_memory(
        section, head, KNOWN["smollm2-135m-instruct"], stage=stage, ranks=1, bf16=True
    )
    assert planned.optimiser <= held < 1.02 * planned.optimiser, "padding may add to it"

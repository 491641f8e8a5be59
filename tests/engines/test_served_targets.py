"""From prompts to a trained head through a vLLM alone, for tiny random targets of families that
transformers cannot capture here, or that servers run in another arithmetic.

The server answers the prompts and hands out the states; afterwards vLLM drafts with the head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.cli import main
from pipeline.config import TargetSection
from pipeline.errors import DataError
from pipeline.store.manifest import read_manifest
from pipeline.store.verify import verify_run
from pipeline.target.forward import capture_alone, layers_of, register_packed_attention
from pipeline.target.open import Target, open_target
from tests.end_to_end.conftest import config_file
from tests.engines.servers import vllm_server
from tests.engines.test_capture import FAULTS, documents, engine, states_server
from tests.target.families import save_family

#: What vLLM's kernels for CPUs take.
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "initializer_range": 0.1,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 64}
#: Without a choice among experts, which noise of bfloat16 would flip.
_ALL_EXPERTS = {**_EXPERTS, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("float32", _EXPERTS),
    "gpt_oss": ("float32", {"sliding_window": 128}),
    "deepseek_v3": (
        "bfloat16",
        {
            **_ALL_EXPERTS,
            "n_routed_experts": 2,
            "n_group": 1,
            # Of DeepSeek-V3 itself: the only sizes that vLLM's attention on a CPU takes.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "q_lora_rank": 64,
            # Without yarn vLLM 0.32 on a CPU turns positions otherwise than transformers.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "qwen3_next": (
        "bfloat16",
        {
            **_ALL_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    # In FP8, whose products are slow there.
    "llama": (
        "bfloat16",
        {
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 7,
        },
    ),
}


def quantise(directory: Path) -> None:
    """To FP8 as compressed-tensors stores it: a scale for each row, activations as they come."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    largest = torch.finfo(torch.float8_e4m3fn).max
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / largest
        weights[name] = (weight / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale.bfloat16()
    weights = {
        name: each.bfloat16() if each.dtype == torch.float32 else each
        for name, each in weights.items()
    }
    save_file(weights, path, {"format": "pt"})
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (directory / "config.json").write_text(json.dumps(config))


def tiny(
    family: str, directory: Path, tiny_target: Path, *, dtype: str = "float32", **fields: Any
) -> Target:
    """A random target of a family, Llama's in FP8."""
    vocabulary = json.loads((tiny_target / "config.json").read_text())["vocab_size"]
    fields = {**_SIZES, "vocab_size": vocabulary, **fields}
    save_family(family, directory, tiny_target, **fields)
    if family == "llama":
        quantise(directory)
    section = {"source": str(directory), "dtype": dtype, "device": "cpu"}
    return open_target(TargetSection.model_validate(section))


def farthest(captured: Any, right: Any) -> float:
    """Largest relative difference of a token's state, of any layer."""
    pairs = zip(captured, right, strict=True)
    layers = (zip(layers_of(*a), layers_of(*b), strict=True) for a, b in pairs)
    return max(
        float(((a.float() - b.float()).norm(dim=1) / b.float().norm(dim=1)).max())
        for each in layers
        for a, b in each
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_alone_leads_to_a_head(
    family: str, tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype, fields = FAMILIES[family]
    target = tiny(family, tmp_path / family, tiny_target, dtype=dtype, **fields)
    directory, states = target.directory, tmp_path / "states"
    with states_server(target, tmp_path, dtype=dtype) as server:
        endpoints = [f"{server.url}/v1"]
        config = str(
            config_file(
                directory,
                tmp_path,
                target={"source": str(directory), "dtype": dtype, "device": "cpu"},
                features={
                    "shard_tokens": 300,
                    "backend": "vllm",
                    "engine": {"endpoints": endpoints, "directory": str(states)},
                },
            )
        )
        server_answers = f"synth.generator={{backend: vllm, endpoints: {json.dumps(endpoints)}}}"
        few = f"synth.max_prompts={12 if family == 'llama' else 24}"
        settings = ["-c", config, server_answers, few]
        assert main(["synth", *settings]) == 0
        assert main(["features", *settings]) == 0
        texts = [[3 + token % 300 for token in each] for each in documents(8)]
        if family != "llama":
            served = engine(target, server, tmp_path).together(texts)
    said = "".join(capsys.readouterr())
    assert ("its layers are not compared" in said) == (family == "llama")
    if family != "llama":
        right, own = (
            [capture_alone(loaded, ids) for ids in texts]
            for loaded in (
                target.load(dtype=each, attention=register_packed_attention())
                for each in ("float32", "bfloat16")
            )
        )
        ours, theirs = farthest(served, right), farthest(own, right)
        print(f"{family}: {ours:.2g} from transformers' in fp32; its own in bf16 {theirs:.2g}")
        assert ours < (1e-4 if dtype == "float32" else 2 * theirs)
    assert main(["train", *settings]) == 0
    run = tmp_path / "run"
    assert not verify_run(str(run)).problems
    features = read_manifest(str(run), "features")
    with vllm_server(directory, run / "train/head", tmp_path / "log", dtype=dtype) as server:
        once = "eval.server.concurrency=[1]"
        assert main(["eval", *settings, once, "--server", server.url]) == 0
        counters = server.counters()
    accepted = 1 + counters["num_accepted_tokens"] / counters["num_drafts"]
    print(capsys.readouterr().out)
    print(f"{family}: {features.details['replies']}; acceptance length {accepted:.2f}")
    assert accepted > 1.2


def test_ranks_of_a_target_hand_out_whole_states(tmp_path: Path, tiny_target: Path) -> None:
    """Two processes share a target's heads; a fault that leaves one's share out is found."""
    target = tiny("qwen3", tmp_path / "target", tiny_target)
    texts = [[3 + token % 300 for token in each] for each in documents(24)]
    captured = {}
    for ranks in ("1", "2"):
        with states_server(target, tmp_path, "--tensor-parallel-size", ranks) as server:
            source = engine(target, server, tmp_path)
            captured[ranks] = source.together(texts)
            (taken,) = source._take(texts[:1])
        assert taken.facts["tensor_parallel"] == ranks
    largest = farthest(captured["2"], captured["1"])
    print(f"largest relative difference of a token between 1 and 2 ranks: {largest:.2g}")
    assert 0 < largest < 1e-5
    fault = "one rank's share"
    with (
        states_server(target, tmp_path, "--tensor-parallel-size", "2", fault=fault) as server,
        pytest.raises(DataError, match=FAULTS[fault]),
    ):
        engine(target, server, tmp_path).together(texts)

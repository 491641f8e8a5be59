"""Every field of a config.json is honoured or refused by name, of every kind and origin of head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import HeadError
from pipeline.exchange.export import export_head
from pipeline.exchange.imports import import_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import open_head, save_head
from pipeline.records import TargetContract
from pipeline.target.open import Target, open_target
from pipeline.target.rotary import RotaryTable
from tests.heads.conftest import CARD, CONFIG, VD, WEIGHTS, edit, logits_of, rewrite, sequence
from tests.heads.test_chained import chain_for
from tests.heads.test_dflash_import import drafter

#: kind → directories of it: ours, and as another trainer writes it
KINDS = ("own", "sglang", "speculators", "chained", "mtp", "dflash", "dflash-foreign", "dspark")
#: Where the fields of the layer stand, if not at the top.
SECTION = {"speculators": "transformer_layer_config"}
HeadOf = Callable[[str], Path]
LAYERS = "eagle_aux_hidden_state_layer_ids"
MASKED = {"mask_token_id": 4, "target_layer_ids": [1, 3, 5]}


@pytest.fixture
def target(tiny_target: Path) -> Target:
    from pipeline.config import TargetSection

    return open_target(TargetSection(source=str(tiny_target)))


@pytest.fixture
def head_of(own: Path, target: Target, tiny_target: Path, tmp_path: Path) -> HeadOf:
    """A directory of a kind."""

    def head_of(kind: str) -> Path:
        card = HeadCard(target.contract, {}, {})
        if kind in ("chained", "mtp"):
            layers = target.contract.capture_layers[:2]
            contract = target.contract.model_copy(update={"capture_layers": (*layers, 7)})
            save_head(tmp_path / "chained", chain_for(target), HeadCard(contract, {}, {}))
            if kind == "mtp":
                export_head(str(tmp_path / "chained"), format="mtp", out=str(tmp_path / "mtp"))
        elif kind.startswith(("dflash", "dspark")):
            options = {"markov_rank": 4, "confidence": True} if kind == "dspark" else {}
            save_head(tmp_path / kind, drafter(tiny_target, **options), card)
        elif kind in ("sglang", "speculators"):
            format: Any = kind
            export_head(str(own), format=format, out=str(tmp_path / kind))
        if kind in ("sglang", "speculators", "mtp", "dflash-foreign"):
            (tmp_path / kind / CARD).unlink()
        return tmp_path / kind

    return head_of


def opened(kind: str, directory: Path, tiny_target: Path) -> Any:
    """The head, through import where it is another trainer's."""
    if (directory / CARD).is_file():
        return open_head(str(directory))[0]
    out = directory.with_name("imported")
    import_head(str(directory), target=str(tiny_target), out=str(out))
    return open_head(str(out))[0]


def change(directory: Path, kind: str, **fields: Any) -> None:
    name = SECTION.get(kind)
    if name is None:
        edit(directory, **fields)
        return
    body = json.loads((directory / CONFIG).read_text())
    edit(directory, **{name: {**body[name], **fields}})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_opens(kind: str, head_of: HeadOf, tiny_target: Path) -> None:
    assert opened(kind, head_of(kind), tiny_target).shape.draft_vocab_size == VD


#: Fields that change what any head computes.
MATHS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 8},
    "use_sliding_window": {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
    "layer_types": {"layer_types": ["sliding_attention"]},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "logit_scale": {"logit_scale": 0.25},
    "attention_multiplier": {"attention_multiplier": 0.1},
    "query_pre_attn_scalar": {"query_pre_attn_scalar": 256},
    "final_logit_softcapping": {"final_logit_softcapping": 30.0},
    "residual_multiplier": {"residual_multiplier": 0.22},
    "rope_interleave": {"rope_interleave": True},
    "hidden_act": {"hidden_act": "gelu"},
    "mlp_bias": {"mlp_bias": True},
    "num_experts": {"num_experts": 4},
    "use_cla": {"use_cla": True},
    "norm_type": {"norm_type": "layernorm"},
    "pretraining_tp": {"pretraining_tp": 2},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "position_embedding_type": {"position_embedding_type": "alibi"},
    "something_new": {"something_new": True},
    "another_section": {"another_section": {"scale": 2}},
    "rope_theta": {"rope_theta": "10000"},
    "rope_scaling.factor": {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
    "rms_norm_eps": {"rms_norm_eps": "1e-5"},
    "hidden_size": {"hidden_size": 0},
    "num_attention_heads": {"num_attention_heads": "4"},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "vocab_size": {"vocab_size": -1},
    "intermediate_size": {"intermediate_size": 40.0},
    "head_dim": {"head_dim": 7},
    "max_position_embeddings": {"max_position_embeddings": None},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MATHS)
def test_what_changes_the_maths_is_refused_by_name(
    kind: str, name: str, head_of: HeadOf, tiny_target: Path
) -> None:
    directory = head_of(kind)
    fields = MATHS[name]
    if name in ("sliding_window", "use_sliding_window"):
        fields = {"layer_types": None, "use_sliding_window": None, **fields}
    if name == "rope_scaling.factor":
        fields = {"rope_parameters": None, "rope_theta": 700.0, **fields}
    change(directory, kind, **fields)
    with pytest.raises(HeadError, match=rf"config\.json: .*{name.replace('.', '[.]')}") as refused:
        opened(kind, directory, tiny_target)
    assert refused.value.fix


NO_OPS: tuple[dict[str, Any], ...] = (
    {"sliding_window": None},
    {"sliding_window": 8, "use_sliding_window": False},
    {"sliding_window": None, "use_sliding_window": True},
    {"sliding_window": 10**6},
    {"partial_rotary_factor": 1.0},
    {"logit_scale": 1.0},
    {"attention_multiplier": 8**-0.5, "query_pre_attn_scalar": 8},
    {"hidden_act": "swish"},
    {"quantization_config": None},
    {"final_logit_softcapping": None, "something_new": None},
    {"attention_dropout": 0.1, "initializer_range": 0.02, "use_cache": True, "pretraining_tp": 1},
    {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "max_window_layers": 28},
    {"use_mrope": False, "use_cla": False, "cla_share_factor": 2, "router_aux_loss_coef": 0.001},
    {"norm_type": "rms", "use_rotary_pos_emb": True, "attention_head_dim": 8, "eod_token_id": 5},
    {"_name_or_path": "a/b", "auto_map": {"AutoModel": "x.Y"}, "transformers_version": "4.51.0"},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", NO_OPS, ids=str)
def test_what_changes_nothing_passes(
    kind: str, fields: dict[str, Any], head_of: HeadOf, tiny_target: Path
) -> None:
    directory = head_of(kind)
    before = opened(kind, directory, tiny_target).shape
    change(directory, kind, **fields)
    if (imported := directory.with_name("imported")).exists():
        imported.rename(directory.with_name("before"))
    assert opened(kind, directory, tiny_target).shape == before


@pytest.mark.parametrize("kind", ["own", "sglang", "speculators", "dflash", "dspark"])
def test_a_draft_vocabulary_is_not_tied_to_the_embedding(
    kind: str, head_of: HeadOf, tiny_target: Path
) -> None:
    """Whatever the field says, which AngelSlim copies from the target."""
    directory = head_of(kind)
    edit(directory, tie_word_embeddings=True)
    change(directory, kind, tie_word_embeddings=True)
    rows = load_file(directory / WEIGHTS)["lm_head.weight"]
    assert torch.equal(opened(kind, directory, tiny_target).lm_head.weight, rows.float())


#: Of one kind: the section that the fields stand in, if not the top; fields; what is refused.
REFUSED: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "own": [
        ("", {"fc_norm": "yes"}, "fc_norm is 'yes'"),
        ("", {"norm_output": 1}, "norm_output is 1"),
        ("", {"draft_window": -64}, "draft_window is -64"),
        ("", {"architectures": "LlamaForCausalLMEagle3"}, "architectures is 'Llama"),
        ("", {"architectures": ["PEagleDraftModel"]}, "architectures is ..PEagle"),
        ("", {LAYERS: [3, 4, 5], "eagle_config": None}, "capture_l"),
        ("", {"hidden_size": 2**40}, "hidden_size is"),
        ("", {"draft_vocab_size": 10**6}, "draft_vocab_size 1000000 is larger"),
        ("eagle_config", {"use_last_layernorm": False}, "use_last_layernorm is False"),
    ],
    "sglang": [
        ("", {"fc_norm": True, "use_aux_norm": False}, "contradicts use_aux_norm"),
        ("", {"head_dim": None, "num_attention_heads": 5}, "5 does not divide hidden_size"),
        ("", {"target_vocab_size": 7}, "target_vocab_size is 7"),
        ("", {"transformers_weights": "other.safetensors"}, "transformers_weights is"),
        ("", {"num_hidden_layers": 2}, r"has no tensor layers\.1\."),
        ("", {"attention_bias": True}, r"has no tensor midlayer\.self_attn\.k_proj\.bias"),
        ("", {"target_hidden_size": 64}, r"has no tensor embed_tokens\.weight"),
        ("", {"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ("", {"hidden_size": None}, "lacks hidden_size"),
        ("", {"rms_norm_eps": None}, "lacks rms_norm_eps"),
        ("", {"intermediate_size": 41}, r"gate_proj\.weight is \[40, 32\] where config\.json asks"),
        ("", {LAYERS: [1, 3, 4]}, "name different layers"),
        ("", {"eagle_config": {LAYERS: [1, 3]}}, "name different layers"),
        ("", {"rope_theta": 1e4}, r"rope_theta 10000\.0 contradicts rope_parameters\.rope_theta 7"),
        (
            "",
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": ...},
            "is no EAGLE-3 head",
        ),
        ("eagle_config", {"norm_before_fc": True}, r"has no tensor input_norm\.weight"),
        (
            "eagle_config",
            {"use_aux_hidden_state": False},
            r"eagle_config\.use_aux_hidden_state is F",
        ),
        ("eagle_config", {"use_mtp_layernorm": True}, "use_mtp_layernorm is True"),
        ("eagle_config", {"use_input_layernorm_in_first_layer": False}, "in_first_layer is False"),
        ("eagle_config", {"parallel_draft_step": 4}, "parallel_draft_step is 4"),
        ("eagle_config", {"something_new": 1}, r"eagle_config\.something_new is 1"),
        ("eagle_config", {"aux_layer_convention": "x"}, "aux_layer_convention is 'x'"),
    ],
    "speculators": [
        ("", {"target_vocab_size": 7}, "target_vocab_size is 7"),
        ("", {"norm_output": "no"}, "norm_output is 'no'"),
        ("", {"speculators_model_type": "dflash2"}, "speculators_model_type is 'dflash2'"),
        ("", {"norm_before_residual": None}, "vLLM takes that for true"),
        ("", {"norm_before_fc": True}, r"has no tensor input_norm\.weight"),
        ("", {"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ("", {LAYERS: [0, 4, 5]}, "no ascending layers"),
        ("", {LAYERS: [2, 4, 9]}, "reach output index 8, the target has 8 layers"),
        ("", {"draft_vocab_size": 90}, r"d2t is \[96\] where config\.json asks for \[90\]"),
        ("speculators_config", {"algorithm": "eagle"}, "algorithm is 'eagle'"),
        ("speculators_config", {"new": 1}, r"speculators_config\.new is 1"),
    ],
    "chained": [
        ("", {"chain_input": "both"}, "chain_input is 'both'"),
        ("", {"attention_bias": 0}, "attention_bias is 0"),
        ("", {"heads": 10**9}, "heads is 1000000000"),
        ("", {"heads": 2}, r"no place for: mtp_layers\.2"),
        ("", {"heads": 0}, "heads is 0"),
    ],
    "mtp": [
        ("", {"architectures": ["DeepseekV3ForCausalLM"]}, "MTP layers of DeepseekV3ForCausalLM"),
        ("", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ("", {"num_nextn_predict_layers": 2}, "has a tensor that this head has no place for"),
        ("", {"num_nextn_predict_layers": 4}, "has no tensor mtp_layers.3"),
        ("", {"intermediate_size": 41}, "where config.json asks for"),
        ("", {"vocab_size": 97}, "where config.json asks for"),
        ("", {"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ],
    "dflash": [
        ("", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (
            "",
            {"tie_word_embeddings": True, "draft_vocab_size": None},
            "tie_word_embeddings is True",
        ),
        (
            "",
            {"mask_token_id": 10**6, "dflash_config": {}},
            "mask_token_id is 1000000, it can be 0",
        ),
        ("dflash_config", {"causal": "yes"}, "causal is 'yes'"),
        ("dflash_config", {"target_lm_head": True}, f"draft_vocab_size is {VD}"),
    ],
    "dflash-foreign": [
        ("dflash_config", {"projector_type": "dspark"}, "projector_type is 'ds"),
        ("dflash_config", {"block_size": 5}, "contradicts block_size 6"),
        ("dflash_config", {"target_layer_ids": [1, 2, 3, 4, 5]}, r"fc\.weight is \[32, 96\] where"),
        ("dflash_config", {"target_layer_ids": None}, r"lacks dflash_config\.target_layer_ids"),
        (
            "dflash_config",
            {"target_layer_ids": [1, 2, 80]},
            "reach output index 80, the target has",
        ),
        ("dflash_config", {"mask_token_id": None}, "lacks mask_token_id"),
        ("", {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention"),
        ("", {"attention_bias": True}, r"has no tensor layers\.0\.self_attn\.k_proj\.bias"),
        ("", {"num_hidden_layers": 3}, r"has no tensor layers\.2\."),
        ("", {"num_hidden_layers": 1}, r"no place for: layers\.1\."),
        ("", {"block_size": 64, "dflash_config": MASKED}, "block_size is 64, it can be 2 … 16"),
        ("", {"block_size": 1, "dflash_config": MASKED}, "block_size is 1, it can be 2 … 16"),
    ],
    "dspark": [
        ("", {"markov_rank": 5}, "markov_rank 4 contradicts markov_rank 5"),
        ("", {"markov_rank": 5, "dflash_config": {}}, r"markov_w1\.weight is \[316, 4\] where"),
        ("", {"markov_rank": None, "dflash_config": {}}, "lacks markov_rank"),
        ("", {"markov_rank": 0, "dflash_config": {}}, "markov_rank is 0"),
        ("", {"markov_rank": True, "dflash_config": {}}, "markov_rank is True"),
        ("", {"markov_rank": 10**9, "dflash_config": {}}, "markov_rank is 1000000000"),
        ("", {"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ("", {"confidence_head_with_markov": False}, "confidence_head_with_markov is False"),
        (
            "",
            {"enable_confidence_head": False, "dflash_config": {}},
            "no place for: confidence",
        ),
        ("", {"sample_from_anchor": "yes", "dflash_config": {}}, "sample_from_anchor is 'yes'"),
        ("dflash_config", {"projector_type": "domino"}, "projector_type is 'domino'"),
        ("", {"architectures": ["DFlashDraftModel"]}, "markov_rank is 4"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "section", "fields", "message"),
    [(kind, *row) for kind, rows in REFUSED.items() for row in rows],
    ids=str,
)
def test_fields_of_a_kind_are_refused_by_name(
    kind: str,
    section: str,
    fields: dict[str, Any],
    message: str,
    head_of: HeadOf,
    tiny_target: Path,
) -> None:
    directory = head_of(kind)
    if section:
        fields = {section: json.loads((directory / CONFIG).read_text())[section] | fields}
    edit(directory, **fields)
    with pytest.raises(HeadError, match=message) as refused:
        opened(kind, directory, tiny_target)
    assert str(directory) in str(refused.value) and refused.value.fix
    assert not directory.with_name("imported").exists()


@pytest.mark.parametrize("kind", ["own", "speculators", "dflash"])
def test_sections_are_objects(kind: str, head_of: HeadOf, tiny_target: Path) -> None:
    directory = head_of(kind)
    section = {"own": "eagle_config", "dflash": "dflash_config"}.get(kind, "speculators_config")
    edit(directory, **{section: "no object"})
    with pytest.raises(HeadError, match=f"{section} is 'no object'"):
        opened(kind, directory, tiny_target)


_YARN = {
    **{"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707},
}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
#: What is published, in tiny sizes: kind of its tensors, config.json, base of its rotary positions
PUBLISHED: dict[str, Any] = json.loads((Path(__file__).with_name("published.json")).read_text())


def test_mtp_layers_of_another_vocabulary_are_refused(head_of: HeadOf, tiny_target: Path) -> None:
    directory = head_of("mtp")
    rewrite(directory, lambda tensors: [tensors.pop(each) for each in ("d2t", "t2d")])
    edit(directory, vocab_size=320, draft_vocab_size=320)
    with pytest.raises(HeadError, match="vocab_size is 320, the target's 316"):
        opened("mtp", directory, tiny_target)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_others_publish_is_imported(name: str, head_of: HeadOf, tiny_target: Path) -> None:
    kind, body = PUBLISHED[name]["kind"], PUBLISHED[name]["config"]
    directory = head_of(kind.replace("authors", "foreign"))
    absent = {"dflash-authors": ("lm_head.weight", "d2t", "t2d"), "mtp": ("d2t", "t2d")}
    rewrite(directory, lambda tensors: [tensors.pop(each) for each in absent.get(kind, ())])
    (directory / CONFIG).write_text(json.dumps(body))
    shape = opened(kind, directory, tiny_target).shape
    assert shape.rope_parameters["rope_theta"] == PUBLISHED[name]["rope_theta"]
    sized = body.get("transformer_layer_config", body)
    assert shape.max_position_embeddings == sized["max_position_embeddings"]
    assert shape.rms_norm_eps == sized["rms_norm_eps"] and shape.head_dim == 8


ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
    {"rope_scaling": _YARN},
    {"rope_scaling": {**_YARN, "attention_factor": 1.25, "truncate": False}},
    {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        }
    },
)


@pytest.mark.parametrize("fields", ROPES, ids=str)
def test_rotary_tables_are_those_of_transformers(
    fields: dict[str, Any], head_of: HeadOf, tiny_target: Path
) -> None:
    """Of the head, and of the frequencies that transformers computes from the same file."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    directory = head_of("sglang")
    absent = {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...}
    edit(directory, **{**absent, **fields})
    head = opened("sglang", directory, tiny_target)
    theirs: Any = LlamaConfig.from_pretrained(directory)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, theirs.head_dim, 2).float() / theirs.head_dim
        frequencies, scale = 1.0 / theirs.rope_parameters["rope_theta"] ** exponents, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    angles = torch.arange(50)[:, None].float() * frequencies
    table = RotaryTable(
        head.shape.rope_config(), 50, device=torch.device("cpu"), dtype=torch.float32
    )
    wanted = torch.cat((angles, angles), dim=-1).cos() * scale
    assert torch.allclose(table.cos, wanted, atol=1e-6)


def test_su_is_longrope_and_its_length_may_stand_beside_it(
    head_of: HeadOf, tiny_target: Path
) -> None:
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    directory = head_of("sglang")
    edit(
        directory,
        rope_parameters=...,
        rope_theta=700.0,
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=64,
    )
    rope = opened("sglang", directory, tiny_target).shape.rope_parameters
    wanted = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 700.0}
    assert rope == {**wanted, **factors}


@torch.no_grad()
def test_mrope_is_the_default_for_text(
    head_of: HeadOf, head: Eagle3Head, embedding: Tensor, tiny_target: Path
) -> None:
    directory = head_of("sglang")
    scaling = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}
    edit(directory, rope_parameters=..., rope_scaling=scaling)
    back = opened("sglang", directory, tiny_target)
    inputs = sequence(head.shape)
    ours, theirs = (logits_of(each, embedding, *inputs, steps=2) for each in (back, head))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling has factor and no rope_type"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type is 'ntk', which is not"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor, which rope_type linear needs"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": None}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "lacks original_max_position_emb"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_"),
        ({"rope_scaling": {**_LLAMA3, "factor": 0.5}}, "factor is 0.5, not a number of at least 1"),
        ({"rope_scaling": {**_LLAMA3, "factor": True}}, "factor is True"),
        ({"rope_scaling": {**_LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor 4.0 is not abov"),
        ({"rope_scaling": {**_YARN, "beta_slow": 64}}, "beta_fast 32.0 is not above"),
        ({"rope_scaling": {**_YARN, "truncate": 1}}, "truncate is 1, not true or false"),
        ({"rope_scaling": {**_YARN, "extrapolation": 1}}, "rope_type yarn has no such parameter"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "default has no such paramet"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "lacks long_factor"),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
                "original_max_position_embeddings": 64,
            },
            "short_factor has 1 numbers, a head of 8 needs 4",
        ),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "contradicts rope_scaling.typ"),
        ({"rope_scaling": {"type": "mrope", "partial_rotary_factor": 0.5}}, "partial_rotary_fact"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not a mapping"),
        (
            {"rope_scaling": _LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "contradicts rope_parameters",
        ),
        (
            {"rope_scaling": _LLAMA3, "rope_parameters": {**_LLAMA3, "factor": 4.0}},
            "contradicts rope_parameters",
        ),
        ({"rope_scaling": _LLAMA3, "original_max_position_embeddings": 64}, "contradicts original"),
        ({"rope_theta": 0}, "rope_theta is 0, not a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta: nan is not a finite number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS[:6])
def test_rotary_parameters_that_cannot_be_are_refused(
    kind: str, fields: dict[str, Any], message: str, head_of: HeadOf, tiny_target: Path
) -> None:
    directory = head_of(kind)
    change(directory, kind, **{"rope_parameters": None, "rope_scaling": None, **fields})
    with pytest.raises(HeadError, match=message):
        opened(kind, directory, tiny_target)


def test_a_contract_and_a_config_are_of_one_target(own: Path, contract: TargetContract) -> None:
    card = json.loads((own / CARD).read_text())
    card["contract"]["hidden_size"] = 64
    (own / CARD).write_text(json.dumps(card))
    with pytest.raises(HeadError, match=r"hidden_size is 32, in eagle3\.json 64"):
        open_head(str(own))


def test_a_target_s_rope_becomes_a_head_s() -> None:
    """Training writes nothing that opening refuses."""
    from pipeline.heads.rope import rope_of_target, rope_parameters

    given = {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [1, 2], "llama_4_beta": 0.1}
    assert rope_of_target(given) == {"rope_type": "default", "rope_theta": 1e6}
    for scaling in (_YARN, _LLAMA3):
        of_target = rope_of_target({**scaling, "rope_theta": 1e4, "partial_rotary_factor": 0.5})
        assert rope_parameters({"rope_parameters": of_target}, "here") == of_target


def test_the_weights_are_the_file_that_transformers_loads(
    head_of: HeadOf, head: Eagle3Head, tiny_target: Path
) -> None:
    """Beside it: an average, an optimizer's copy, another format's file, an older save's index."""
    directory = head_of("sglang")
    zeros = {"fc.weight": torch.zeros_like(head.fc.weight)}
    for name in ("zz-old", "model_ema", "optimizer", "consolidated", "adapter_model", "a"):
        save_file(zeros, directory / f"{name}.safetensors")
    listed = {"metadata": {}, "weight_map": {"fc.weight": "zz-old.safetensors"}}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(listed))
    assert torch.equal(opened("sglang", directory, tiny_target).fc.weight, head.fc.weight)


def test_shards_are_read_by_their_index(
    head_of: HeadOf, head: Eagle3Head, tiny_target: Path
) -> None:
    directory = head_of("sglang")
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    parts = {"1.safetensors": sorted(tensors)[::2], "2.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, directory / file)
    save_file({"fc.weight": torch.zeros(1)}, directory / "3.safetensors")
    weight_map = {name: file for file, names in parts.items() for name in names}
    index = directory / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(opened("sglang", directory, tiny_target).fc.weight, head.fc.weight)
    (directory / "2.safetensors").unlink()
    with pytest.raises(HeadError, match=r"2\.safetensors is missing"):
        opened("sglang", directory, tiny_target)

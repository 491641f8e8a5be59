"""The decoder's forward against Hugging Face, for every supported family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from pipeline.decoder.batch import TokenRows
from pipeline.decoder.model import DecoderModel, check_supported
from pipeline.errors import UnsupportedModel
from tests.decoder.conftest import CAPTURE, FAMILIES, open_rows, poisoned_planes, random_tokens

CPU = torch.device("cpu")


@torch.no_grad()
def _both(
    directory: Path, chunks: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Decoder's (logits, aux, final) over a prompt in chunks, and HF's (hidden states, logits)."""
    ids = random_tokens(sum(chunks), seed=1)
    model = DecoderModel.load(directory, CAPTURE, device=CPU, dtype=torch.float32, max_length=128)
    planes, batch = poisoned_planes(model, 3), open_rows(model, 1, pages=2)
    outputs = []
    for chunk in torch.split(ids, chunks):
        metadata = batch.metadata(model.ops, model.rotary, TokenRows.even(1, len(chunk), CPU))
        outputs.append(model.forward(chunk, metadata, planes.target))
        batch.seq_lens.add_(len(chunk))
    reference = AutoModelForCausalLM.from_pretrained(directory)(
        ids[None], output_hidden_states=True
    )
    final = torch.cat([output.final for output in outputs])
    return (
        model.logits(final),
        torch.cat([output.aux for output in outputs]),
        final,
        reference.hidden_states,
        reference.logits,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[37], [70, 16, 1]])
def test_logits_equal_hugging_face(
    make_target: Callable[[str], Path], family: str, chunks: list[int]
) -> None:
    logits, _, _, _, expected = _both(make_target(family), chunks)
    scale = expected.abs().max()
    assert (logits - expected).abs().max() <= 2e-5 * max(1.0, float(scale))


def test_captured_states_are_the_outputs_of_the_named_layers(
    make_target: Callable[[str], Path],
) -> None:
    _, aux, final, hidden, _ = _both(make_target("llama"), [37])
    # hidden[0] is the embedding, hidden[i + 1] the output of layer i, and the last one is normed.
    expected = torch.cat([hidden[layer + 1] for layer in CAPTURE], -1)[0]
    # Sums of other orders; states are as large as a hundred.
    torch.testing.assert_close(aux, expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(final, hidden[-1][0], atol=1e-3, rtol=1e-4)
    off_by_one = torch.cat([hidden[layer] for layer in CAPTURE], -1)
    assert (aux - off_by_one).abs().max() > 0.1, (
        "a planted off-by-one in the capture layer must be seen"
    )


def test_other_architectures_are_refused_with_the_list_of_supported_ones(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10)).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModel, match=r"'gpt2'.*llama, mistral, qwen2, qwen3"):
        DecoderModel.load(tmp_path, CAPTURE, device=CPU, dtype=torch.float32, max_length=8)


def test_a_sliding_window_is_refused_only_beyond_its_length(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        sliding_window=16,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    DecoderModel.load(tmp_path, (0,), device=CPU, dtype=torch.float32, max_length=16)
    with pytest.raises(UnsupportedModel, match="sliding window of 16"):
        DecoderModel.load(tmp_path, (0,), device=CPU, dtype=torch.float32, max_length=17)


def test_two_sets_of_rotary_frequencies_are_refused_beyond_the_first(
    make_target: Callable[[str], Path],
) -> None:
    config = AutoConfig.from_pretrained(make_target("llama"))
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        **factors,
    }
    check_supported(config, 64, where="x")
    with pytest.raises(UnsupportedModel, match="64 tokens"):
        check_supported(config, 65, where="x")

"""What is read of the GGUF file is what it holds, and what transformers computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.target.forward import capture_states, register_packed_attention
from pipeline.target.open import Target


def test_every_matrix_and_norm_is_the_file_s(gguf: Path, target: Target) -> None:
    """The gguf package's own dequantisation is the referee; it stores norms as their factor."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}

    def stored(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

    weights = target.weights
    assert torch.equal(weights.embedding(), stored("token_embd.weight").bfloat16())
    assert torch.equal(weights.lm_head(), weights.embedding())
    torch.testing.assert_close(
        weights.final_norm(), stored("output_norm.weight"), atol=0.0, rtol=2.0**-8
    )
    last = weights.layer(17)
    for ours, theirs in (
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.down_proj", "ffn_down"),
    ):
        assert torch.equal(
            last[f"{ours}.weight"].bfloat16(), stored(f"blk.17.{theirs}.weight").bfloat16()
        )
    norm = stored("blk.17.attn_q_norm.weight")
    torch.testing.assert_close(
        last["self_attn.q_norm.weight"].float(), norm, atol=2.0**-8, rtol=2.0**-8
    )


def test_every_token_is_at_its_place(gguf: Path, target: Target) -> None:
    """Also those of spaces and line breaks, which the file spells in another way."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target.directory)
    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 262_144 == target.contract.vocab_size
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    assert [name.replace("▁", " ") for name in names] == [t.replace("▁", " ") for t in tokens]
    code = "def f():\n        return  1\n\n\n    # <b>x</b>"
    ids = tokenizer(code, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == code
    assert {tokens[at] for at in ids} >= {"        ", "  ", "\n\n\n", "    ", "<b>", "</b>"}


@torch.no_grad()
def test_packed_states_are_transformers(target: Target) -> None:
    """One document is longer than the window of the sliding layers, 512 tokens."""
    ids = torch.arange(620) * 37 % 200_000 + 300
    documents = [[2, *ids.tolist()], target.template().start("Why?")]
    model = target.load(dtype="float32", attention=register_packed_attention())
    captured = capture_states(model, documents)
    reference = target.load(dtype="float32").model
    for document, (aux, final) in zip(documents, captured, strict=True):
        output = reference(torch.tensor([document]), output_hidden_states=True)
        layers = target.contract.capture_layers
        expected = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], -1)
        scale = float(expected.abs().max())  # the residual stream holds values of 100,000
        assert (aux - expected).abs().max() <= 1e-5 * scale
        logits = final.float() @ target.weights.lm_head().float().T
        torch.testing.assert_close(logits, output.logits[0], atol=2e-2, rtol=1e-3)

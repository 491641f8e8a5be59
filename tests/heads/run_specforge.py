"""Run by an interpreter that has `specforge` (and not this package).

    python run_specforge.py DIRECTORY INPUTS OUT STEPS

DIRECTORY  a head as SpecForge writes it, opened with its own class
INPUTS     token_ids [T], aux_states [T, 3H], embedding [V, H]
OUT        receives step_0, … [T-1, Vd]
"""

from __future__ import annotations

import sys


def main(directory: str, inputs: str, out: str, steps: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from specforge.modeling.draft.llama3_eagle import (  # type: ignore[import-not-found]
        LlamaForCausalLMEagle3,
    )
    from transformers import LlamaConfig

    torch.set_num_threads(1)
    given = load_file(inputs)
    config = LlamaConfig.from_pretrained(directory)
    if getattr(config, "draft_vocab_size", None) is None:
        config.draft_vocab_size = config.vocab_size
    head = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
    tensors = {**load_file(f"{directory}/model.safetensors")}
    tensors["embed_tokens.weight"] = given["embedding"]
    missing, surplus = head.load_state_dict(tensors, strict=False)
    assert not surplus and set(missing) <= {"d2t", "t2d"}, (missing, surplus)
    tokens, length = given["token_ids"][None, 1:], len(given["token_ids"]) - 1
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    places, logits = torch.arange(length)[None], {}
    if "mrope_section" in (config.rope_scaling or {}):  # of text, three equal positions
        places = places.expand(3, 1, length)
    cache: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        hidden = head.project_hidden_states(given["aux_states"][None, :-1])
        for step in range(int(steps)):
            hidden = head.backbone(
                input_embeds=head.embed_input_ids(tokens),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=places,
            )
            logits[f"step_{step}"] = head.compute_logits(hidden)[0].contiguous()
            # Its trainer shifts the tokens; the last position has none then.
            tokens = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), 1)
    save_file(logits, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

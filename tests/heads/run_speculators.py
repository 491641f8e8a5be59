"""Run by an interpreter that has `speculators` (and not this package).

    python run_speculators.py EXPORTED OWN TARGET INPUTS FOLDER STEPS      an EAGLE-3 head
    python run_speculators.py EXPORTED OWN TARGET INPUTS FOLDER anchors    a block drafter

EXPORTED   our export in their dialect: loaded with their class, run, and written to FOLDER/resaved
OWN        our head directory, in SGLang's dialect: written to FOLDER/converted by their converter
INPUTS     token_ids [T] and aux_states [T, 3H]; of a block drafter also anchors [T], 1 or 0
FOLDER     logits.safetensors receives step_0, … [T-1, Vd]; of a block drafter blocks [A, b, Vd], of
           DSpark also the confidence's log-odds [A, b]

The last line of the output is JSON about what was loaded.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version


def main(exported: str, own: str, target: str, inputs: str, folder: str, steps: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter  # type: ignore[import-not-found]
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    config = Eagle3SpeculatorConfig.from_pretrained(exported)
    config.speculators_config.verifier.name_or_path = target  # a path is not exported
    # The default, flex attention, wants a GPU.
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(exported, config=config, dtype=torch.float32).eval()
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    given = load_file(inputs)
    with torch.no_grad():
        # Their position i pairs token i + 1 with the states of token i, as ours does.
        model(
            hidden_states=given["aux_states"][None, :-1],
            input_ids=given["token_ids"][None, 1:],
            document_ids=torch.zeros(1, len(given["token_ids"]) - 1, dtype=torch.long),
            ttt_steps=int(steps),
        )
    steps_logits = {f"step_{step}": tensor.contiguous() for step, tensor in enumerate(logits)}
    save_file(steps_logits, f"{folder}/logits.safetensors")
    model.to(torch.bfloat16).save_pretrained(f"{folder}/resaved")
    layers = model.config.transformer_layer_config.num_hidden_layers
    if layers == 1 and len(model.config.eagle_aux_hidden_state_layer_ids) == 3:  # what it converts
        Eagle3Converter().convert(own, f"{folder}/converted", target, validate=False)
    shipped = load_file(f"{exported}/model.safetensors").keys()
    facts = {
        "version": version("speculators"),
        "rope_theta": model.config.transformer_layer_config.rope_parameters["rope_theta"],
        "layers": model.config.eagle_aux_hidden_state_layer_ids,
        "missing": sorted(model.state_dict().keys() - shipped),
        "surplus": sorted(shipped - model.state_dict().keys()),
    }
    print(json.dumps(facts))


def blocks(exported: str, _own: str, target: str, inputs: str, folder: str, _: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # type: ignore[import-not-found]
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    with open(f"{exported}/config.json", encoding="utf-8") as file:
        biased = json.load(file)["speculators_model_type"] == "dspark"
    kind = DSparkDraftModel if biased else DFlashDraftModel
    config = (DSparkSpeculatorConfig if biased else DFlashSpeculatorConfig).from_pretrained(
        exported
    )
    config.speculators_config.verifier.name_or_path = target  # a path is not exported
    config.transformer_layer_config._attn_implementation = "eager"
    model = kind.from_pretrained(exported, config=config, dtype=torch.float32).eval()
    outputs: dict[str, torch.Tensor] = {}
    parts = {"logits": model.lm_head}
    if biased:
        parts |= {"bias": model.markov_head.markov_w2, "confidence": model.confidence_head}
    for name, part in parts.items():
        part.register_forward_hook(lambda *args, name=name: outputs.update({name: args[2]}))
    losses = {"loss_config": resolve_loss_config("kl_div", "eager")}  # the default wants a GPU
    if biased:
        losses["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    given = load_file(inputs)
    anchors, states = given["anchors"][None], given["aux_states"][None]
    count, hidden = int(anchors.sum()), model.hidden_size
    with torch.no_grad():
        model(
            hidden_states=states,
            input_ids=given["token_ids"][None],
            loss_mask=anchors,
            verifier_last_hidden_states=states[..., :hidden],
            document_ids=torch.zeros_like(anchors),
            max_anchors=count,
            **losses,
        )
    shape = count, model.block_size
    computed = {"blocks": outputs["logits"].view(*shape, -1)}
    if biased:
        computed["blocks"] = computed["blocks"] + outputs["bias"].view(*shape, -1)
        computed["confidence"] = outputs["confidence"].view(shape)
    saved = {name: each.contiguous() for name, each in computed.items()}
    save_file(saved, f"{folder}/logits.safetensors")
    model.to(torch.bfloat16).save_pretrained(f"{folder}/resaved")
    shipped = load_file(f"{exported}/model.safetensors").keys()
    facts = {
        "version": version("speculators"),
        "layers": model.config.aux_hidden_state_layer_ids,
        "missing": sorted(model.state_dict().keys() - shipped),
        "surplus": sorted(shipped - model.state_dict().keys()),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    (blocks if sys.argv[-1] == "anchors" else main)(*sys.argv[1:])

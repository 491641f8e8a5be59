"""The EAGLE-3 head (arXiv:2503.01840): one layer, unrolled on its own outputs.

shape.py        the module
init.py         its first weights: copied from the target, and solved by least squares
ttt.py          training-time test, the objective
drafter.py      the dynamic tree that it drafts
checkpoint.py   directories, ours and other trainers'; sglang.py, speculators.py and gguf.py are
                the formats
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.config import TrainSection
from pipeline.heads.algorithm import HeadAlgorithm, HeadSettings, ServeCommand
from pipeline.planning.heads import HeadSize

if TYPE_CHECKING:
    from pipeline.heads.eagle3.shape import HeadShape

#: Keys of `train.head_config` that decide tensors.
FIXED = (
    *("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("fc_norm", "norm_output", "heads", "chain_input"),
)


def _settings(section: TrainSection) -> HeadSettings:
    head, fixed = section.head_config, {key: key for key in FIXED}
    solved = head.init_layer == "least_squares"
    return HeadSettings(head, "train.head_config", fixed, head.max_share_of_target, solved)


def _serve_command(
    shape: HeadShape, format: str, target: str, tree: tuple[int, int, int], tokens: int
) -> ServeCommand:
    if format == "sglang":
        steps, top_k, nodes = tree
        command = (
            f"sglang serve --model-path {target} \\\n"
            "    --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD \\\n"
            f"    --speculative-num-steps {steps} --speculative-eagle-topk {top_k} "
            f"--speculative-num-draft-tokens {nodes}"
        )
        if shape.draft_window:
            command += f" \\\n    --speculative-draft-window-size {shape.draft_window}"
        tried = "SGLang 0.5.23 on a CPU, with plain torch for its compiled operations, 2026-11-26"
        return ServeCommand(command, 0, "For vLLM, export with `--format speculators`.", tried)
    if format == "gguf":
        command = (
            "llama-server -m TARGET.gguf -md HEAD/eagle3-BF16.gguf --spec-type draft-eagle3 \\\n"
            f"    --spec-draft-n-max {tokens} --no-spec-draft-backend-sampling"
        )
        other = "TARGET.gguf is the target as GGUF. For SGLang, export with `--format sglang`."
        return ServeCommand(command, tokens, other)
    draft = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": tokens}
    command = f"vllm serve {target} --speculative-config '{json.dumps(draft)}'"
    return ServeCommand(command, tokens, "For SGLang, export with `--format sglang`.")


def _unread(head: Any, format: str) -> list[str]:
    from pipeline.heads.eagle3.sglang import unknown_to_sglang

    if format == "sglang":
        return unknown_to_sglang(head.shape)
    if format == "gguf":
        return _not_written(head.shape)
    both = head.shape.norm_before_fc and head.shape.fc_norm  # speculators has one or the other
    return ["norm_before_fc beside fc_norm"] if both else []


def _not_written(shape: Any) -> list[str]:
    """What the GGUF file has no place for, or a place that was not tried; gguf.py has the rest."""
    names = ("norm_before_fc", "norm_before_residual", "attention_bias", "qk_norm")
    fields = [each for each in (*names, "sliding_window", "own_embedding") if getattr(shape, each)]
    fields += ["num_hidden_layers"] * (shape.num_hidden_layers > 1)
    return [*fields, *["an fc of other than three aux states"] * (shape.aux_layers != 3)]


ALGORITHM = HeadAlgorithm(
    name="eagle3",
    architecture="LlamaForCausalLMEagle3",
    package=__name__,
    objective="ttt",
    settings=_settings,
    size=HeadSize.of,
    describe=lambda _head: "an EAGLE-3 draft head",
    is_unrolled=True,
    formats=("sglang", "speculators", "gguf"),
    refusals={
        "mtp": "MTP layers join token and hidden state before the layer, this head inside it"
    },
    unread=_unread,
    serve_command=_serve_command,
)

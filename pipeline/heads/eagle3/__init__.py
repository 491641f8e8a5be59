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

from pipeline.config import TrainSection
from pipeline.heads.algorithm import HeadAlgorithm, HeadSettings, ServeCommand
from pipeline.planning.heads import HeadSize

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
    format: str, target: str, tree: tuple[int, int, int], tokens: int
) -> ServeCommand:
    if format == "sglang":
        steps, top_k, nodes = tree
        command = (
            f"python -m sglang.launch_server --model-path {target} \\\n"
            "    --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD \\\n"
            f"    --speculative-num-steps {steps} --speculative-eagle-topk {top_k} "
            f"--speculative-num-draft-tokens {nodes}"
        )
        return ServeCommand(command, False, "For vLLM, export with `--format speculators`.")
    if format == "gguf":
        command = (
            "llama-server -m TARGET.gguf -md HEAD/eagle3-BF16.gguf --spec-type draft-eagle3 \\\n"
            f"    --spec-draft-n-max {tokens}"
        )
        other = "TARGET.gguf is the target as GGUF. For SGLang, export with `--format sglang`."
        return ServeCommand(command, True, other)
    draft = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": tokens}
    command = f"vllm serve {target} --speculative-config '{json.dumps(draft)}'"
    return ServeCommand(command, True, "For SGLang, export with `--format sglang`.")


ALGORITHM = HeadAlgorithm(
    name="eagle3",
    architecture="LlamaForCausalLMEagle3",
    package=__name__,
    objective="ttt",
    settings=_settings,
    size=HeadSize.of,
    describe=lambda _head: "an EAGLE-3 draft head",
    formats=("sglang", "speculators", "gguf"),
    refusals={
        "mtp": "MTP layers join token and hidden state before the layer, this head inside it"
    },
    serve_command=_serve_command,
)

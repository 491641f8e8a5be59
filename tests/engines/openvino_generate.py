"""OpenVINO GenAI's own pipeline over prompts, for the interpreter that has it.

    .venvs/openvino/bin/python tests/engines/openvino_generate.py < settings.json

Settings: `target` and `head`, which optimum-intel converted, `prompts` as lists of token ids,
`new_tokens`, `stop_ids`, `drafts`, and for a tree `top_k` and `depth`, which are 0 for a chain.
Prints a list: each prompt's reply as `ids`, and in `emitted` how many tokens every forward of the
target added, prefill first.

Models, scheduler, drafting and counters are GenAI's own. What is set: fp32 throughout, one thread
and no prefix cache.
"""

import json
import sys
from typing import Any

_FP32 = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",  # a converted model asks for f16
    "INFERENCE_NUM_THREADS": 1,
}


def main(settings: dict[str, Any]) -> list[dict[str, list[int]]]:
    import numpy
    import openvino  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False  # GiB
    draft = genai.draft_model(settings["head"], "CPU", **_FP32)
    pipeline = genai.LLMPipeline(
        settings["target"], "CPU", draft_model=draft, scheduler_config=scheduler, **_FP32
    )
    config = genai.GenerationConfig()
    config.do_sample, config.apply_chat_template = False, False
    config.max_new_tokens, config.stop_token_ids = settings["new_tokens"], {*settings["stop_ids"]}
    config.num_assistant_tokens = settings["drafts"]
    config.branching_factor, config.tree_depth = settings["top_k"], settings["depth"]
    replies = []
    for prompt in settings["prompts"]:
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        result = pipeline.generate(ids, config)
        emitted = result.extended_perf_metrics.raw_metrics.m_batch_sizes
        replies.append({"ids": [*result.tokens[0]], "emitted": [*emitted]})
    return replies


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))

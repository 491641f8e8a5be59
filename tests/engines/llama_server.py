"""llama.cpp's HTTP server, as its bindings `xllamacpp` start it, for the interpreter that has them.

    .venvs/llama/bin/python tests/engines/llama_server.py '{"target": …, "head": …, "port": …}'

Server, scheduler, graphs and counters are llama.cpp's own; what is set here, `llama-server` has
options for (`-m -md --spec-type draft-eagle3 --spec-draft-n-max -np -c -ctk -ctv -fa`,
`--no-spec-draft-backend-sampling`).
"""

import json
import signal
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    import xllamacpp  # type: ignore[import-not-found,unused-ignore]

    kv_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['kv_type']}")
    params = xllamacpp.CommonParams()
    params.model.path, params.port = settings["target"], settings["port"]
    params.n_parallel, params.n_ctx = settings["slots"], settings["slots"] * settings["context"]
    params.warmup = params.fit_params = False
    params.cache_type_k = params.cache_type_v = kv_type
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    threads = settings.get("threads", 1)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if settings["head"]:
        speculative, draft = params.speculative, params.speculative.draft
        kinds = xllamacpp.common_speculative_type
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft.mparams.path, draft.n_max = settings["head"], settings["drafts"]
        draft.backend_sampling = settings["backend_sampling"]
        draft.cache_type_k = draft.cache_type_v = kv_type
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)  # noqa: F841 - it serves for as long as it lives
    signal.pause()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

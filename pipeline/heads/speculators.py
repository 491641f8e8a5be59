"""What a head of any algorithm says in speculators' dialect: how to draft, and for which target."""

from __future__ import annotations

from typing import Any

from pipeline.console import notice
from pipeline.heads.algorithm import Export
from pipeline.heads.checkpoint import CONFIG, read_json
from pipeline.target.open import Target

#: The field whose presence tells this dialect from others.
MODEL_TYPE = "speculators_model_type"


#: The section that `drafting_section` writes, and the one that holds the layer's configuration.
SETTINGS, LAYER = "speculators_config", "transformer_layer_config"


#: Of `speculators_config`: how to draft and for which target, not what the head computes.
HOW_TO_DRAFT = ("proposal_methods", "default_proposal_method", "verifier")


def drafting_section(
    algorithm: str, tokens: int, target: Target, request: Export
) -> dict[str, Any]:
    """`speculators_config`, for heads of which vLLM drafts `tokens` a round unless told otherwise.

    vLLM serves `verifier.name_or_path` when it is given the head alone; speculators loads the
    target's norm and lm_head from there.
    """
    body = read_json(target.directory / CONFIG)
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {
            "name_or_path": request.verifier or _public_name(target),
            "architectures": body.get("architectures") or [],
        },
    }


def _public_name(target: Target) -> str:
    """What transformers can load: the hub id. Of a directory only its name, to be completed."""
    resolved = target.resolved
    on_hub = resolved.revision != "local" and not resolved.source.startswith("package:")
    if on_hub:
        return resolved.source
    name = resolved.directory.resolve().name
    fix = "for `vllm serve HEAD`, export with --verifier PATH"
    notice("export", f"config.json calls the target {name}, without a path: {fix}")
    return name

"""Acceptance under the names that others use, as they define them: from counters alone. No torch.

vLLM         `SpecDecodingStats` (v1/spec_decode/metrics.py), and what `vllm bench serve` saves
SGLang       `meta_info` of a reply (managers/tokenizer_manager.py)
SPEED-Bench  `specbench_results.json` of NVIDIA's specdec_bench (metrics/specbench.py)

Each differs from τ in what it counts; docs/evaluation.md has all of them side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pipeline.reports import RoundCounters


def vllm_names(counters: Sequence[RoundCounters]) -> dict[str, Any]:
    """Of all requests together.

    vLLM counts no draft for a round without a drafted token, and not its bonus token; a
    last round counts with all that it accepted. The rate is a percentage.
    """
    total = RoundCounters.total(counters)
    drafts, accepted = drafts_of(total), total.accepted_tokens
    return {
        "num_drafts": drafts,
        "num_draft_tokens": total.drafted,
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": list(total.accepted),
        "spec_decode_acceptance_rate": 100 * _share(accepted, total.drafted),
        "spec_decode_acceptance_length": 1 + _share(accepted, drafts),
        "spec_decode_per_position_acceptance_rates": [
            _share(count, drafts) for count in total.accepted
        ],
    }


def sglang_names(counters: Sequence[RoundCounters]) -> dict[str, Any]:
    """Of all requests together; of one, what its reply says.

    The length counts prefill's token, which no round made.
    """
    decoded = [each for each in counters if each.rounds]
    total = RoundCounters.total(decoded)
    return {
        "spec_verify_ct": total.rounds,
        "spec_accept_length": _share(total.tokens + len(decoded), total.rounds),
        "spec_accept_rate": _share(total.accepted_tokens, total.drafted),
        "spec_num_proposed_drafts": total.drafted,
        "spec_num_correct_drafts": total.accepted_tokens,
        "spec_correct_drafts_histogram": list(total.accepted_lengths),
    }


def speed_bench_names(
    counters: Sequence[RoundCounters], prompts: Sequence[str], categories: Sequence[str]
) -> dict[str, Any]:
    """A request is a prompt with all its turns: its mean round, then means of those.

    SPEED-Bench leaves out the last round of a turn, which the end of a reply cuts. Counters do not
    know which one that was: here it counts uncut.
    """
    turns: defaultdict[str, list[RoundCounters]] = defaultdict(list)
    category_of = dict(zip(prompts, categories, strict=True))
    for each, prompt in zip(counters, prompts, strict=True):
        if each.rounds:
            turns[prompt].append(each)
    of_request = {prompt: _uncut(RoundCounters.total(each)) for prompt, each in turns.items()}
    of_category: defaultdict[str, list[float]] = defaultdict(list)
    for prompt, length in of_request.items():
        of_category[category_of[prompt]].append(length)
    return {
        "Request_AL": of_request,
        "Category_AL": {name: fmean(each) for name, each in sorted(of_category.items())},
        "Average_AL": fmean(of_request.values()) if of_request else 0.0,
    }


def drafts_of(counters: RoundCounters) -> int:
    """Rounds with a drafted token."""
    return counters.proposed[0] if counters.proposed else 0


def _uncut(counters: RoundCounters) -> float:
    """Mean tokens of a round, each with all that it accepted and the bonus token."""
    return 1 + _share(counters.accepted_tokens, counters.rounds)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

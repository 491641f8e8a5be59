"""How figures and keys are written on the page, the terminal and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.config import OLD, SCRATCH
from pipeline.reports import Estimate, EvalReport, ReferenceCheck

#: What a reader calls the keys of `tokens_per_second` and `speedup`.
MODE_NAMES = {"speculative": "speculative", "plain": "plain", "hf": "HF generate"}
_WORDS = {"acceptance_length": "τ", "alpha": "α", "tokens_per_second": "tokens/s"}


def fixed(value: float) -> str:
    """Two decimals."""
    return f"{value:.2f}"


def rate(value: float) -> str:
    """Tokens per second and their like."""
    return f"{value:,.1f}"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"


def estimated(figure: Estimate) -> str:
    """A figure with its interval."""
    return f"{figure.value:.2f} ({figure.low:.2f} … {figure.high:.2f})"


def changed(difference: Estimate) -> str:
    """A difference with its interval, signed."""
    value, low, high = difference.value, difference.low, difference.high
    return f"{value:+.3f} ({low:+.3f} … {high:+.3f})"


def milliseconds(seconds: float) -> str:
    """Times of tokens."""
    return f"{1e3 * seconds:,.1f}"


def plain(value: Any) -> str:
    """Any scalar: thousands separated, three decimals, yes and no."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)


def share(value: Any, key: str) -> Any:
    """Shares and coverages as percentages, everything else unchanged."""
    is_share = isinstance(value, float) and re.search("share|coverage", key)
    return percent(value) if is_share else value


def words(key: str) -> str:
    """`draft_vocab_size` → "draft vocab size"; figures with a symbol get that."""
    return _WORDS.get(key, key.replace("_", " "))


def mode(name: str) -> str:
    """What a reader calls a way of decoding."""
    return MODE_NAMES.get(name, name)


def timed(figures: Mapping[str, float]) -> dict[str, float]:
    """The ways of decoding that were timed; a zero stands for one that was not."""
    return {name: figure for name, figure in figures.items() if figure > 0}


def refresh_differences(report: EvalReport) -> dict[str, Estimate]:
    """The three paired differences of a refresh, as a reader calls them."""
    assert report.refresh is not None, "it is a refresh"
    beside = {each.rival: each.difference for each in report.comparisons}
    return {
        "refreshed less old": beside[OLD],
        "refreshed less scratch": beside[SCRATCH],
        "scratch less old": report.refresh.scratch_to_old.difference,
    }


def refreshed(report: EvalReport) -> str:
    """The verdict of a refresh with the figures that it rests on."""
    assert report.refresh is not None, "it is a refresh"
    lengths = (
        f"{name} {each.acceptance_length.value:.3f}" for name, each in report.refresh.heads.items()
    )
    differences = (f"{name} {changed(each)}" for name, each in refresh_differences(report).items())
    return f"{report.refresh.verdict}: τ {', '.join(lengths)}; {', '.join(differences)}"


def reference(check: ReferenceCheck) -> str:
    """Plain decoding against transformers."""
    tokens, replies = plain(check.tokens), plain(check.replies)
    if check.same:
        return f"plain decoding is transformers' own on {replies} replies ({tokens} tokens)"
    differ = f"logits differ by up to {percent(check.logits_difference)}"
    wrong = f"{plain(check.wrong_tokens)} of {tokens} tokens"
    return f"{wrong} of plain decoding are not transformers' choice, {differ}"

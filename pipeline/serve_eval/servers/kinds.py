"""What each kind of server offers: how prompts are sent, and what it reports of its rounds.

    sglang   POST /generate with input_ids; meta_info of the last event; /server_info (before 0.5:
             /get_server_info) with the speculative_* arguments
             (managers/tokenizer_manager.py, entrypoints/http_server.py)
    vllm     POST /v1/completions with the ids as prompt; with --per-request-spec-decode-metrics
             (0.32) the last event has `metrics.speculative_decoding`, else counters of /metrics are
             read before and after (v1/metrics/stats.py, v1/spec_decode/metrics.py)
    llamacpp POST /completion with the ids as prompt; every event has a token, and `timings` that
             count what was drafted and accepted so far (tools/server/server-task.cpp); /props
    eagle3   POST /v1/completions; meta_info under SGLang's names in the last event

SGLang has renamed some fields; the newer name is read first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.config import OWNER
from pipeline.documents import LONGEST_NAME, name_in
from pipeline.errors import EndpointError
from pipeline.reports import RoundCounters
from pipeline.serve_eval.servers.client import LiveClient, ServerGone

Kind = Literal["sglang", "vllm", "llamacpp", "eagle3"]
#: Where prompts are sent; of the others /v1/completions.
_PATHS = {"sglang": "/generate", "llamacpp": "/completion"}

#: Arguments of an SGLang server that are recorded beside speculative_*. Others may be secrets.
_RECORDED = (
    *("model_path", "tokenizer_path", "served_model_name", "dtype", "quantization", "tp_size"),
    *("kv_cache_dtype", "attention_backend", "page_size", "max_running_requests", "chat_template"),
    "context_length",
)
_SAMPLE = re.compile(r"^(vllm:\w+?)(?:\{(.*)\})?\s+(\S+)$")
#: Characters of a setting, and entries of one.
_LONGEST_SETTING, _MOST_ENTRIES = 4096, 256
#: Above it a float does not count on.
_MOST_COUNTED = 2**53
#: Positions that any round drafts, and tokens.
_DEEPEST, _MOST_DRAFTED = 1024, 4096
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class LiveServer:
    """A server that answers, and what it reports about itself."""

    kind: Kind
    model: str
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # that it reports

    @property
    def path(self) -> str:
        """Where prompts are sent."""
        return _PATHS.get(self.kind, "/v1/completions")

    @property
    def headers(self) -> dict[str, str]:
        """llama-server closes a connection after a stream, though it says that it keeps it."""
        return {"Connection": "close"} if self.kind == "llamacpp" else {}

    @property
    def reports_requests(self) -> bool:
        """Whether a reply reports what its rounds did."""
        return self.kind != "vllm"

    @property
    def depth(self) -> int | None:
        """Positions that one of its rounds drafts, as it reports."""
        steps = self.settings.get("speculative_num_steps")
        return steps if type(steps) is int and 0 <= steps <= _DEEPEST else None

    def body(self, ids: Sequence[int], new: int, stop_ids: Sequence[int]) -> dict[str, Any]:
        """A greedy request with a streamed reply. It overrides the server's defaults, which come
        with the model."""
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(stop_ids),
            "skip_special_tokens": False,
        }
        if self.kind == "sglang":
            sampling["max_new_tokens"] = new
            return {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
        if self.kind == "llamacpp":  # it stops at its vocabulary's own end tokens
            return sampling | {
                "prompt": list(ids),
                "n_predict": new,
                "repeat_penalty": 1.0,
                "stream": True,
                "return_tokens": True,
                "timings_per_token": True,
            }
        return sampling | {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": new,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def scoring(self, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> dict[str, Any] | None:
        """A request for the log-probabilities of a reply that is sent along; None of a kind that
        gives them for tokens of its own alone."""
        ids = [*prompt_ids, *reply_ids]
        if self.kind == "vllm":
            return {
                "model": self.model,
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 2,
            }
        if self.kind == "sglang":
            return {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": len(prompt_ids) - 1,
                "top_logprobs_num": 2,
            }
        return None


async def identify(client: LiveClient, url: str, kind: str, model: str | None) -> LiveServer:
    """Find out what a server is. Raises EndpointError, ServerGone."""
    listed = await client.json_page("/v1/models")
    rows = listed.get("data") if isinstance(listed, dict) else None
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    owner = name_in(first.get("owned_by")) if kind == "auto" else kind
    info = None
    if owner not in ("vllm", "llamacpp", OWNER):
        info = await client.json_page("/server_info") or await client.json_page("/get_server_info")
    if owner == OWNER:
        known: Kind = OWNER
    elif owner == "llamacpp":
        known = "llamacpp"
    elif owner == "sglang" or (isinstance(info, dict) and "internal_states" in info):
        known = "sglang"
    elif owner == "vllm" or (
        (page := await client.page("/metrics")) is not None and "vllm:" in page.text
    ):
        known = "vllm"
    else:
        problem = "not recognised as SGLang, vLLM, llama-server or `eagle3 serve`"
        fix = "set eval.server.kind, or correct the address"
        raise EndpointError(problem, where=url, fix=fix)
    named = model or name_in(first.get("id"))
    if known == "sglang":
        return _sglang(info if isinstance(info, dict) else {}, named)
    if known == "llamacpp":
        return _llamacpp(first, await client.json_page("/props"), named)
    version = await client.json_page("/version") if known == "vllm" else first
    number = name_in(version.get("version")) if isinstance(version, dict) else ""
    return LiveServer(known, named, number, _recorded(first, ("max_model_len", "root", "golden")))


def _recorded(settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the names, and the speculative ones, where a report can hold them."""
    return {
        name: value
        for name, value in settings.items()
        if (name in names or (name.startswith("speculative_") and len(name) <= LONGEST_NAME))
        and value is not None
        and _is_short(value)
    }


def _is_short(value: Any) -> bool:
    if isinstance(value, dict | list):
        children = list(value.values()) if isinstance(value, dict) else value
        return len(children) <= _MOST_ENTRIES and all(map(_is_short, children))
    return len(str(value)) <= _LONGEST_SETTING


def _sglang(info: dict[str, Any], model: str) -> LiveServer:
    settings = _recorded(info, _RECORDED)
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    average = state.get("avg_spec_accept_length") if isinstance(state, dict) else None
    if isinstance(average, int | float):
        settings["avg_spec_accept_length"] = average
    if info:
        settings.setdefault("speculative_algorithm", None)
    return LiveServer("sglang", model, name_in(info.get("version")), settings)


def _llamacpp(listed: dict[str, Any], props: Any, model: str) -> LiveServer:
    """Its `dtype` is the target file's type; of its head and of keys and values it reports none."""
    meta, props = listed.get("meta"), props if isinstance(props, dict) else {}
    meta = meta if isinstance(meta, dict) else {}
    settings = {
        "context_length": meta.get("n_ctx"),
        "dtype": meta.get("ftype"),
        "total_slots": props.get("total_slots"),
    }
    reported = _recorded(settings, tuple(settings))
    return LiveServer("llamacpp", model, name_in(props.get("build_info")), reported)


@dataclass(frozen=True)
class ServerRounds:
    """What a server reports of the rounds of one request, or of several."""

    rounds: int
    tokens: int  # of rounds, bonus included
    drafted: int = 0
    accepted: int = 0
    counters: RoundCounters | None = None  # None: it does not report what each round accepted
    #: Drafted and accepted tokens of each round; (): it does not list them.
    in_order: tuple[tuple[int, int], ...] = ()

    def check(self, completion: int, depth: int | None) -> None:
        """Raises ImpossibleRounds where no rounds, of drafts of at most `depth` positions, make
        what is reported of a reply of `completion` tokens."""
        most_accepted = self.rounds * (_DEEPEST if depth is None else depth)
        if self.drafted:
            most_accepted = min(most_accepted, self.drafted)
        if not (
            0 < self.rounds <= completion
            and 0 <= self.drafted <= self.rounds * _MOST_DRAFTED
            and 0 <= self.accepted <= most_accepted
            and 0 <= self.tokens <= self.rounds + self.accepted
        ):
            raise ImpossibleRounds


class ImpossibleRounds(ValueError):
    """A server's counters of a reply contradict each other, or the reply."""


def rounds_of(meta: dict[str, Any], completion: int, depth: int | None) -> ServerRounds | None:
    """Of a request, from its `meta_info` or vLLM's metrics; None where it has no rounds.

    `completion` counts prefill's token, which no round made. `depth`: positions that a round
    drafts, where it is known; else as many as any round accepted.
    """
    if "num_spec_steps" in meta:
        return _drafts_of(meta)
    rounds = meta.get("spec_verify_ct")
    if not isinstance(rounds, int) or rounds < 1:
        return None
    if rounds > completion:
        raise ImpossibleRounds
    tokens = max(completion - 1, 0)
    accepted = _first(meta, "spec_num_correct_drafts", "spec_accept_token_num")
    accepted = accepted if isinstance(accepted, int) else max(tokens - rounds, 0)
    drafted = _first(meta, "spec_num_proposed_drafts", "spec_draft_token_num")
    drafted = drafted if isinstance(drafted, int) else 0
    lengths = _first(meta, "spec_correct_drafts_histogram", "spec_accept_histogram")
    if not _are_counts(lengths) or sum(lengths) != rounds:
        return ServerRounds(rounds, tokens, drafted, accepted)
    lengths = _without_zeros(lengths)
    positions = max(depth or 0, len(lengths) - 1)
    counters = RoundCounters(
        rounds=rounds,
        tokens=tokens,
        drafted=drafted or rounds * positions,
        accepted_lengths=lengths,
        proposed=(rounds,) * positions,
    )
    return ServerRounds(rounds, tokens, counters.drafted, counters.accepted_tokens, counters)


def _drafts_of(metrics: dict[str, Any]) -> ServerRounds | None:
    """From vLLM's `speculative_decoding`, which counts rounds with a draft, each uncut."""
    try:
        lengths = [int(each) for each in metrics["acceptance_histogram"]]
        drafted, depth = int(metrics["num_draft_tokens"]), int(metrics["num_spec_tokens"])
        listed = (metrics.get(f"per_step_{name}") or () for name in ("drafted", "accepted"))
        in_order = tuple((int(one), int(other)) for one, other in zip(*listed, strict=True))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if sum(lengths) < 1 or min(lengths) < 0 or len(lengths) > depth + 1 or depth > _DEEPEST:
        return None
    return _uncut_rounds(lengths, drafted, depth, in_order)


def _uncut_rounds(
    lengths: Sequence[int],
    drafted: int,
    depth: int,
    in_order: tuple[tuple[int, int], ...] = (),
) -> ServerRounds:
    """As vLLM counts: rounds with a draft of `depth` positions, by how many tokens they accepted,
    each with its bonus token."""
    rounds, accepted = sum(lengths), sum(index * count for index, count in enumerate(lengths))
    counters = RoundCounters(
        rounds=rounds,
        tokens=rounds + accepted,
        drafted=drafted,
        accepted_lengths=_without_zeros(lengths),
        proposed=(rounds,) * depth,
    )
    return ServerRounds(rounds, rounds + accepted, drafted, accepted, counters, in_order)


def _without_zeros(lengths: Sequence[int]) -> tuple[int, ...]:
    """Up to the longest that any round accepted."""
    last = max((index for index, count in enumerate(lengths) if count), default=0)
    return tuple(lengths[: last + 1])


def rounds_of_timings(timings: Sequence[dict[str, Any]], completion: int) -> ServerRounds | None:
    """Of a request to llama-server, from the `timings` of its tokens' events; None without drafts.

    All tokens of a round count the same drafts; the last one or two of a reply may be made plainly:

        draft_n            0  3  3  6  8  8      rounds of 3, 3 and 2 drafted tokens, and a plain
        draft_n_accepted   0  1  1  1  1  1      one; the first token is prefill's

    A character that several tokens make has an event for the last of them alone, so that no round
    can be told from another: then only the sums are known. Raises ImpossibleRounds.
    """
    counts = [each.get(name, 0) for each in timings for name in ("draft_n", "draft_n_accepted")]
    if not _are_counts(counts) or max(counts, default=0) > completion * _MOST_DRAFTED:
        raise ImpossibleRounds
    totals = Counter((each.get("draft_n", 0), each.get("draft_n_accepted", 0)) for each in timings)
    (drafted, accepted), tokens = max(totals, default=(0, 0)), completion - 1
    if not drafted:
        return None
    if totals.total() != completion:
        return ServerRounds(max(tokens - accepted, 1), tokens, drafted, accepted)
    made: list[tuple[int, int]] = []  # drafted and accepted tokens, by round
    before = (0, 0)
    for total, count in sorted(totals.items()):
        rounds = [(total[0] - before[0], total[1] - before[1])] if total[0] else []
        plain = count - (rounds[0][1] + 1 if rounds else 1)  # negative where a stop cuts the round
        made += [*rounds, *[(0, 0)] * plain]
        before = total
    if any(not 0 <= accepted <= drafted <= _MOST_DRAFTED for drafted, accepted in made):
        raise ImpossibleRounds
    lengths = Counter(length for _, length in made)
    counters = RoundCounters(
        rounds=len(made),
        tokens=tokens,
        drafted=drafted,
        accepted_lengths=tuple(lengths[n] for n in range(max(lengths) + 1)),
        proposed=tuple(sum(n > k for n, _ in made) for k in range(max(made)[0])),
    )
    # The last round may be cut by a stop.
    return ServerRounds(len(made), tokens, drafted, accepted, counters, tuple(made[:-1]))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _first(meta: dict[str, Any], *names: str) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


async def read_leads(
    client: LiveClient, server: LiveServer, prompt_ids: Sequence[int], reply_ids: Sequence[int]
) -> tuple[float, ...] | None:
    """By how many nats the server's target prefers each token of the reply to the likeliest other;
    None where it does not say. Raises ServerGone."""
    if not reply_ids:
        return ()
    body = server.scoring(prompt_ids, reply_ids)
    answer = await client.post(server.path, body) if body else None
    try:
        if server.kind == "sglang":
            meta = _Scored.model_validate(answer).meta_info
            pairs = zip(meta.input_token_logprobs, meta.input_top_logprobs, strict=True)
            rows = [{token: nats for nats, token, _ in (own, *(top or ()))} for own, top in pairs]
        else:
            (choice,) = _Completed.model_validate(answer).choices
            rows = [
                {int(token): each.logprob for token, each in (row or {}).items()}
                for row in choice.prompt_logprobs
            ]
        scored = list(zip(reply_ids, rows[-len(reply_ids) :], strict=True))
        leads = [row.pop(token) - max(row.values()) for token, row in scored]
    except (ValueError, TypeError, KeyError):  # ValidationError among them
        return None
    return tuple(leads) if all(map(isfinite, leads)) else None


class ServerPart(BaseModel):
    """Base of what servers send."""

    model_config = ConfigDict(strict=True)


class _Logprob(ServerPart):
    logprob: float


class _ScoredChoice(ServerPart):
    prompt_logprobs: list[dict[str, _Logprob] | None]


class _Completed(ServerPart):
    """Of vLLM."""

    choices: list[_ScoredChoice]


#: Nats, token, its text; JSON has lists only.
_Nats = Annotated[tuple[float | None, int, str | None], Field(strict=False)]


class _ScoredMeta(ServerPart):
    input_token_logprobs: list[_Nats]
    input_top_logprobs: list[list[_Nats] | None]


class _Scored(ServerPart):
    """Of SGLang."""

    meta_info: _ScoredMeta


@dataclass(frozen=True)
class MetricCounts:
    """vLLM's counters at one time, summed over its engines."""

    generated: int
    drafts: int | None  # None: no speculation is configured
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def since(self, before: MetricCounts) -> MetricCounts:
        """What was counted in between."""
        earlier = (*before.by_position, *[0] * len(self.by_position))
        return MetricCounts(
            generated=self.generated - before.generated,
            drafts=None if self.drafts is None else self.drafts - (before.drafts or 0),
            drafted=self.drafted - before.drafted,
            accepted=self.accepted - before.accepted,
            by_position=tuple(
                now - then for now, then in zip(self.by_position, earlier, strict=False)
            ),
        )

    def rounds(self) -> ServerRounds | None:
        """Every draft as a round with all that it accepted and the bonus token; None for counters
        that went back, since the server has been started again meanwhile."""
        drafts = self.drafts or 0
        if not drafts or min(drafts, self.drafted, self.accepted, *self.by_position) < 0:
            return None
        reached = (drafts, *self.by_position, 0)
        lengths = [more - less for more, less in pairwise(reached)]
        if sum(self.by_position) != self.accepted or min(lengths) < 0:
            tokens = drafts + self.accepted
            return ServerRounds(drafts, tokens, self.drafted, self.accepted)
        return _uncut_rounds(lengths, self.drafted, len(self.by_position))


async def read_metrics(client: LiveClient, model: str) -> MetricCounts | None:
    """None where the server has no /metrics, or none of vLLM's names in it."""
    try:
        page = await client.page("/metrics")
    except ServerGone:
        return None
    return parse_metrics(page.text, model) if page is not None else None


def parse_metrics(text: str, model: str) -> MetricCounts | None:
    """Samples of `model`, or of all models where none has that name."""
    rows = [_sample(line) for line in text.splitlines()]
    samples = [row for row in rows if row is not None]
    own = [row for row in samples if row[1].get("model_name") == model] or samples
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in own:
        name = name.removesuffix("_total")
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos" and "position" in labels:
            place = int(labels["position"])
            positions[place] = positions.get(place, 0) + value
        else:
            sums[name] = sums.get(name, 0) + value
    if "vllm:generation_tokens" not in sums:
        return None
    drafts = sums.get("vllm:spec_decode_num_drafts")
    return MetricCounts(
        generated=int(sums["vllm:generation_tokens"]),
        drafts=None if drafts is None else int(drafts),
        drafted=int(sums.get("vllm:spec_decode_num_draft_tokens", 0)),
        accepted=int(sums.get("vllm:spec_decode_num_accepted_tokens", 0)),
        by_position=tuple(int(positions.get(k, 0)) for k in range(max(positions, default=-1) + 1)),
    )


def _sample(line: str) -> tuple[str, dict[str, str], float] | None:
    match = _SAMPLE.match(line)
    if match is None or match[1].endswith(("_bucket", "_created")):
        return None
    labels = dict(_LABEL.findall(match[2] or ""))
    try:
        value, position = float(match[3]), int(labels.get("position", 0))
    except ValueError:
        return None
    is_count = 0 <= value < _MOST_COUNTED and 0 <= position < _DEEPEST
    return (match[1], labels, value) if is_count else None

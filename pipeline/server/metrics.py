"""/metrics: what vLLM counts, under vLLM's names, so that its dashboards and tools read it.

Counts are of requests that have ended, aborted ones with what they had generated until then; so
sums of replies' `usage` can be compared with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from pipeline.decoder.engine import Engine
from pipeline.decoder.request import Completion
from pipeline.errors import MissingPackage
from pipeline.reports import VllmNames

#: Upper ends of histogram buckets, in seconds.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Methods of the routes; a client may write any word.
_METHODS = frozenset({"GET", "HEAD", "POST"})


@dataclass
class RequestTimes:
    """When a request was submitted and emitted tokens, by perf_counter."""

    submitted: float = field(default_factory=perf_counter)
    first_token: float = 0.0
    last_tokens: float = 0.0


class ServerMetrics:
    """The numbers of one server, in a registry of their own."""

    def __init__(self, model: str, *, drafts: bool) -> None:
        """`drafts`: not plain decoding. Raises MissingPackage."""
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise missing("prometheus_client") from None
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, ["model_name"], registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ["model_name"]
            made = Histogram(f"vllm:{name}", text, labels, registry=registry, buckets=buckets)
            return made.labels(model)

        self._model, self._counts_drafts = model, drafts
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests").labels(model)
        generated = counter("generation_tokens", "Tokens generated for ended requests")
        self._generated = generated.labels(model)
        self._success = counter("request_success", "Ended requests", "finished_reason")
        drafted = counter("spec_decode_num_drafts", "Rounds in which anything was drafted")
        self._drafts = drafted.labels(model)
        verified = counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified")
        self._draft_tokens = verified.labels(model)
        accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._accepted = accepted.labels(model)
        self._by_depth = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth", "position"
        )
        self._running = gauge("num_requests_running", "Requests that hold a slot")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for one")
        self._usage = gauge("kv_cache_usage_perc", "Share of the pages in use, 1 is all")
        first, between = "Submitted to first token", "Between two pieces of a reply"
        self._first_token = histogram("time_to_first_token_seconds", first, _LONG)
        self._between = histogram("inter_token_latency_seconds", between, _SHORT)
        per_token = "Mean time of a token after the first, by request"
        self._per_token = histogram("request_time_per_output_token_seconds", per_token, _SHORT)
        self._whole = histogram("e2e_request_latency_seconds", "Submitted to ended", _LONG)
        self._http = Counter(
            "http_requests", "Answers", ["handler", "method", "status"], registry=registry
        )

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def count_answer(self, handler: str, method: str, status: int) -> None:
        """An HTTP answer, at its end. `handler`: a route, not what a client has written."""
        known = method if method in _METHODS else "other"
        self._http.labels(handler, known, str(status)).inc()

    def count_tokens(self, times: RequestTimes) -> None:
        """A request emits tokens now."""
        now = perf_counter()
        if times.first_token:
            self._between.observe(now - times.last_tokens)
        else:
            times.first_token = now
            self._first_token.observe(now - times.submitted)
        times.last_tokens = now

    def count(self, times: RequestTimes, prompt_tokens: int, completion: Completion) -> None:
        """A request has ended."""
        self._prompt.inc(prompt_tokens)
        self._generated.inc(len(completion.token_ids))
        self._success.labels(self._model, completion.finish_reason).inc()
        if self._counts_drafts:
            counted = VllmNames.of([completion.statistics.counters()])
            self._drafts.inc(counted.num_drafts)
            self._draft_tokens.inc(counted.num_draft_tokens)
            self._accepted.inc(counted.num_accepted_tokens)
            for depth, rounds in enumerate(counted.num_accepted_tokens_per_pos):
                self._by_depth.labels(self._model, str(depth)).inc(rounds)
        self._whole.observe(perf_counter() - times.submitted)
        if len(completion.token_ids) > 1 and completion.finish_reason in ("stop", "length"):
            spent = times.last_tokens - times.first_token
            self._per_token.observe(spent / (len(completion.token_ids) - 1))

    def observe(self, engine: Engine, waiting: int) -> None:
        """What the engine holds now."""
        pages = engine.pools.shared
        self._running.set(engine.running)
        self._waiting.set(max(waiting, 0))
        self._usage.set(1 - pages.free_pages / pages.capacity)


def missing(package: str) -> MissingPackage:
    """The error of a machine without one of the server's packages."""
    problem, fix = f"needs the pip package {package}", "pip install 'eagle3[serve]'"
    return MissingPackage(problem, where="eagle3 serve", fix=fix)

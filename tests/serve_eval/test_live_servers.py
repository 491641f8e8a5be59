"""SGLang's and vLLM's own answers, over real connections, right ones and wrong ones."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, load
from pipeline.errors import EndpointError, EndpointsUnavailable
from pipeline.reports import EvalReport, ServerResult, VllmNames
from pipeline.serve_eval.questions import Question, first_question, load_evaluation_prompts
from pipeline.serve_eval.servers.check import check, compare_golden
from pipeline.serve_eval.servers.evaluate import _own_counters, evaluate_server
from pipeline.serve_eval.servers.kinds import (
    LiveServer,
    MetricCounts,
    parse_metrics,
    read_leads,
    rounds_of,
)
from pipeline.target.open import open_template
from tests.serve_eval.conftest import listening_app
from tests.serve_eval.recorded import Faults, RecordedServer, RecordedSglang, RecordedVllm

BOTH = pytest.mark.parametrize("kind", [RecordedSglang, RecordedVllm])


class Recorded:
    """Starts recorded servers and evaluates them."""

    def __init__(self, finished: Path, stack: ExitStack) -> None:
        self.file, self.config, self._stack = finished, load(finished), stack
        path = Path(self.config.run.uri) / "eval/report.json"
        self.report = EvalReport.parse(path.read_bytes(), where="report", fix="")
        assert self.report.golden is not None
        self.golden = self.report.golden
        template = open_template(self.config.target)
        self.tokens = {
            each.turns[0]: len(first_question(each, template).context)
            for each in load_evaluation_prompts(self.config)[0]
        }

    def start(
        self, kind: type[RecordedServer], faults: Faults | None = None
    ) -> tuple[str, RecordedServer]:
        served = kind(self.golden, faults or Faults(), template=self.tokens)
        url, served.server = self._stack.enter_context(listening_app(served.app()))  # type: ignore[attr-defined]
        return url, served

    def evaluate(self, url: str, *more: str) -> ServerResult:
        levels = "eval.server.concurrency=[1, 2]"
        return evaluate_server(load(self.file, [f"eval.server.url={url}", levels, *more]))

    def of(self, url: str) -> RunConfig:
        return load(self.file, [f"eval.server.url={url}"])


@pytest.fixture
def recorded(finished: Path) -> Iterator[Recorded]:
    with ExitStack() as stack:
        yield (recorded := Recorded(finished, stack))
    folder = Path(recorded.config.run.uri) / "eval/servers"
    shutil.rmtree(folder, ignore_errors=True)


def _names(result: ServerResult) -> dict[str, str]:
    return {each.name: each.text for each in reversed(result.findings)}


def test_a_right_sglang(recorded: Recorded) -> None:
    url, served = recorded.start(RecordedSglang)
    result = recorded.evaluate(url)
    assert (result.kind, result.version, result.model) == ("sglang", "0.5.6", "org/target")
    assert result.findings == () and result.passed
    assert result.server_settings["speculative_algorithm"] == "EAGLE3"
    assert "sk-secret" not in result.model_dump_json()
    sent = {tuple(body["input_ids"]) for body in served.asked if body.get("stream")}
    assert sent == {each.prompt_ids for each in recorded.golden.prompts}
    ours = recorded.report.acceptance
    for point in result.curve.points:
        assert point.acceptance is not None and ours is not None
        assert point.acceptance.acceptance_length == ours.acceptance_length
        assert point.acceptance.conditional == ours.conditional
    assert check(recorded.report, recorded.of(url).eval.server, where="report")


def test_an_old_sglang_tells_no_histogram(recorded: Recorded) -> None:
    url, _ = recorded.start(RecordedSglang, Faults(old_names=True, no_histogram=True))
    result = recorded.evaluate(url)
    assert result.findings == ()
    (point, _), ours = result.curve.points, recorded.report.acceptance
    assert point.acceptance is not None and ours is not None
    assert point.acceptance.acceptance_length == ours.acceptance_length
    assert point.acceptance.accept_rate == pytest.approx(ours.accept_rate)
    assert point.acceptance.conditional == (), "α is not known, and so not told"


def test_a_right_vllm(recorded: Recorded) -> None:
    url, served = recorded.start(RecordedVllm)
    result = recorded.evaluate(url)
    assert (result.kind, result.version) == ("vllm", "0.11.0")
    names = _names(result)
    assert set(names) == {"acceptance_pooled", "tree_differs"} and result.passed
    assert "compared with the decoder's rounds of 3/1/4" in names["tree_differs"]
    assert result.pooled == (2,)
    vllm = VllmNames.of([each.shapes["3/1/4"] for each in recorded.golden.prompts])
    for point in result.curve.points:
        assert point.acceptance is not None
        tau = point.acceptance.acceptance_length.value
        assert tau == pytest.approx(vllm.spec_decode_acceptance_length)
        assert point.acceptance.accept_rate == pytest.approx(vllm.spec_decode_acceptance_rate / 100)
    alone, together = (point.acceptance for point in result.curve.points)
    assert alone and alone.acceptance_length.low < alone.acceptance_length.high
    assert together and together.acceptance_length.low == together.acceptance_length.high
    assert check(recorded.report, recorded.of(url).eval.server, where="report")
    assert {body["model"] for body in served.asked} == {"org/target"}


def test_a_vllm_that_reports_every_request(recorded: Recorded) -> None:
    """As with --per-request-spec-decode-metrics: nothing is pooled."""
    url, _ = recorded.start(RecordedVllm, Faults(by_request=True, others=9))
    result = recorded.evaluate(url)
    assert {"acceptance_pooled"}.isdisjoint(_names(result)) and result.passed
    for point in result.curve.points:
        tau = point.acceptance and point.acceptance.acceptance_length
        assert tau and tau.low < tau.value < tau.high
    assert check(recorded.report, recorded.of(url).eval.server, where="report")


def test_replies_that_a_limit_ends_are_named(recorded: Recorded) -> None:
    url, _ = recorded.start(RecordedVllm, Faults(limit=5))
    names = _names(recorded.evaluate(url))
    assert "replies end for their length, the first after 5 tokens" in names["replies_cut"]
    assert not check(recorded.report, recorded.of(url).eval.server, where="report")


def _near_ties(recorded: Recorded) -> EvalReport:
    """The report in bf16, with another token nearly as likely everywhere."""
    settings = recorded.report.settings.model_copy(update={"dtype": "bfloat16"})
    near = recorded.golden.model_copy(
        update={
            "prompts": tuple(
                each.model_copy(
                    update={
                        "runner_up_ids": tuple(token ^ 1 for token in each.reply_ids),
                        "runner_up_gaps": (0.1,) * len(each.reply_ids),
                        "chain_margins": ((3.0,) * 8,) * (len(each.reply_ids) - 1),
                    }
                )
                for each in recorded.golden.prompts
            )
        }
    )
    return recorded.report.model_copy(update={"settings": settings, "golden": near})


def test_in_bf16_a_reply_that_parts_is_asked_for_up_to_there(recorded: Recorded) -> None:
    """Its text may part; its rounds until then may not."""
    report = _near_ties(recorded)
    near = report.golden
    assert near is not None
    url, served = recorded.start(RecordedVllm, Faults(parts_at=6))
    section = recorded.of(url).eval.server
    seen, findings = compare_golden(report, section, where="report")
    assert {each.name for each in findings} == {"tree_differs", "acceptance", "near_ties"}
    longer = [each for each in near.prompts if len(each.reply_ids) > 6]
    assert [each["max_tokens"] for each in served.asked].count(6) == len(longer) > 1
    assert {each.tokens for each in seen.compared} == {6}
    more = frozenset(each.id for each in longer)
    url, _ = recorded.start(RecordedVllm, Faults(parts_at=6, one_more_round=more))
    assert not check(report, recorded.of(url).eval.server, where="report")


@pytest.mark.parametrize(("parts_at", "more"), [(15, 0), (15, 8), (5, 2)])
def test_rounds_of_trees_are_counted_up_to_where_texts_part(
    recorded: Recorded, parts_at: int, more: int
) -> None:
    """Though no reply has the decoder's text to its end. Of few rounds two are a near-tie's."""
    ids = frozenset(each.id for each in recorded.golden.prompts[:more])
    faults = Faults(noise=None, parts_at=parts_at, one_more_round=ids)
    url, _ = recorded.start(RecordedSglang, faults)
    section = recorded.of(url).eval.server
    seen, findings = compare_golden(_near_ties(recorded), section, where="report")
    assert {each.tokens for each in seen.compared} == {parts_at} and len(seen.compared) == 8
    texts = [each.text for each in findings if each.name == "rounds_differ"]
    if more < 8:
        assert not texts and {each.name for each in findings} == {"acceptance", "near_ties"}
    else:
        (text,) = texts
        assert "on the same text, first " in text


@BOTH
def test_logits_of_another_target_are_named_though_no_reply_parts(
    recorded: Recorded, kind: type[RecordedServer]
) -> None:
    url, _ = recorded.start(kind, Faults(noise=0.26))
    names = _names(recorded.evaluate(url))
    assert "0.26 nats of noise lie on the server's logits, where 0.25 are" in names["logits_differ"]
    seen, _ = compare_golden(recorded.report, recorded.of(url).eval.server, where="report")
    assert seen.measured_noise == pytest.approx(0.26, abs=1e-3) and not seen.exact
    assert not check(recorded.report, recorded.of(url).eval.server, where="report")


@BOTH
@pytest.mark.parametrize("noise", [0.24, 0.0, None])
def test_noise_of_an_arithmetic_is_allowed(
    recorded: Recorded, kind: type[RecordedServer], noise: float | None
) -> None:
    """And a server that scores nothing is judged by its replies."""
    url, _ = recorded.start(kind, Faults(noise=noise))
    assert recorded.evaluate(url).passed
    seen, _ = compare_golden(recorded.report, recorded.of(url).eval.server, where="report")
    assert seen.measured_noise == (None if noise is None else pytest.approx(noise, abs=1e-4))
    assert seen.exact == (noise != 0.24)


_LOGPROBS = {"6": {"logprob": -1.0}, "8": {"logprob": -3.5}}


def _scores(*rows: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [None, None, *rows]}]}


_UNREADABLE: list[Any] = [
    *(None, [], {}, {"choices": []}, _scores(), _scores(_LOGPROBS), _scores({}, _LOGPROBS)),
    *(_scores(None, _LOGPROBS), _scores({"5": 1}, _LOGPROBS)),
    _scores({"x": {"logprob": 1.0}}, _LOGPROBS),
    _scores({"5": {"logprob": -2.0}}, _LOGPROBS),  # of no other token
    _scores({"8": {"logprob": -2.0}, "9": {"logprob": -3.0}}, _LOGPROBS),  # of others alone
    _scores({"5": {"logprob": float("inf")}, "9": {"logprob": -1.5}}, _LOGPROBS),
]
_READABLE = _scores({"5": {"logprob": -2.0}, "9": {"logprob": -1.5}}, _LOGPROBS)


@pytest.mark.parametrize(
    ("answer", "leads"), [(_READABLE, (-0.5, 2.5)), *((each, None) for each in _UNREADABLE)]
)
def test_scores_are_read_or_left_alone(answer: Any, leads: tuple[float, ...] | None) -> None:
    class Client:
        async def post(self, path: str, body: dict[str, Any]) -> Any:
            assert path == "/v1/completions" and body["prompt"] == [3, 4, 5, 6]
            return answer

    read = read_leads(Client(), LiveServer("vllm", "m"), (3, 4), (5, 6))  # type: ignore[arg-type]
    assert asyncio.run(read) == leads


@BOTH
def test_a_server_without_its_head(recorded: Recorded, kind: type[RecordedServer]) -> None:
    url, _ = recorded.start(kind, Faults(no_head=True))
    result = recorded.evaluate(url)
    names = _names(result)
    assert "τ is 1.00: the head was not loaded" in names["head_not_loaded"]
    assert "acceptance_differs" in names and not result.passed
    assert not check(recorded.report, recorded.of(url).eval.server, where="report")


@BOTH
def test_one_prompt_with_another_round_is_named_in_fp32(
    recorded: Recorded, kind: type[RecordedServer]
) -> None:
    name = recorded.golden.prompts[3].id
    url, _ = recorded.start(kind, Faults(one_more_round=frozenset({name})))
    names = _names(recorded.evaluate(url))
    assert names["rounds_differ"].startswith("1 of 8 replies with the decoder's own text took")
    assert f"first {name}: " in names["rounds_differ"]
    assert not check(recorded.report, recorded.of(url).eval.server, where="report")


@BOTH
def test_a_tree_whose_branches_read_each_others_keys_may_take_few_other_rounds(
    recorded: Recorded, kind: type[RecordedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's; every other server's trees are exact."""
    monkeypatch.setattr("pipeline.serve_eval.servers.findings._OTHER_BRANCHES", 0.1)
    url, _ = recorded.start(kind, Faults(one_more_round=frozenset({recorded.golden.prompts[3].id})))
    allowed = kind is RecordedSglang
    assert ("rounds_differ" in _names(recorded.evaluate(url))) is not allowed


def test_a_context_that_is_too_short_is_named(recorded: Recorded) -> None:
    url, _ = recorded.start(RecordedVllm, Faults(max_model_len=40))
    assert "it takes 40 tokens" in _names(recorded.evaluate(url))["context_cut"]
    assert not check(recorded.report, recorded.of(url).eval.server, where="report")


def test_the_number_of_drafts_is_checked_with_and_without_a_report(recorded: Recorded) -> None:
    url, _ = recorded.start(RecordedVllm)
    elsewhere = f"run.uri={recorded.config.run.uri}-elsewhere"
    for more in ([], [elsewhere]):
        names = _names(recorded.evaluate(url, "eval.server.drafts=5", *more))
        assert names["tree_differs"] == "it drafts 3 tokens a round, and should draft 5"


@BOTH
def test_a_server_that_tells_nothing(recorded: Recorded, kind: type[RecordedServer]) -> None:
    url, _ = recorded.start(kind, Faults(plain=True))
    result = recorded.evaluate(url)
    assert "reports no speculation" in _names(result)["no_acceptance"]
    assert not result.passed and result.curve.points[0].acceptance is None
    assert not check(recorded.report, recorded.of(url).eval.server, where="report")


@BOTH
def test_another_template_and_other_replies(recorded: Recorded, kind: type[RecordedServer]) -> None:
    url, _ = recorded.start(kind, Faults(more_prompt_tokens=14, other_tokens=True))
    names = _names(recorded.evaluate(url))
    ours = next(iter(recorded.tokens.values()))
    assert f"prompt tokens {ours + 14} against {ours}" in names["template_differs"]
    assert names["replies_differ"].startswith("8 of 8 replies part from the decoder's")


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_without_token_ids_are_unknown(
    recorded: Recorded, kind: type[RecordedServer], dtype: str
) -> None:
    """In fp32, where both texts and rounds must be equal, that is an error."""
    url, _ = recorded.start(kind, Faults(ids=False, other_tokens=True))
    settings = recorded.report.settings.model_copy(update={"dtype": dtype})
    report = recorded.report.model_copy(update={"settings": settings})
    _, findings = compare_golden(report, recorded.of(url).eval.server, where="report")
    (found,) = (each for each in findings if each.name == "texts_unknown")
    assert found.text.startswith("8 of 8 replies came without token ids")
    assert found.severity == ("error" if dtype == "float32" else "warning")
    if dtype == "float32":
        assert "texts_unknown" in _names(recorded.evaluate(url))


@BOTH
def test_busy_servers_are_asked_again(recorded: Recorded, kind: type[RecordedServer]) -> None:
    url, _ = recorded.start(kind, Faults(busy=3))
    result = recorded.evaluate(url)
    assert result.failures == {"retried_429": 3} and result.passed
    assert [point.requests for point in result.curve.points] == [8, 8]


@BOTH
def test_an_error_inside_a_stream_is_counted(
    recorded: Recorded, kind: type[RecordedServer]
) -> None:
    broken = recorded.golden.prompts[2].id
    url, _ = recorded.start(kind, Faults(broken=frozenset({broken})))
    result = recorded.evaluate(url)
    assert result.failures == {"stream_error": 2}
    assert "1 of 8 requests failed at concurrency 1" in _names(result)["requests_failed"]
    assert [(point.requests, point.failed) for point in result.curve.points] == [(7, 1), (7, 1)]
    assert broken not in {each.id for each in result.prompts}


def test_a_stream_without_its_end_is_no_reply(recorded: Recorded) -> None:
    cut = recorded.golden.prompts[1].id
    url, _ = recorded.start(RecordedSglang, Faults(cut=frozenset({cut})))
    assert recorded.evaluate(url).failures == {"truncated": 2}


@BOTH
def test_a_server_that_dies_leaves_nothing(recorded: Recorded, kind: type[RecordedServer]) -> None:
    url, served = recorded.start(kind)
    served.die_after = 3
    with pytest.raises(EndpointsUnavailable, match=r"gone after \d of 8 requests at concurrency 1"):
        recorded.evaluate(url)
    assert not (Path(recorded.config.run.uri) / "eval/servers").exists()


def test_all_requests_failing_is_an_error(recorded: Recorded) -> None:
    every = frozenset(each.id for each in recorded.golden.prompts)
    url, _ = recorded.start(RecordedSglang, Faults(broken=every))
    with pytest.raises(EndpointError, match=r"8 x stream_error .*out of memory"):
        recorded.evaluate(url)


def test_traffic_of_others_is_seen(recorded: Recorded) -> None:
    url, _ = recorded.start(RecordedVllm, Faults(others=5))
    names = _names(recorded.evaluate(url))
    assert "generated tokens at concurrency 1" in names["other_traffic"]


def test_metrics_of_several_engines_are_added() -> None:
    text = (
        'vllm:generation_tokens_total{engine="0",model_name="m"} 5\n'
        'vllm:generation_tokens_total{engine="1",model_name="m"} 6\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1",model_name="m"}'
        " 1\n"
    )
    counts = parse_metrics(text, "m")
    assert counts is not None
    assert (counts.generated, counts.drafts, counts.by_position) == (11, 2, (0, 1))
    assert parse_metrics("python_gc_objects_collected_total 3\n", "m") is None


def test_counters_of_a_server_that_was_started_again_are_none() -> None:
    before = MetricCounts(100, drafts=10, drafted=30, accepted=12, by_position=(8, 4))
    after = MetricCounts(300, drafts=20, drafted=60, accepted=24, by_position=(16, 8))
    assert after.since(before).rounds() is not None
    for less in ({"drafts": 5}, {"drafted": 5}, {"accepted": 5}, {"by_position": (16, 2)}):
        assert replace(after, **less).since(before).rounds() is None


def test_prompts_are_paired_by_their_contexts(recorded: Recorded) -> None:
    """Names and lengths alone may be another template's; older reports have no more."""
    prompts, new = recorded.golden.prompts, recorded.golden.max_new_tokens
    same = [Question(each.id, "", each.prompt_ids) for each in prompts]
    other = [Question(each.id, "", each.prompt_ids[::-1]) for each in prompts]
    assert len(_own_counters(recorded.report, same, new)) == 8
    assert _own_counters(recorded.report, other, new) == {}
    older = [each.model_copy(update={"context_digest": ""}) for each in recorded.report.prompts]
    report = recorded.report.model_copy(update={"prompts": tuple(older)})
    assert len(_own_counters(report, other, new)) == 8


def test_meta_info_without_rounds_tells_nothing() -> None:
    assert rounds_of({}, 5, 3) is None
    assert rounds_of({"spec_verify_ct": 0}, 1, 3) is None
    told = rounds_of({"spec_verify_ct": 2, "spec_accept_histogram": [1, 1, 0]}, 4, 3)
    assert told is not None and told.counters is not None
    assert (told.tokens, told.counters.accepted_lengths, told.counters.proposed) == (
        *(3, (1, 1)),
        (2, 2, 2),
    )

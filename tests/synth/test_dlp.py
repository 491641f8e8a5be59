"""Cloud DLP through its real client, with a gRPC server of the service's own messages here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest

from pipeline.config import DlpSection, PiiSection
from pipeline.errors import EndpointError
from pipeline.synth.privacy.dlp import GoogleInspector
from pipeline.synth.privacy.filter import PiiFilter

dlp_v2 = pytest.importorskip("google.cloud.dlp_v2", reason="google-cloud-dlp is in the extra dlp")
grpc = pytest.importorskip("grpc")

SECTION = DlpSection(
    project="ours",
    location="europe-west1",
    info_types=("PERSON_NAME", "EMPLOYEE_ID"),
)


class Service:
    """Finds `EMP-…` and the word Zoë; truncates results above `max_findings`."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.max_findings = 100
        self.status: Any = None
        self.distort: Callable[[Any], None] = lambda location: None

    def inspect(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if self.status is not None:
            context.abort(self.status, "quota of project ours is used up")
        findings = [
            self._finding(row, match)
            for row, values in enumerate(request.item.table.rows)
            for match in re.finditer(r"EMP-\d+|Zoë", values.values[0].string_value)
        ]
        result = dlp_v2.InspectResult(
            findings=findings[: self.max_findings],
            findings_truncated=len(findings) > self.max_findings,
        )
        return dlp_v2.InspectContentResponse(result=result)

    def _finding(self, row: int, match: re.Match[str]) -> Any:
        name, likelihood = "PERSON_NAME", dlp_v2.Likelihood.VERY_LIKELY
        if match[0].startswith("EMP"):
            name, likelihood = "EMPLOYEE_ID", dlp_v2.Likelihood.LIKELY
        table = dlp_v2.TableLocation(row_index=row)
        record = dlp_v2.RecordLocation(table_location=table)
        location = dlp_v2.Location(
            codepoint_range=dlp_v2.Range(start=match.start(), end=match.end()),
            content_locations=[dlp_v2.ContentLocation(record_location=record)],
        )
        self.distort(location)
        info_type = dlp_v2.InfoType(name=name)
        return dlp_v2.Finding(info_type=info_type, likelihood=likelihood, location=location)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    from google.cloud.dlp_v2.services.dlp_service.transports import DlpServiceGrpcTransport

    handler = grpc.unary_unary_rpc_method_handler(
        service.inspect,
        request_deserializer=dlp_v2.InspectContentRequest.deserialize,
        response_serializer=dlp_v2.InspectContentResponse.serialize,
    )
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    service_name, handlers = "google.privacy.dlp.v2.DlpService", {"InspectContent": handler}
    generic = grpc.method_handlers_generic_handler(service_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield dlp_v2.DlpServiceClient(transport=DlpServiceGrpcTransport(channel=channel))
    server.stop(None).wait()


def test_findings_come_back_for_the_right_text_at_the_right_characters(
    service: Service, client: Any
) -> None:
    texts = ["nothing", "", "Hällo Zoë, see EMP-123", "EMP-9"]
    findings = GoogleInspector(SECTION, client=client).inspect(texts)
    assert [
        [(text[f.start : f.end], f.entity, f.score) for f in of_text]
        for text, of_text in zip(texts, findings, strict=True)
    ] == [
        [],
        [],
        [("Zoë", "PERSON", 0.95), ("EMP-123", "EMPLOYEE_ID", 0.75)],
        [("EMP-9", "EMPLOYEE_ID", 0.75)],
    ]
    (request,) = service.requests
    inspect = request.inspect_config
    assert request.parent == "projects/ours/locations/europe-west1" and not inspect.include_quote
    assert [kind.name for kind in inspect.info_types] == ["PERSON_NAME", "EMPLOYEE_ID"]
    assert inspect.min_likelihood == dlp_v2.Likelihood.LIKELY
    rows = [row.values[0].string_value for row in request.item.table.rows]
    assert rows == [text for text in texts if text]


def test_a_truncated_result_is_requested_again_in_halves(service: Service, client: Any) -> None:
    service.max_findings = 2
    texts = [f"EMP-{number}" for number in range(7)]
    findings = GoogleInspector(SECTION, client=client).inspect(texts)
    assert [len(of_text) for of_text in findings] == [1] * 7
    assert len(service.requests) > 3


def test_many_texts_are_sent_in_few_requests(service: Service, client: Any) -> None:
    texts = ["short"] * 501 + ["x" * 90_000, "y" * 90_000, "z" * 90_000, "é" * 90_000]
    GoogleInspector(SECTION, client=client).inspect(texts)
    assert [len(request.item.table.rows) for request in service.requests] == [500, 4, 1]


def test_a_text_too_long_for_a_request_is_sent_in_parts(service: Service, client: Any) -> None:
    text = "é" * 99_998 + "EMP-123" + "é" * 399_000 + "EMP-9"
    (findings,) = GoogleInspector(SECTION, client=client).inspect([text])
    assert {"EMP-123", "EMP-9"} <= {text[f.start : f.end] for f in findings}
    sent = [row.values[0].string_value for r in service.requests for row in r.item.table.rows]
    assert len(sent) == 6 and all(part in text for part in sent)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_truncated_result_of_one_text_is_requested_again_in_overlapping_parts(
    service: Service, client: Any, most: int
) -> None:
    service.max_findings = most
    names = [f"EMP-{1000 + number}" for number in range(40)]
    text = " and then there came ".join(["Hällo", *names])
    (findings,) = GoogleInspector(SECTION, client=client).inspect([text])
    assert set(names) <= {text[f.start : f.end] for f in findings}
    assert len(service.requests) > 3


def test_a_refusal_is_a_typed_error_with_a_fix(service: Service, client: Any) -> None:
    service.status = grpc.StatusCode.RESOURCE_EXHAUSTED
    line = r"synth\.dlp: Cloud DLP refused or did not answer: .*quota.*\(fix: check project"
    with pytest.raises(EndpointError, match=line):
        GoogleInspector(SECTION, client=client).inspect(["text"])


def _in_row(row: int) -> Callable[[Any], None]:
    def distort(location: Any) -> None:
        location.content_locations[0].record_location.table_location.row_index = row

    return distort


def _at(start: int, end: int) -> Callable[[Any], None]:
    def distort(location: Any) -> None:
        location.codepoint_range = dlp_v2.Range(start=start, end=end)

    return distort


@pytest.mark.parametrize(
    ("distort", "said"),
    [
        (_in_row(1), "a text that it was not sent"),
        (_in_row(-1), "a text that it was not sent"),
        (_in_row(2**62), "a text that it was not sent"),
        (lambda location: location.content_locations.clear(), "a text that it was not sent"),
        (_at(0, 99), "characters that the text does not have"),
        (_at(-3, 2), "characters that the text does not have"),
        (_at(5, 5), "characters that the text does not have"),
        (_at(5, 2), "characters that the text does not have"),
    ],
)
def test_a_finding_that_is_nowhere_ends_the_run(
    service: Service, client: Any, distort: Callable[[Any], None], said: str
) -> None:
    """Otherwise the text would be kept as if it had been read."""
    service.distort = distort
    with pytest.raises(EndpointError, match=said):
        GoogleInspector(SECTION, client=client).inspect(["see EMP-123"])


def test_its_findings_join_the_others(client: Any) -> None:
    pii = PiiFilter(PiiSection(), inspector=GoogleInspector(SECTION, client=client))
    assert pii.check("EMP-123 writes to anna@firm.com") == ["EMAIL_ADDRESS", "EMPLOYEE_ID"]


def test_no_text_is_sent_without_a_project() -> None:
    assert PiiFilter(PiiSection(), DlpSection())._inspector is None

"""Google Cloud DLP (Sensitive Data Protection) as a further inspector.

Texts are sent as rows of a one-column table, many in one request; a finding names its row and its
code points, which are Python's string offsets. What is longer than a request is sent in parts that
overlap. A request whose result was truncated is repeated in halves, down to halves of one text, so
that no finding is lost to a limit.

    text     ░░░░░░░░░░░░░░░░░░░░░░░░
    parts    ░░░░░░░░░░░░░░
                       ░░░░░░░░░░░░░░    what lies across the cut is whole in one of them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.config import DlpSection
from pipeline.errors import EndpointError, EndpointsUnavailable, MissingPackage
from pipeline.synth.privacy.finding import Finding

_ROWS = 500
_TIMEOUT_SECONDS = 30.0  # of a request, with the retries of transient failures
_REQUEST_BYTES = 400_000  # of texts; the service refuses requests above half a megabyte
_PART = _REQUEST_BYTES // 4  # characters, of at most four bytes
_OVERLAP = 500  # characters: longer than what is looked for
_SMALLEST = 32  # characters of a part that is not halved again

#: Cloud DLP's info types whose entity has another name here.
_ENTITIES = {
    "CREDIT_CARD_NUMBER": "CREDIT_CARD",
    "US_SOCIAL_SECURITY_NUMBER": "US_SSN",
    "STREET_ADDRESS": "ADDRESS",
    "PERSON_NAME": "PERSON",
    "AUTH_TOKEN": "API_KEY",
    "GCP_API_KEY": "API_KEY",
    "ENCRYPTION_KEY": "PRIVATE_KEY",
}
_SCORES = {
    "VERY_UNLIKELY": 0.1,
    "UNLIKELY": 0.3,
    "POSSIBLE": 0.5,
    "LIKELY": 0.75,
    "VERY_LIKELY": 0.95,
}


class GoogleInspector:
    """Sends texts to Cloud DLP. `client` replaces the one of the application-default credentials.

    Raises MissingPackage without google-cloud-dlp, EndpointError when the service cannot be used.
    """

    def __init__(self, section: DlpSection, *, client: Any = None) -> None:
        try:
            from google.cloud import dlp_v2
        except ImportError:
            raise MissingPackage(
                "the pip package google-cloud-dlp is not installed",
                where="synth.dlp.project",
                fix="pip install 'eagle3[dlp]'",
            ) from None
        self._types = dlp_v2
        self._section = section
        self._parent = f"projects/{section.project}/locations/{section.location}"
        self._client = client or self._connect()

    def inspect(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text, in the order of the texts."""
        findings: list[set[Finding]] = [set() for _ in texts]
        for parts in _batches(texts):
            for row, finding in self._inspect_parts(parts):
                findings[row].add(finding)
        return [sorted(of_text) for of_text in findings]

    def _inspect_parts(self, parts: Sequence[_TextPart]) -> Iterator[tuple[int, Finding]]:
        """(index of the text, finding) for these parts of texts."""
        result = self._request([part.text for part in parts])
        if result.findings_truncated and (halves := _halves(parts)):
            for half in halves:
                yield from self._inspect_parts(half)
            return
        for finding in result.findings:
            part, span = _place(finding.location, parts)
            entity = _ENTITIES.get(finding.info_type.name, finding.info_type.name)
            score = _SCORES.get(finding.likelihood.name, 0.5)
            start, end = part.offset + span.start, part.offset + span.end
            yield part.row, Finding(start, end, entity, score)

    def _request(self, texts: Sequence[str]) -> Any:
        from google.api_core.exceptions import GatewayTimeout, GoogleAPIError, RetryError
        from google.api_core.retry import if_transient_error

        types = self._types
        table = types.Table(
            headers=[types.FieldId(name="text")],
            rows=[types.Table.Row(values=[types.Value(string_value=text)]) for text in texts],
        )
        request = types.InspectContentRequest(
            parent=self._parent,
            inspect_config=types.InspectConfig(
                info_types=[types.InfoType(name=name) for name in self._section.info_types],
                min_likelihood=types.Likelihood[self._section.min_likelihood],
                include_quote=False,  # the service need not send back what it found
            ),
            item=types.ContentItem(table=table),
        )
        try:
            return self._client.inspect_content(request=request, timeout=_TIMEOUT_SECONDS).result
        except GoogleAPIError as error:
            passes = if_transient_error(error) or isinstance(error, GatewayTimeout | RetryError)
            raise (EndpointsUnavailable if passes else EndpointError)(
                f"Cloud DLP refused or did not answer: {str(error).splitlines()[0]}",
                where="synth.dlp",
                fix="check project, location, permissions and quota",
            ) from error

    def _connect(self) -> Any:
        from google.auth.exceptions import GoogleAuthError

        options = {"api_endpoint": self._section.endpoint} if self._section.endpoint else None
        try:
            return self._types.DlpServiceClient(client_options=options)
        except GoogleAuthError as error:
            raise EndpointError(
                f"no credentials for Cloud DLP: {str(error).splitlines()[0]}",
                where="synth.dlp",
                fix="run gcloud auth application-default login",
            ) from error


def _place(location: Any, parts: Sequence[_TextPart]) -> tuple[_TextPart, Any]:
    """The part of a text and the characters of it. Raises EndpointError for a place that is none:
    a text would be kept as if it had been read."""
    span = location.codepoint_range
    rows = [each.record_location.table_location.row_index for each in location.content_locations]
    if not rows or not 0 <= rows[0] < len(parts):
        problem = "names a text that it was not sent"
    elif not 0 <= span.start < span.end <= len(parts[rows[0]].text):
        problem = "names characters that the text does not have"
    else:
        return parts[rows[0]], span
    raise EndpointError(
        f"Cloud DLP {problem}", where="synth.dlp", fix="check synth.dlp.endpoint, or leave it out"
    )


class _TextPart(NamedTuple):
    """Characters of the text with index `row`, from `offset` on."""

    row: int
    offset: int
    text: str


def _halves(parts: Sequence[_TextPart]) -> tuple[Sequence[_TextPart], Sequence[_TextPart]] | None:
    """Fewer parts each, or of a single part the two halves, which overlap; None if it is tiny."""
    if len(parts) > 1:
        return parts[: len(parts) // 2], parts[len(parts) // 2 :]
    row, offset, text = parts[0]
    if len(text) <= _SMALLEST:
        return None
    middle, overlap = len(text) // 2, min(_OVERLAP, len(text) // 4)
    second = _TextPart(row, offset + middle - overlap, text[middle - overlap :])
    return [_TextPart(row, offset, text[: middle + overlap])], [second]


def _parts(texts: Sequence[str]) -> Iterator[_TextPart]:
    for row, text in enumerate(texts):
        if text.strip():
            for offset in range(0, max(1, len(text) - _OVERLAP), _PART - _OVERLAP):
                yield _TextPart(row, offset, text[offset : offset + _PART])


def _batches(texts: Sequence[str]) -> Iterator[list[_TextPart]]:
    """Parts of texts that go into one request."""
    batch: list[_TextPart] = []
    size = 0
    for part in _parts(texts):
        length = len(part.text.encode())
        if batch and (len(batch) == _ROWS or size + length > _REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += length
    if batch:
        yield batch

"""Google Cloud DLP (Sensitive Data Protection) as a further inspector.

Texts are sent as rows of a one-column table, many in one request; a finding names its row and its
code points, which are Python's string offsets. A request whose result was truncated is repeated in
halves, so that no finding is lost to a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config import DlpSection
from pipeline.errors import DataError, EndpointError, EndpointsUnavailable, MissingPackage
from pipeline.synth.privacy.finding import Finding

_ROWS = 500
_REQUEST_BYTES = 400_000  # of texts; the service refuses requests above half a megabyte

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

    Raises MissingPackage without google-cloud-dlp, EndpointError when the service cannot be used,
    DataError for a text that is too long for one request.
    """

    def __init__(self, section: DlpSection, *, client: Any = None) -> None:
        try:
            from google.cloud import dlp_v2
        except ImportError:
            raise MissingPackage(
                "the pip package google-cloud-dlp is not installed",
                where="synth.dlp.backend",
                fix="pip install 'eagle3[dlp]'",
            ) from None
        self._types = dlp_v2
        self._section = section
        self._parent = f"projects/{section.project}/locations/{section.location}"
        self._client = client or self._connect()

    def inspect(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text, in the order of the texts."""
        findings: list[list[Finding]] = [[] for _ in texts]
        for rows in _batches(texts):
            for row, finding in self._inspect_rows(texts, rows):
                findings[row].append(finding)
        return [sorted(of_text) for of_text in findings]

    def _inspect_rows(
        self, texts: Sequence[str], rows: Sequence[int]
    ) -> Iterator[tuple[int, Finding]]:
        """(index of the text, finding) for the texts of these indices."""
        result = self._request([texts[row] for row in rows])
        if result.findings_truncated and len(rows) > 1:
            middle = len(rows) // 2
            yield from self._inspect_rows(texts, rows[:middle])
            yield from self._inspect_rows(texts, rows[middle:])
            return
        for finding in result.findings:
            location, span = finding.location.content_locations[0], finding.location.codepoint_range
            row = rows[location.record_location.table_location.row_index]
            entity = _ENTITIES.get(finding.info_type.name, finding.info_type.name)
            score = _SCORES.get(finding.likelihood.name, 0.5)
            yield row, Finding(span.start, span.end, entity, score)

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
        timeout = self._section.timeout
        try:
            return self._client.inspect_content(request=request, timeout=timeout).result
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
                where="synth.dlp.backend",
                fix="run gcloud auth application-default login",
            ) from error


def _batches(texts: Sequence[str]) -> Iterator[list[int]]:
    """Indices of texts that go into one request."""
    rows: list[int] = []
    size = 0
    for row, text in enumerate(texts):
        length = len(text.encode())
        if length > _REQUEST_BYTES:
            raise DataError(
                f"a text of {length:,} bytes is too long for Cloud DLP",
                where="synth.dlp",
                fix="set synth.quality.max_characters=100000",
            )
        if rows and (len(rows) == _ROWS or size + length > _REQUEST_BYTES):
            yield rows
            rows, size = [], 0
        if text.strip():
            rows.append(row)
            size += length
    if rows:
        yield rows

"""What is asked: bodies of requests, strict, and errors in OpenAI's shape.

A field that this server cannot obey is refused by name, unless its value asks for nothing; no
field is ignored.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from typing_extensions import TypeVar

from pipeline.config.credentials import is_this_machine
from pipeline.documents import BrokenDocument, parse_json

#: Fields of OpenAI's and vLLM's APIs that are not supported, and values of them that ask for
#: nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
}
#: In a request's state: whether as many connections have requests as there may be.
CROWDED = "crowded"
#: Characters of an error: it may name what a client has written.
_LONGEST_MESSAGE, _LONGEST_NAME = 400, 80
#: Characters of a stop string: each is searched for after each token.
_LONGEST_STOP = 256
#: Items of a list that no context bounds.
_MOST_ITEMS = 1024


class ApiError(Exception):
    """An answer that is an error: an HTTP status and OpenAI's description."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        message = message[:_LONGEST_MESSAGE]
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


class StrictBody(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )


class StreamOptions(StrictBody):
    """What else a stream tells."""

    include_usage: bool = False


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text(limit: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": limit}


class GenerationBody(StrictBody):
    """What both kinds of requests may ask."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]],
        BeforeValidator(_one_or_more),
        WithJsonSchema(
            {
                "anyOf": [
                    _text(_LONGEST_STOP),
                    {"type": "array", "items": _text(_LONGEST_STOP), "maxItems": 16},
                ]
            }
        ),
    ] = Field([], max_length=16)
    stop_token_ids: list[int] = Field([], max_length=_MOST_ITEMS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    user: str | None = None

    @model_validator(mode="after")
    def _streams(self) -> GenerationBody:
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options belongs to stream=true")
        return self


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A prompt or a list of prompts, each a text or token ids, as a tuple of prompts."""
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if isinstance(text, str):
            text.encode()  # raises for half a surrogate pair
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(type(token) is int for token in value):
            return (tuple(value),)
        if all(isinstance(text, str) for text in value):
            return tuple(value)
        ids = all(isinstance(part, list) and part for part in value)
        if ids and all(type(token) is int for part in value for token in part):
            return tuple(map(tuple, value))
    raise ValueError("must be a string, a list of strings, token ids, or a list of token ids")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPTS)]
    max_tokens: int = Field(16, ge=1)
    add_special_tokens: bool = True

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class TextPart(StrictBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _or_text(schema: dict[str, Any]) -> None:
    parts = {name: schema.pop(name) for name in ("type", "items", "maxItems")}
    schema["anyOf"] = [{"type": "string"}, parts]


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(StrictBody):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(_parts),
        Field(max_length=_MOST_ITEMS, json_schema_extra=_or_text),
    ]
    name: None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, str | int | float | bool] = Field({}, max_length=16)

    @property
    def limit(self) -> int | None:
        """None: all that the context leaves."""
        limits = [each for each in (self.max_tokens, self.max_completion_tokens) if each]
        return min(limits, default=None)

    @property
    def characters(self) -> int:
        """Of all that a template may write into the prompt."""
        variables = [each for each in self.chat_template_kwargs.values() if isinstance(each, str)]
        return sum(map(len, [*variables, *(message.text for message in self.messages)]))


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Raises ApiError (400), which names the first field that is wrong and quotes nothing."""
    try:
        tree = parse_json(data)
    except BrokenDocument as error:
        if error.key:
            raise ApiError(400, f"{error.key}: {error.problem}", code="invalid_json") from None
        raise ApiError(400, "the body is not JSON", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        return kind.model_validate(_supported(tree))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:_LONGEST_NAME]
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise ApiError(400, message, param=where or None) from None


def _supported(tree: dict[str, Any]) -> dict[str, Any]:
    """All but what asks for nothing: nulls, and unsupported fields at values without effect."""
    supported = {}
    for name, value in tree.items():
        if value is None:
            continue
        if name not in _UNSUPPORTED:
            supported[name] = value
        elif not any(type(value) is type(idle) and value == idle for idle in _UNSUPPORTED[name]):
            problem = f"{name} is not supported by this server; leave it out"
            raise ApiError(400, problem, param=name, code="unsupported_parameter")
    return supported


def stop_ids_of(body: GenerationBody, own: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Tokens that end a reply; `own` are the target's. Raises ApiError (400)."""
    outside = next((token for token in body.stop_token_ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        problem = f"stop_token_ids has token {outside}, the vocabulary has {vocabulary}"
        raise ApiError(400, problem, param="stop_token_ids")
    return tuple(dict.fromkeys([*([] if body.ignore_eos else own), *body.stop_token_ids]))


#: Names of models may have slashes.
MODEL_PAGE = "/v1/models/{model}"
#: What each page gives, beside its errors.
_PAGES: dict[tuple[str, str], tuple[type[GenerationBody] | None, list[str]]] = {
    ("/health", "get"): (None, ["application/json"]),
    ("/metrics", "get"): (None, ["text/plain"]),
    ("/v1/models", "get"): (None, ["application/json"]),
    (MODEL_PAGE, "get"): (None, ["application/json"]),
    ("/v1/completions", "post"): (CompletionBody, ["application/json", "text/event-stream"]),
    ("/v1/chat/completions", "post"): (ChatBody, ["application/json", "text/event-stream"]),
}
_ERRORS = {
    "400": "A body or a header that is wrong, named by its field",
    "401": "The key is missing or wrong",
    "403": "A host or an origin that may not ask",
    "404": "Another model",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is no JSON, or compressed",
    "429": "Too many requests wait",
    "500": "A request ended with an error",
    "503": "The server is ending, or has too many connections",
}


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of this server; schemas are those by which bodies are checked."""
    kinds = [kind for kind, _ in _PAGES.values() if kind]
    names, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    schemas = definitions["$defs"]
    for each in kinds:  # a null asks for nothing
        fields = schemas[each.__name__]
        for name, schema in fields["properties"].items():
            if name not in fields["required"]:
                fields["properties"][name] = {"anyOf": [schema, {"type": "null"}]}
    text = {"type": "string"}
    error = {"message": text, "type": text, "param": {}, "code": {}}
    shape = {"type": "object", "properties": error, "required": ["message", "type"]}
    schemas["Error"] = {"type": "object", "properties": {"error": shape}, "required": ["error"]}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {code: {"description": each, "content": failed} for code, each in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for (path, method), (kind, types) in _PAGES.items():
        right = {"description": "The reply", "content": {each: {} for each in types}}
        page: dict[str, Any] = {"responses": {"200": right, **errors}}
        if kind:
            body = {"application/json": {"schema": names[kind, "validation"]}}
            page["requestBody"] = {"required": True, "content": body}
        if path.startswith("/v1"):
            page["security"] = [{"key": []}, {}]
        if path == MODEL_PAGE:
            where = {"name": "model", "in": "path", "required": True}
            page["parameters"] = [where | {"schema": {"type": "string"}}]
        paths[path] = {method: page}
    return {
        "openapi": "3.1.0",
        "info": {"title": "eagle3 serve", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


#: A header of a request, as ASGI has it: name in small letters, value.
Header = tuple[bytes, bytes]
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9a-z_-][0-9a-z._-]*?)\.?)(?::[0-9]{1,5})?")


def check_framing(headers: Iterable[Header]) -> None:
    """Raises ApiError (400) for a request with two lengths: a proxy may believe the other one."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        raise ApiError(400, "the request has Content-Length and Transfer-Encoding; send one")


def check_hosts(headers: Iterable[Header], allowed: Iterable[str]) -> None:
    """Raises ApiError (403) for a request that a web page may have sent: one to a name that is not
    this machine's, whose owner lets it point here (DNS rebinding), or one from another origin.

    `allowed` are names and addresses besides those of the loopback.
    """
    written = [(name, value.decode("latin-1").lower()) for name, value in headers]
    hosts = [value for name, value in written if name == b"host"]
    origins = [value for name, value in written if name == b"origin"]
    known = {_plain_host(each.lower()) for each in allowed}
    if len(hosts) != 1 or not _is_known(hosts[0], known):
        fix = "add its name to serve.allowed_hosts, or set serve.api_key_env"
        raise ApiError(403, f"Host is not an address of this server ({fix})", code="host_refused")
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if scheme not in ("http", "https") or not _is_known(host, known):
            raise ApiError(403, "web pages of other hosts may not ask", code="origin_refused")


def _is_known(written: str, known: Container[str]) -> bool:
    match = _HOST.fullmatch(written)
    host = _plain_host(match[1] or match[2]) if match else ""
    return bool(host) and (is_this_machine(host) or host in known)


def _plain_host(host: str) -> str:
    """Each address in one spelling; of ::ffff:192.0.2.1 the IPv4 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)

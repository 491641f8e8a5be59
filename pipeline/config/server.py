"""Servers: a running one that is evaluated, and `eagle3 serve`, the reference server."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from pipeline.config.credentials import VariableName, check_endpoint
from pipeline.config.section import Section

#: What `eagle3 serve` calls itself where an OpenAI API names the owner of a model.
OWNER: Final = "eagle3"


class LiveServerSection(Section):
    """`eagle3 eval --server` and `eagle3 check-serving`."""

    url: str | None = None
    """Its address, with or without /v1 (`--server`)."""
    kind: Literal["auto", "sglang", "vllm", "llamacpp", "eagle3"] = "auto"
    """Whose it is; auto asks it. llamacpp is llama.cpp's llama-server, eagle3 our own."""
    model: str | None = None
    """What it calls the model; None takes the first that it lists."""
    api_key_env: VariableName | None = Field(None, repr=False)
    """Name, in capitals, of the environment variable that holds the key which it wants."""
    allow_plain_http: bool = False
    """Send the key over http:// to another machine."""
    plain: bool = False
    """It was started without a drafter, to be what another run with one is held against: nothing is
    asked of its acceptance, and a server that drafts is an error."""
    concurrency: tuple[int, ...] = Field((1, 4, 16), min_length=1)
    """Requests that are open at a time, one measurement for each."""
    timeout_seconds: float = Field(120, gt=0)
    """Of one request with its repetitions: a server that is busy for longer has failed it."""
    drafts: int | None = Field(None, gt=0)
    """Drafted tokens that it should verify in a round. None: as many as the tree of this run's
    report has, where there is one."""
    tolerance: float = Field(0.03, gt=0, lt=1)
    """How far its τ may be from the decoder's on the same prompts, as a share."""
    check_prompts: int = Field(16, gt=0)
    """Prompts of `eagle3 check-serving`, at most those that the report keeps for it."""

    @model_validator(mode="after")
    def _is_reachable(self) -> LiveServerSection:
        if self.url is not None:
            with_key = self.api_key_env is not None and not self.allow_plain_http
            check_endpoint(self.url, with_key=with_key)
        if any(count < 1 for count in self.concurrency):
            raise ValueError("concurrency holds a number below 1; leave it out")
        return self


class ServeSection(Section):
    """`eagle3 serve`: target, drafter and tree are those of `eval`."""

    plain: bool = False
    """Decode without eval's drafter, for what drafting is held against (eval.server.plain)."""
    host: str = "127.0.0.1"
    """Address to listen at. Any other than this machine's own needs `api_key_env`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port; 0 takes a free one."""
    model: str | None = None
    """Name of the model in requests and replies; None takes target.source."""
    api_key_env: VariableName | None = Field(None, repr=False)
    """Name, in capitals, of the environment variable that holds the key which clients must send."""
    allow_anonymous: bool = False
    """Listen beyond this machine without a key: whoever reaches the port may use it."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names under which clients without a key may ask (header Host), beside `host`, the
    address that they reach, and this machine's loopback. Others may be a web page's (DNS
    rebinding)."""
    slots: int = Field(32, gt=0)
    """Requests that run at a time."""
    parallel: Literal["none", "tensor"] = "none"
    """tensor: split every layer of target and head over the processes of a launcher, of which the
    first one listens (`torchrun --nproc-per-node N -m pipeline.cli serve …`)."""
    max_waiting: int = Field(64, ge=0)
    """Requests that wait for a slot; further ones get 429 and Retry-After."""
    max_length: int | None = Field(None, gt=1)
    """Tokens of prompt and reply together. None: as many as target and head were made for."""
    max_body_bytes: int = Field(1_000_000, gt=0)
    """Largest body of a request; larger ones get 413."""
    max_connections: int = Field(1024, gt=0)
    """Connections at a time. A further one takes the place of the one whose client has been waited
    for longest; where all wait for replies, it gets 503, or /health."""
    idle_seconds: int = Field(10, gt=0)
    """A client that sends no request, or half of its head, for so long is cut off; a body may take
    a second longer for each 10,000 bytes."""
    stall_seconds: float = Field(60.0, gt=0)
    """A client that takes nothing of its reply, or sends nothing of its request, for so long is cut
    off."""
    grace_seconds: float = Field(30.0, ge=0)
    """After SIGTERM: how long running requests may go on; new ones get 503."""

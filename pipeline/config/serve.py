"""The reference server: where it listens, what it holds, and when it says no."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.credentials import VariableName
from pipeline.config.section import Section


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
    slots: int = Field(8, gt=0)
    """Requests that run at a time."""
    max_waiting: int = Field(64, ge=0)
    """Requests that wait for a slot; further ones get 429 and Retry-After."""
    max_length: int | None = Field(None, gt=1)
    """Tokens of prompt and reply together. None: as many as target and head were made for."""
    max_body_bytes: int = Field(1_000_000, gt=0)
    """Largest body of a request; larger ones get 413."""
    max_connections: int = Field(1024, gt=0)
    """Connections at a time; further ones get 503."""
    stall_seconds: float = Field(60.0, gt=0)
    """A client that takes nothing of its reply, or sends nothing of its request, for so long is cut
    off."""
    grace_seconds: float = Field(30.0, ge=0)
    """After SIGTERM: how long running requests may go on; new ones get 503."""

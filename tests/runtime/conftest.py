"""The configuration of the line's tests."""

from __future__ import annotations

from tests.end_to_end.conftest import write_config

__all__ = ["write_config"]

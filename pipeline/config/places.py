"""Where a machine keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/eagle3, or ~/.cache/eagle3."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle3"

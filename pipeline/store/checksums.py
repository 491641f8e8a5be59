"""Checksums as stores spell them: "crc32c:yZRlqg==", "md5:…", and our own "sha256:<hex>"."""

from __future__ import annotations

import base64
import hashlib
from typing import Any


class Checksum:
    """A checksum that grows with the bytes it is shown. CRC32C runs at memory speed, SHA-256 at a tenth of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._state: Any
        if kind == "crc32c":
            import google_crc32c  # comes with gcsfs

            self._state = google_crc32c.Checksum()  # type: ignore[no-untyped-call]
        else:
            self._state = hashlib.new(kind, usedforsecurity=kind != "md5")

    def update(self, data: bytes) -> None:
        self._state.update(data)

    def __str__(self) -> str:
        """Google Cloud Storage writes base64 of the big-endian bytes."""
        text = (
            self._state.hexdigest()
            if self.kind == "sha256"
            else base64.b64encode(self._state.digest()).decode()
        )
        return f"{self.kind}:{text}"

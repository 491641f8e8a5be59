"""An object store that fails for a while, in every way that one does.

Nothing is lost, nothing is twice, all bytes are the same.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from pipeline.errors import ConfigError, CorruptShard, StoreError, StoreUnavailable
from pipeline.records import Manifest
from pipeline.store.backend import is_transient
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.store.shards import verify_shard, verify_sizes, verify_stored
from pipeline.store.stage_run import open_stage
from tests.gcs_server import GcsServer
from tests.store.conftest import CONTRACT, make_config
from tests.store.faulty import CUT, DROP, FLIP, HANG, LAG, Fault, FaultyProxy, is_listing

#: aiohttp's advice to gcsfs, whose event loop has nothing else to do.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

SHARDS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    server = GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    server.create_bucket("faulty")
    yield server
    server.kill()


@pytest.fixture
def proxy(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server.url)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    yield proxy
    proxy.close()


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is silent for two seconds counts as gone."""
    monkeypatch.setenv("EAGLE3_STORE_TIMEOUT_SECONDS", "2")


def run(uri: object, before: Callable[[int], object] = lambda index: None) -> Manifest:
    """A stage of a few shards; `before` is called with each shard's number."""
    stage_run = open_stage(make_config(uri), "synth", None)
    for index in range(SHARDS):
        before(index)
        data = bytes([index, 255 - index]) * 100_000
        stage_run.commit(f"{index:05d}.bin", data, rows=index, tokens=10 * index)
    return stage_run.finish(contract=CONTRACT, licenses={"MIT": 3}, sources={"unit": 3})


def assert_same_as_local(tmp_path: Path, at_second: Callable[[], object]) -> None:
    """A run in which `at_second` is called before the second shard equals one on a disk."""
    uri = f"gs://faulty/{tmp_path.name}"
    manifest = run(uri, lambda index: at_second() if index == 1 else None)
    local = run(tmp_path / "local")
    assert manifest.shards == local.shards and manifest.content_hash == local.content_hash
    for shard in manifest.shards:
        verify_shard(stage_location(uri, "synth"), shard)
    names = stage_location(uri, "synth").child("shards").names()
    assert len(names) == len(list((tmp_path / "local/synth/shards").iterdir()))


def during(seconds: float, *faults: Fault) -> Callable[[str, str], Fault]:
    """The faults in turn until `seconds` after the first request, then none."""
    cycle, started = itertools.cycle(faults), list[float]()

    def fault(method: str, path: str) -> Fault:
        started.append(time.monotonic())
        return next(cycle) if time.monotonic() - started[0] < seconds else None

    return fault


def once(kind: Fault, *, method: str, part: str) -> Callable[[str, str], Fault]:
    """The fault at the first request of `method` whose path holds `part`."""
    left = [kind]

    def fault(verb: str, path: str) -> Fault:
        return left.pop() if left and verb == method and part in path else None

    return fault


def test_a_server_killed_and_restarted_in_the_middle_of_a_run(
    server: GcsServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    def restart() -> None:
        time.sleep(0.8)
        server.start()

    def outage() -> None:
        server.kill()
        threading.Thread(target=restart).start()

    assert_same_as_local(tmp_path, outage)


def test_a_server_that_refuses_for_a_while(proxy: FaultyProxy, tmp_path: Path) -> None:
    faults = 503, 429, 500, 408, 502, 504
    assert_same_as_local(tmp_path, lambda: setattr(proxy, "fault", during(0.5, *faults)))
    assert proxy.injected() and set(proxy.injected()) <= set(faults)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("kind", [DROP, FLIP, HANG])
def test_an_upload_that_goes_wrong(kind: str, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Dropped half-way, altered on the way (its checksum tells), or never answered: sent again."""
    fault = once(kind, method="POST", part="uploadType=multipart")
    assert_same_as_local(tmp_path, lambda: setattr(proxy, "fault", fault))
    assert proxy.injected() == [kind]


def test_a_file_that_was_created_though_the_answer_was_lost(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    """The next attempt finds a file there, and it is its own."""
    location = Location(f"gs://faulty/{tmp_path.name}")
    proxy.fault = once(CUT, method="POST", part="uploadType=multipart")
    assert location.create("a.json", b"mine") == b"mine"
    assert proxy.injected() == [CUT]
    uploads = [path for method, path, _ in proxy.requests if method == "POST"]
    assert len(uploads) == 2 and all("ifGenerationMatch=0" in path for path in uploads)
    assert location.create("a.json", b"other") == b"mine" == location.read("a.json")


@pytest.mark.parametrize(("fault", "uploads"), [(DROP, 1), (404, 2), (410, 2)])
def test_an_upload_in_parts_that_breaks_off(
    fault: Fault, uploads: int, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """The connection drops; or the store restarts between the parts and has lost them."""
    location = Location(f"gs://faulty/{tmp_path.name}")
    # Above 5 MB gcsfs uploads in parts.
    (tmp_path / "large").write_bytes(bytes(range(256)) * 24_000)
    proxy.fault = once(fault, method="POST", part="upload_id=")
    location.put_file("large.bin", tmp_path / "large")
    posts = [path for method, path, _ in proxy.requests if method == "POST"]
    assert proxy.injected() == [fault]
    assert sum("upload_id" not in path for path in posts) == uploads
    assert location.read("large.bin") == (tmp_path / "large").read_bytes()


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("kind", [CUT, HANG, 503])
def test_a_read_that_goes_wrong(kind: Fault, proxy: FaultyProxy, tmp_path: Path) -> None:
    location = Location(f"gs://faulty/{tmp_path.name}")
    data = bytes(range(256)) * 1000
    location.write("a.bin", data)
    proxy.fault = once(kind, method="GET", part="alt=media")
    assert location.read_range("a.bin", 100, 200_000) == data[100:200_000]
    assert proxy.injected() == [kind]


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (403, "no permission to write: Forbidden"),
        (401, "HttpError: injected, 401"),
        (400, "HttpError: injected, 400"),
    ],
)
def test_a_refusal_for_good_is_reported_at_once(
    status: int, problem: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.fault = lambda method, path: status
    with pytest.raises(StoreError, match=rf"{tmp_path.name}/a\.bin: {problem}.*\(fix: "):
        Location(f"gs://faulty/{tmp_path.name}").write("a.bin", b"1")
    assert proxy.injected() == [status], "asked once"


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem that never repeats anything itself; its first requests fail."""

    protocol = "flaky"
    store: dict[str, object] = {}  # noqa: RUF012  # its own, not MemoryFileSystem's
    failures: list[Exception] = []  # noqa: RUF012

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **options: object
    ) -> None:
        if self.failures:
            raise self.failures.pop()
        super().pipe_file(path, value)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    yield Flaky
    Flaky.failures.clear()


def test_filesystems_that_never_repeat_are_repeated(
    flaky: type[Flaky], capsys: pytest.CaptureFixture[str]
) -> None:
    flaky.failures += [TimeoutError("slow"), ConnectionResetError("reset")]
    Location("flaky://run").write("a.bin", b"1")
    assert Location("flaky://run").read("a.bin") == b"1" and not flaky.failures
    said = " ".join(capsys.readouterr().out.split())
    assert "flaky://run/a.bin: ConnectionResetError reset; attempt 2 follows in" in said
    assert "attempt 3" in said


def test_retrying_ends_with_the_last_failure_and_what_to_do(
    flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "1")
    flaky.failures += [ConnectionResetError(f"reset {number}") for number in range(50)]
    failed = r"a\.bin: writing failed: ConnectionResetError: reset "
    lasting = f"{failed}.*fix: .*EAGLE3_STORE_RETRY_SECONDS"
    with pytest.raises(StoreUnavailable, match=lasting) as caught:
        Location("flaky://run").write("a.bin", b"1")
    assert 40 < len(flaky.failures) < 49, "few attempts: the waits grow"
    assert caught.value.exit_code == 75, "try again later"


def test_an_outage_is_told_from_a_refusal(
    flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the library below says of its own exceptions: gcsfs', requests' and aiohttp's."""
    import aiohttp
    import google.auth.exceptions
    import requests
    from gcsfs.retry import ChecksumError, HttpError  # type: ignore[import-untyped]

    auth: Any = google.auth.exceptions
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "0")
    passing = [
        HttpError({"code": 401, "message": "Invalid Credentials"}),  # the token has expired
        HttpError({"code": 503, "message": "busy"}),
        ChecksumError("md5"),
        requests.exceptions.ProxyError("502"),
        requests.exceptions.ReadTimeout("slow"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError("cut"),
        auth.TransportError("no metadata server"),
        auth.RefreshError("later", retryable=True),
    ]
    final = [
        HttpError({"code": 401, "message": "no such account"}),
        HttpError({"code": 400, "message": "bad"}),
        auth.RefreshError("revoked"),
        auth.DefaultCredentialsError("none"),
        ValueError("Bad Request"),
    ]
    for error, kind in [(error, StoreUnavailable) for error in passing] + [
        (error, StoreError) for error in final
    ]:
        flaky.failures[:] = [error]
        with pytest.raises(StoreError) as caught:
            Location("flaky://run").write("a.bin", b"1")
        assert type(caught.value) is kind, repr(error)


@pytest.mark.parametrize(
    ("variable", "uri"),
    [("STORE_RETRY_SECONDS", "flaky://run"), ("STORE_TIMEOUT_SECONDS", "gs://eagle3-nowhere/run")],
)
def test_a_limit_that_is_no_number_is_named(
    variable: str, uri: str, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"EAGLE3_{variable}", "soon")
    message = f"environment: EAGLE3_{variable}: 'soon' is not a number of seconds"
    with pytest.raises(ConfigError, match=rf"{message} \(fix: "):
        Location(uri).write("a.bin", b"1")


def test_what_does_not_pass_is_not_waited_for() -> None:
    refused = FileNotFoundError(), PermissionError(), ValueError("no")
    for error in (*refused, OSError(28, "no space"), OSError("Forbidden: x")):
        assert not is_transient(error)


def test_a_listing_from_before_hides_no_shard(proxy: FaultyProxy, tmp_path: Path) -> None:
    """Listings are as they were before the first commit; what is really gone is missed."""
    location = stage_location(f"gs://faulty/{tmp_path.name}", "synth")
    shards = location.child("shards")
    assert shards.names() == []
    manifest = run(location.uri.removesuffix("/synth"))

    def lag(method: str, path: str) -> Fault:
        return LAG if is_listing(path) else None

    proxy.fault = lag
    for verify in (verify_sizes, verify_stored):
        verify(location, manifest.shards)
    assert LAG in proxy.injected() and shards.names() == []
    assert open_stage(make_config(location.uri.removesuffix("/synth")), "synth", None).manifest
    proxy.fault = lambda method, path: None
    shards.delete(manifest.shards[2].path)
    proxy.fault = lag
    for verify in (verify_sizes, verify_stored):
        with pytest.raises(CorruptShard, match="missing"):
            verify(location, manifest.shards)

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

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, StoreError, StoreUnavailable
from pipeline.records import Manifest, TargetContract
from pipeline.store.backend import is_transient
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.store.shards import verify_shard
from pipeline.store.stage_run import open_stage
from tests.gcs_server import GcsServer
from tests.store.faulty import CUT, DROP, FLIP, HANG, Fault, FaultyProxy

#: aiohttp's advice to gcsfs, whose event loop has nothing else to do.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

Configs = Callable[..., RunConfig]
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


def run(
    config: RunConfig, contract: TargetContract, before: Callable[[int], None] = lambda index: None
) -> Manifest:
    """A stage of a few shards; `before` is told each shard's number."""
    stage_run = open_stage(config, "synth", None)
    for index in range(SHARDS):
        before(index)
        name = f"{index:05d}.bin"
        if name not in stage_run.shards:
            data = bytes([index, 255 - index]) * 100_000
            stage_run.commit(name, data, rows=index, tokens=10 * index)
    return stage_run.finish(contract=contract, licenses={"MIT": 3}, sources={"unit": 3})


def assert_same_as_local(
    uri: str, manifest: Manifest, tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    local = run(make_config(tmp_path / "local"), contract)
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


def once(kind: Fault, *, method: str, part: str, times: int = 1) -> Callable[[str, str], Fault]:
    """The fault at the first requests of `method` whose path holds `part`."""
    left = [kind] * times

    def fault(verb: str, path: str) -> Fault:
        return left.pop() if left and verb == method and part in path else None

    return fault


def test_a_server_killed_and_restarted_in_the_middle_of_a_run(
    server: GcsServer,
    proxy: FaultyProxy,
    tmp_path: Path,
    make_config: Configs,
    contract: TargetContract,
) -> None:
    uri = f"gs://faulty/{tmp_path.name}"

    def restart() -> None:
        time.sleep(0.8)
        server.start()

    def outage(index: int) -> None:
        if index == 1:
            server.kill()
            threading.Thread(target=restart).start()

    manifest = run(make_config(uri), contract, outage)
    assert_same_as_local(uri, manifest, tmp_path, make_config, contract)


@pytest.mark.parametrize("faults", [(503, 500, 502, 504), (429, 408)])
def test_a_server_that_refuses_for_a_while(
    faults: tuple[int, ...],
    proxy: FaultyProxy,
    tmp_path: Path,
    make_config: Configs,
    contract: TargetContract,
) -> None:
    uri = f"gs://faulty/{tmp_path.name}"

    def begin(index: int) -> None:
        if index == 1:
            proxy.fault = during(0.5, *faults)

    manifest = run(make_config(uri), contract, begin)
    assert proxy.injected() and set(proxy.injected()) <= set(faults)
    assert_same_as_local(uri, manifest, tmp_path, make_config, contract)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("kind", [DROP, FLIP, HANG])
def test_an_upload_that_goes_wrong(
    kind: str, proxy: FaultyProxy, tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    """Dropped half-way, altered on the way (its checksum tells), or never answered: sent again."""
    uri = f"gs://faulty/{tmp_path.name}"

    def begin(index: int) -> None:
        if index == 1:
            proxy.fault = once(kind, method="POST", part="uploadType=multipart")

    manifest = run(make_config(uri), contract, begin)
    assert proxy.injected() == [kind]
    assert_same_as_local(uri, manifest, tmp_path, make_config, contract)


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


def test_an_upload_in_parts_whose_connection_drops(proxy: FaultyProxy, tmp_path: Path) -> None:
    location = Location(f"gs://faulty/{tmp_path.name}")
    # Above 5 MB gcsfs uploads in parts.
    (tmp_path / "large").write_bytes(bytes(range(256)) * 24_000)
    proxy.fault = once(DROP, method="POST", part="upload_id=")
    location.put_file("large.bin", tmp_path / "large")
    assert proxy.injected() == [DROP]
    assert location.read("large.bin") == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("status", [404, 410])
def test_a_store_that_forgets_an_upload_in_parts(
    status: int, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """It restarts between the parts and then knows nothing of them: the upload begins anew."""
    location = Location(f"gs://faulty/{tmp_path.name}")
    (tmp_path / "large").write_bytes(bytes(range(256)) * 24_000)
    proxy.fault = once(status, method="POST", part="upload_id=")
    location.put_file("large.bin", tmp_path / "large")
    posts = [path for method, path, _ in proxy.requests if method == "POST"]
    begun = [path for path in posts if "upload_id" not in path]
    assert proxy.injected() == [status] and len(begun) == 2
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


def test_a_limit_that_is_no_number_is_named(
    flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "soon")
    message = "environment: EAGLE3_STORE_RETRY_SECONDS: 'soon' is not a number of seconds"
    with pytest.raises(ConfigError, match=rf"{message} \(fix: "):
        Location("flaky://run").write("a.bin", b"1")


def test_a_time_limit_that_is_no_number_is_named_before_the_store_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE3_STORE_TIMEOUT_SECONDS", "soon")
    message = "environment: EAGLE3_STORE_TIMEOUT_SECONDS: 'soon' is not a number of seconds"
    with pytest.raises(ConfigError, match=rf"{message} \(fix: "):
        Location("gs://eagle3-nowhere/run")


def test_what_does_not_pass_is_not_waited_for() -> None:
    refused = FileNotFoundError(), PermissionError(), ValueError("no")
    for error in (*refused, OSError(28, "no space"), OSError("Forbidden: x")):
        assert not is_transient(error)

"""Stages on a bucket whose server fails now and then, or for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cli import main
from pipeline.records import Stage
from pipeline.store.manifest import find_manifest, read_manifest
from pipeline.store.verify import verify_run
from tests.gcs_server import GcsServer
from tests.store.faulty import CUT, DROP, LAG, Fault, FaultyProxy, is_listing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
STAGES: tuple[Stage, ...] = ("synth", "features", "train")
FAULTS: tuple[Fault, ...] = (429, 503, CUT, DROP, 500, LAG, 408, 502)


@pytest.fixture
def proxy(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    server = GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    proxy = FaultyProxy(server.url)
    try:
        server.create_bucket("runs")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        # gcsfs tries six times by itself, over half a minute.
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=_short_sleep))
        yield proxy
    finally:
        proxy.close()
        server.kill()


async def _short_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / 100)


def words(folder: Path, name: str) -> list[str]:
    cache = f"run.cache_dir={folder / 'cache'}"
    return ["-c", str(folder / "run.yaml"), "train.epochs=1", cache, f"run.uri=gs://runs/{name}"]


def test_a_store_that_fails_now_and_then_gives_the_same_bytes(
    trained: Path, folder: Path, proxy: FaultyProxy
) -> None:
    def fault(method: str, path: str) -> Fault:
        count = len(proxy.requests)
        kind = FAULTS[count // 9 % len(FAULTS)] if count % 9 == 8 else None
        return None if kind == LAG and not is_listing(path) else kind

    proxy.fault = fault
    for stage in STAGES:
        for _ in range(4):  # a listing that lags may hide the work of this process: 75
            code = main([stage, *words(folder, "shaky")])
            assert code in (0, 75)
            if not code:
                break
        before, after = (read_manifest(uri, stage) for uri in (f"{trained}/run", "gs://runs/shaky"))
        assert before.content_hash == after.content_hash
    assert len({*proxy.injected()} - {LAG}) == len(FAULTS) - 1
    proxy.fault = lambda method, path: None
    assert verify_run("gs://runs/shaky").problems == ()


@pytest.mark.parametrize(("status", "code"), [(401, 2), (403, 2), (503, 75), (429, 75)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_store_that_fails_for_good_ends_a_stage_with_one_line(
    folder: Path,
    proxy: FaultyProxy,
    stage: Stage,
    status: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As tokens expire, after some requests that pass; and then it is well again."""
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "1")
    for earlier in STAGES[: STAGES.index(stage)]:
        assert main([earlier, *words(folder, stage)]) == 0
    first = len(proxy.requests) + 12
    proxy.fault = lambda method, path: status if len(proxy.requests) >= first else None
    capsys.readouterr()
    soon = "run.claim_seconds=4"  # a claim that could not be given up is waited for
    assert main([stage, *words(folder, stage), soon]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert "gs://runs/" in line and "(fix: " in line
    proxy.fault = lambda method, path: None
    assert find_manifest(f"gs://runs/{stage}", stage) is None
    assert main([stage, *words(folder, stage), soon]) == 0

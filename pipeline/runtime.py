"""Where a stage runs: in this process, or in the actors of a Ray cluster.

The stages know nothing of it: every process that runs one claims shards, commits them, and finishes
the stage when all are committed (store/claims.py).

    driver    expected shards ── committed so far ── … ── manifest        progress, dead workers
                  │ starts            ▲ one listing now and then
    actors        ├─► stage.run ── claim ── make ── commit ──┐            the model loaded once,
                  └─► stage.run ── claim ── make ── commit ──┴─► store    no more claimed than held

Where training follows features (train.follow), both are started together, as processes of their
own; when one fails, the other is ended as well.

An actor is a process that runs the stage, like one started by hand. Ray places it, reports when it
died, and carries its error back; its claims are in the store, so that actors, pods and processes
started by hand can share one stage, and a driver that is killed loses nothing.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pipeline.config import RunConfig, take_settings
from pipeline.console import notice, on_terminal, output, progress_bar
from pipeline.errors import (
    ConfigError,
    Eagle3Error,
    MissingPackage,
    StageEnded,
    WorkersDied,
    memory_cause,
    out_of_memory,
)
from pipeline.records import Manifest, Stage
from pipeline.store.manifest import find_manifest, read_manifest, stage_location
from pipeline.store.shards import SHARDS, committed
from pipeline.store.stage_run import open_stage
from pipeline.telemetry import metrics_of

#: The package of each stage; `eval` would shadow a builtin.
ROOMS: dict[Stage, str] = {
    "synth": "synth",
    "features": "features",
    "train": "train",
    "eval": "serve_eval",
}
#: Stages of many shards, which any number of processes can share.
SHARED: tuple[Stage, ...] = ("synth", "features")
#: Seconds between two looks at the processes of stages.
_CHILDREN = 0.2
#: Seconds between two listings of the store.
_POLL = 2.0
#: Seconds to reach a cluster's port.
_CONNECT = 20.0
#: Seconds that workers have to end once the stage is finished: one that is stopped never does.
_LINGER = 30.0
#: Seconds without the cluster's head. After a minute Ray itself would end this process, with 1.
_HEADLESS = 20.0
#: Workers that may die in a row without a shard committed between them.
_DEATHS = 3
#: Variables that a worker takes over from the driver; the rest are its machine's.
_INHERITED = ("EAGLE3_", "STORAGE_EMULATOR_HOST", "GCSFS_")


def run(config: RunConfig, stage: Stage) -> Manifest:
    """Run `stage` as `run.runtime` says. Raises Eagle3Error for whatever the user can fix."""
    if config.run.runtime == "ray" and stage in SHARED:
        return _run_on_ray(config, stage)
    with metrics_of(config.run, stage):
        try:
            module = importlib.import_module(f"pipeline.{ROOMS[stage]}.stage")
            manifest: Manifest = module.run(config)
        except Exception as error:
            if (cause := memory_cause(error)) is None:
                raise
            raise out_of_memory(cause, where=stage) from error
    return manifest


def run_side_by_side(config: RunConfig, stages: Sequence[Stage]) -> list[Manifest]:
    """Run `stages` in processes of their own; when one fails, or this one is stopped, all end.

    Raises StageEnded with the exit code of the first that failed.
    """
    uri = config.run.uri
    open_stage(config, "features", read_manifest(uri, "synth"))  # training looks at what it holds
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        json.dump(config.model_dump(mode="json"), file)  # which is YAML
        file.flush()
        running = {stage: _start_stage(stage, file.name) for stage in stages}
        try:
            while running:
                time.sleep(_CHILDREN)
                for stage, process in list(running.items()):
                    code = process.poll()
                    if code:
                        problem = f"{stage} ended with exit code {code}; its error is above"
                        fix = "see there, and run the same command again"
                        code = 128 - code if code < 0 else code
                        raise StageEnded(problem, where=uri, fix=fix, exit_code=code)
                    if code == 0:
                        del running[stage]
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
    return [read_manifest(uri, stage) for stage in stages]


def _start_stage(stage: Stage, config: str) -> subprocess.Popen[str]:
    """Its lines are passed on one by one: two bars would draw over each other."""
    pipe = subprocess.PIPE if on_terminal() else None
    words = [sys.executable, "-m", "pipeline.cli", stage, "-c", config]
    process = subprocess.Popen(words, stdout=pipe, text=True)
    if process.stdout is not None:
        threading.Thread(target=_pass_on, args=(process.stdout,), daemon=True).start()
    return process


def _pass_on(lines: Iterable[str]) -> None:
    for line in lines:
        output.write(line)
        output.flush()


class Worker:
    """One process of a stage."""

    def __init__(self, directory: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        with suppress(OSError):  # a node without it has what the configuration names elsewhere
            os.chdir(directory)

    def run(self, config: RunConfig, stage: Stage) -> Manifest:
        """The shards that this process claims; `config.run.runtime` is local."""
        return run(config, stage)


def _run_on_ray(config: RunConfig, stage: Stage) -> Manifest:
    """Run `stage` in `run.ray.workers` actors and wait for its manifest.

    Raises what the stage raises, WorkersDied when actors die one after the other, ConfigError where
    the cluster cannot hold one, and MissingPackage without ray.
    """
    ray = _ray()
    take_settings(config.run)
    if config.run.shard:
        problem, fix = "with run.runtime=ray workers claim their shards", "leave run.shard out"
        raise ConfigError(problem, where="config: run.shard", fix=fix)
    _connect(ray)
    try:
        return _Driver(ray, config, stage).run()
    finally:
        ray.shutdown()


class _Driver:
    def __init__(self, ray: Any, config: RunConfig, stage: Stage) -> None:
        self._ray, self._config, self._stage = ray, config, stage
        here = config.run.model_copy(update={"runtime": "local"})
        self._worker_config = config.model_copy(update={"run": here})
        self._folder = stage_location(config.run.uri, stage).child(SHARDS)
        self._running: dict[Any, Any] = {}  # result → actor
        self._deaths = 0
        # Ray's client names an address of the cluster's own network, and misses its server itself.
        by_client = os.environ.get("RAY_ADDRESS", "").startswith("ray://")
        self._head = None if by_client else ray.get_runtime_context().gcs_address
        self._head_seen = time.monotonic()

    def run(self) -> Manifest:
        count = self._count()
        for _ in range(count):
            self._start()
        notice(self._stage, f"{count} workers on Ray")
        try:
            with progress_bar(self._stage, unit="shards", total=None) as bar:
                seen, ends = 0, math.inf
                while self._running and time.monotonic() < ends:
                    self._look_for_head()
                    done, _ = self._ray.wait(list(self._running), timeout=_POLL)
                    now = len(committed(self._folder.names()))
                    bar.advance(now - seen)
                    if now > seen:
                        seen, self._deaths = now, 0
                    for result in done:
                        self._end(result)
                    if ends == math.inf and find_manifest(self._config.run.uri, self._stage):
                        ends = time.monotonic() + _LINGER
        finally:
            for actor in self._running.values():
                self._ray.kill(actor)
        manifest = find_manifest(self._config.run.uri, self._stage)
        assert manifest, "a worker that ends without an error has seen the manifest"
        rows = f"{manifest.rows:,} samples, {manifest.tokens:,} tokens"
        notice(self._stage, f"{rows} in {len(manifest.shards)} shards")
        return manifest

    def _look_for_head(self) -> None:
        """Raises WorkersDied where it has been gone for a while."""
        if self._head is None:
            return
        try:
            _reach(self._head)
        except OSError as error:
            if time.monotonic() - self._head_seen > _HEADLESS:
                problem = f"the head of the cluster has gone: {error}"
                fix = "run the same command again when it is back; what is committed stays"
                raise WorkersDied(problem, where=f"Ray at {self._head}", fix=fix) from None
        else:
            self._head_seen = time.monotonic()

    def _count(self) -> int:
        """`run.ray.workers`, or as many as fit into the cluster."""
        section, free = self._config.run.ray, self._ray.cluster_resources()
        fits = [free.get("CPU", 0) // section.cpus] if section.cpus else []
        fits += [free.get("GPU", 0) // section.gpus] if section.gpus else []
        room = int(min(fits)) if fits else 1
        if room < 1:
            has = f"the cluster has {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
            fix = "lower run.ray.cpus or run.ray.gpus, or use a larger cluster"
            raise ConfigError(f"no worker fits: {has}", where="config: run.ray", fix=fix)
        return section.workers or room

    def _start(self) -> None:
        section = self._config.run.ray
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(_INHERITED)
        }
        actor = (
            self._ray.remote(Worker)
            .options(num_cpus=section.cpus, num_gpus=section.gpus)
            .remote(os.getcwd(), environment)
        )
        self._running[actor.run.remote(self._worker_config, self._stage)] = actor

    def _end(self, result: Any) -> None:
        """A worker ended: its error ends the stage, its death starts another worker."""
        actor = self._running.pop(result)
        errors = self._ray.exceptions
        try:
            self._ray.get(result)
        except errors.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, Eagle3Error) else error from None
        except errors.RayError as error:  # the process or its node is gone
            self._deaths += 1
            reason = str(error).strip().splitlines()[0]
            if self._deaths >= _DEATHS:
                problem = f"{self._deaths} workers died and no shard was committed: {reason}"
                fix = "check the workers' logs in Ray, then run the same command again"
                raise WorkersDied(problem, where=self._folder.uri, fix=fix) from None
            notice(self._stage, f"a worker died, starting another: {reason}")
            self._start()
        else:
            self._ray.kill(actor)


def _connect(ray: Any) -> None:
    """To $RAY_ADDRESS, else to a cluster of this machine alone."""
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address and re.fullmatch(r"[^/]+:\d+", address):  # Ray itself tries for six minutes
            _reach(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"no Ray cluster answers: {' '.join(str(error).split())[:200]}"
        fix = "start one with `ray start --head`, or correct RAY_ADDRESS"
        raise WorkersDied(problem, where=f"Ray at {address or 'local'}", fix=fix) from None


def _reach(address: str) -> None:
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        problem, fix = f"run.runtime=ray needs ray: {error}", "pip install 'eagle3[ray]'"
        raise MissingPackage(problem, where="config: run.runtime", fix=fix) from None
    return ray

"""Who is making which shard, so that processes share the work of a stage.

    <stage>/claims/NAME.0000.json   created exclusively by the process that makes the shard, and
                                    written again while it does, so that its date stays young
                   NAME.0001.json   the next process's, once the first has grown old; and so on

The guarantee is the commit's (shards.py): a claim that is taken over too early costs work and
nothing else. A claim's age is the difference of two times of the store, so that no two machines'
clocks are compared. Of a process on this very machine it is known whether it is still there.

    names     a b c d e f g h …      all start at the front; who meets another's claim goes on from
    process 1 ▐a▌▐b▌▐e▌              anywhere, so that processes seldom meet twice
    process 2 ▐c▌       ▐g▌
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from pipeline.config import RunSection
from pipeline.console import notice
from pipeline.errors import Eagle3Error
from pipeline.records import canonical_json
from pipeline.store.location import Location
from pipeline.store.stage_run import StageRun

CLAIMS = "claims"
#: A claim is renewed so many times before it counts as abandoned.
_RENEWALS = 4
#: Seconds of the first wait for shards that others are making; waits double.
_FIRST_WAIT = 0.25


def make_shards(
    stage_run: StageRun,
    names: Sequence[str],
    run: RunSection,
    make: Callable[[Iterator[str]], None],
    others: Callable[[set[str]], None] = lambda names: None,
) -> None:
    """Have `make` commit those of the shards `names` that are this process's to make.

    With `run.shard` those are every n-th. Otherwise `make` is given what can be claimed, until all
    are committed, by whomever; it commits every name that it takes. `others` is told which shards
    other processes have committed meanwhile.
    """
    if run.shard:
        own = (name for index, name in enumerate(names) if run.owns(index))
        make(name for name in own if name not in stage_run.committed)
        return
    wait, told = _Wait(run.claim_seconds), False
    with Claims(stage_run.location, run.claim_seconds) as claims:
        while missing := sum(name not in stage_run.committed for name in names):
            taken = _Taken(claims, stage_run, names)
            make(iter(taken))
            claims.release_all()
            if taken.count:
                wait = _Wait(run.claim_seconds)
            else:
                if not told:
                    notice(stage_run.stage, f"waiting for {missing} shards of other processes")
                    told = True
                wait.sleep()
            others(stage_run.refresh())


class _Wait:
    """Pauses that double, up to the time in which a claim is renewed."""

    def __init__(self, claim_seconds: float) -> None:
        self._seconds, self._most = _FIRST_WAIT, claim_seconds / _RENEWALS

    def sleep(self) -> None:
        time.sleep(min(self._seconds, self._most))
        self._seconds *= 2


class _Taken:
    """Shards that are claimed one by one, each when it is asked for."""

    def __init__(self, claims: Claims, stage_run: StageRun, names: Sequence[str]) -> None:
        self.count = 0
        self._claims, self._stage_run = claims, stage_run
        self._names = deque(name for name in names if name not in stage_run.committed)

    def __iter__(self) -> Iterator[str]:
        alone = True
        while self._names:
            self._claims.release(self._stage_run.committed)
            name = self._names.popleft()
            if name in self._stage_run.committed:
                continue
            if self._claims.take(name):
                # It may have been committed, and its claim released, since this process looked.
                if not self._stage_run.is_committed(name):
                    self.count += 1
                    yield name
            elif alone:
                alone = False
                self._names.rotate(random.randrange(len(self._names) + 1))


class Claims:
    """The claims of this process in the stage at `location`, renewed in the background.

    After `seconds` without renewal a claim belongs to whoever creates the next one.
    """

    def __init__(self, location: Location, seconds: float) -> None:
        self._folder, self._seconds = location.child(CLAIMS), seconds
        self._held: dict[str, str] = {}  # shard → file
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._own = canonical_json(
            {
                "claim": secrets.token_hex(8),
                "host": socket.gethostname(),
                "machine": _machine(),
                "pid": os.getpid(),
            }
        ).encode()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()
        with suppress(Eagle3Error):  # a claim that stays grows old
            self.release_all()

    def wait_for(self, name: str, is_done: Callable[[], bool]) -> None:
        """Until some process has done what `name` stands for, or it is this one's to do."""
        wait = _Wait(self._seconds)
        while not is_done() and not self.take(name):
            wait.sleep()

    def take(self, name: str) -> bool:
        """Whether shard `name` is now this process's to make."""
        number = 0
        while True:
            file = f"{name}.{number:04d}.json"
            there = self._folder.create(file, self._own)
            if there == self._own:
                with self._lock:
                    self._held[name] = file
                self._renew_in_background()
                return True
            if not self._is_abandoned(file, there):
                return False
            number += 1

    def release(self, names: set[str]) -> None:
        """Give up the claims on shards in `names`."""
        for name in [name for name in self._held if name in names]:
            with self._lock:
                file = self._held.pop(name)
                for number in range(int(file.split(".")[-2]) + 1):  # its own, and those before it
                    self._folder.delete(f"{name}.{number:04d}.json")

    def release_all(self) -> None:
        self.release(set(self._held))

    def _is_abandoned(self, file: str, data: bytes) -> bool:
        """Whether the claim that holds `data` is nobody's any more."""
        with suppress(ValueError, KeyError, TypeError):
            holder = json.loads(data)
            if holder["machine"] == _machine() and not Path(f"/proc/{int(holder['pid'])}").exists():
                return True
        info = self._folder.info_if_there(file)
        if info is None or info.modified is None:
            return False  # released, so whoever looks next can take it
        return self._folder.now() - info.modified > self._seconds

    def _renew_in_background(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="claims", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / _RENEWALS):
            for name in list(self._held):
                with self._lock:
                    if name not in self._held:
                        continue
                    try:
                        self._folder.write(self._held[name], self._own)
                    except Eagle3Error as error:  # the shard may now be made twice, and no worse
                        notice("storage", f"a claim could not be renewed: {error}")


def _machine() -> str:
    """The same for two processes only if each can see whether the other runs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)

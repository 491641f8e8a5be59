"""Acceptance in the loop: the bundled decoder decodes fixed held-out samples with the present head.

    held-out sample    <user> What is 2+2? <assistant> | 4 <end>
                       └──────── request ────────────┘   what it said then is not needed

    selecting half     decoded every train.evaluate_every steps: which head is exported
    reporting half     decoded once, with that head, when training is over: the τ on its card

Decoding is greedy, so the replies are the target's own whatever the head proposes; only the number
of rounds changes, and τ of the same head is the same number every time.

The round in which a reply ends may emit more than the reply takes. It counts with all of it:

    limit of 8 tokens    1 │ 2 3 4 │ 5 6 │ 7 8 9 10     prefill's token, then three rounds
                                               └──┘     beyond the limit: τ is 9 / 3, not 7 / 3

A round is drafted and verified before anyone knows that the reply ends in it, so short replies then
have the τ of long ones, 1 + α₁ + α₁α₂ + …; with what the reply takes every last round would be too
short, by more the better the head. What follows a stop token is the target's own choice, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.console import notice
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request, Statistics, pool_acceptance
from pipeline.errors import ConfigError, TargetError
from pipeline.heads.base import DraftShape
from pipeline.heads.registry import algorithm_of, empty_head
from pipeline.learning.corpus import HeldOut
from pipeline.target.open import Target
from pipeline.train.progress import Decoded

#: Requests decoded together. Acceptance does not depend on it.
_SLOTS = 8
#: A standard error of τ that needs no notice.
PRECISE = 0.02


class Evaluator:
    """The target in memory, and the requests. Weights of the head come with every call."""

    def __init__(
        self,
        target: Target,
        shape: DraftShape,
        section: TrainSection,
        held_out: Sequence[HeldOut],
        device: torch.device,
    ) -> None:
        """Load the target; the first half of `held_out` selects.

        Raises UnsupportedModel for what the decoder does not run.
        """
        contract, stop_ids = target.contract, target.template().stop_ids
        most = section.evaluate_tokens
        self._tree = section.evaluate_tree
        requests = [
            Request(f"{number} {item.sample_id}", item.prompt_ids, most, stop_ids)
            for number, item in enumerate(held_out)
        ]
        self._selecting = requests[: len(requests) // 2]
        self._reporting = requests[len(requests) // 2 :]
        self._model = DecoderModel.load(
            target.directory,
            contract.capture_layers,
            device=device,
            dtype=target.dtype,
            max_length=max(len(item.prompt_ids) for item in held_out) + most,
        )
        self._head = empty_head(shape)

    def select(self, weights: Mapping[str, Tensor]) -> Decoded:
        """Decode the selecting half with a head of these weights (names as in its directory)."""
        return self._decode(self._selecting, weights)

    def report(self, weights: Mapping[str, Tensor]) -> Decoded:
        """Decode the reporting half with these weights as a head's directory stores them."""
        stored = {name: _as_stored(tensor) for name, tensor in weights.items()}
        return self._decode(self._reporting, stored)

    def _decode(self, requests: Sequence[Request], weights: Mapping[str, Tensor]) -> Decoded:
        self._head.load_state_dict(weights)
        drafting = algorithm_of(self._head).drafting
        drafter = drafting.make_drafter(self._head, self._model, self._tree)
        engine = Engine(self._model, drafter=drafter, slots=min(_SLOTS, len(requests)))
        done: dict[str, Statistics] = {}
        for completion in engine.generate(requests):
            if error := completion.error:
                sample_id = completion.request_id.partition(" ")[2]
                raise TargetError(error.what, where=f"held-out sample {sample_id}", fix=error.fix)
            done[completion.request_id] = completion.statistics
        return count(done[request.request_id] for request in requests)


def count(requests: Iterable[Statistics]) -> Decoded:
    """What they emitted, a last round's tokens beyond the end included."""
    done = list(requests)
    return Decoded(
        tokens=tuple(sum(each.reached) for each in done),
        rounds=tuple(each.rounds for each in done),
        alpha=pool_acceptance(done).alpha,
    )


def _as_stored(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def advise(decoded: Decoded) -> None:
    """Say how many samples a precise τ takes, when this one is not; errors fall as 1/√samples."""
    error, samples = decoded.tau_error, len(decoded.rounds)
    if error > PRECISE:
        needed = math.ceil(samples * (error / PRECISE) ** 2)
        tau = f"τ of {samples} held-out samples is {decoded.tau:.2f} with a standard error of"
        fix = f"train.evaluate_prompts of about {needed:,} would make it {PRECISE}"
        notice("train", f"{tau} {error:.2f}; {fix}")


def check_settings(section: TrainSection) -> None:
    """Raise ConfigError for settings of the evaluation that contradict each other."""
    if section.early_stop and not section.evaluate_every:
        problem = "needs train.evaluate_every, which is not set"
        fix = "set train.evaluate_every to a number of steps"
        raise ConfigError(problem, where="train.early_stop", fix=fix)

"""A group of processes over gloo: `python -m tests.decoder.divided SIZE FOLDER`.

Each decodes what test_divided.py compares, and leaves FOLDER/RANK.pt: name → what came out. They
are forked, so that libraries are loaded once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from transformers import AutoConfig, LlamaConfig

from bench.random_target import random_model
from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.parallel import LayerDivision, TensorGroup
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.decoder.request import Request
from pipeline.decoder.round import draft_tree
from pipeline.tuning.cost import open_batch
from pipeline.tuning.verification import log_probabilities
from tests.decoder.random_drafters import DRAFTERS, every_drafter
from tests.interpreter import remember

CPU = torch.device("cpu")
TREE = TreeSection(top_k=2, steps=3, nodes=6)
PROMPT, REPLY = tuple(range(3, 80)), (5, 8, 9, 7, 9, 3)
#: Eight query heads in two groups, which four ranks share two by two.
FAMILY: dict[str, Any] = {
    "vocab_size": 101,  # no multiple of the ranks
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_SMALL = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
)
#: With heads of which products are fused, and little to do for an interpreter.
FUSED: dict[str, Any] = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


#: By request id.
Replies = dict[str, tuple[int, ...]]


def requests(temperature: float = 0.0) -> list[Request]:
    """Of several lengths, more than there are slots."""
    prompts = ((3, 1, 4), tuple(each % 32 for each in PROMPT), (9, 2, 6, 5), (1, 2))
    return [
        Request(str(n), prompt, 12, (31,), temperature=temperature, seed=n)
        for n, prompt in enumerate(prompts)
    ]


def replies(engine: Engine, temperature: float = 0.0) -> Replies:
    return {each.request_id: each.token_ids for each in engine.generate(requests(temperature))}


def short_reply(engine: Engine) -> tuple[int, ...]:
    """For what an interpreter runs."""
    (done,) = engine.generate([replace(requests()[0], max_new_tokens=5)])
    return done.token_ids


def small_model(
    ops: TorchOps | None = None, group: TensorGroup | None = None, **fields: Any
) -> DecoderModel:
    """A random target whose weights are the same in every process."""
    config = LlamaConfig(**{**_SMALL.to_dict(), **fields})
    sizes: dict[str, Any] = {"max_length": 110, "scale": 0.5, "ops": ops, "group": group}
    return random_model(config, (0, 1, 2), device=CPU, dtype=torch.float32, **sizes)


def family_model(directory: Path, group: TensorGroup | None = None) -> DecoderModel:
    """What test_divided.py has left there."""
    kind: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "max_length": 200}
    return DecoderModel.load(directory, (1, 3, 4), group=group, **kind)


def of_drafters(
    model: DecoderModel, temperatures: Sequence[float] = (0.0, 1.0)
) -> Iterator[tuple[str, Replies]]:
    """What a target says plainly, and with every drafter; in overlapped rounds, too."""
    for temperature in temperatures:
        plain = Engine(model, slots=2, prefill_tokens=32)
        yield f"plain {temperature:g}", replies(plain, temperature)
        for name, make in every_drafter(model).items():
            engine = Engine(model, drafter=make(TREE), slots=2, prefill_tokens=32)
            yield f"{name} {temperature:g}", replies(engine, temperature)
    drafter = every_drafter(model)[DRAFTERS[0]](TREE)
    engine = Engine(model, drafter=drafter, slots=4, buckets=(2, 4), overlap=True)
    yield "overlapped", replies(engine)


class Wrong(TensorGroup):
    """Ranks that do not do what they have to."""

    def least(self, value: int, device: torch.device) -> int:
        return value


class Unsummed(Wrong):
    def sum(self, part: Tensor) -> Tensor:
        return part


class SummedTwice(Wrong):
    def sum(self, part: Tensor) -> Tensor:
        return super().sum(super().sum(part))


class OtherOrder(Wrong):
    def gather(self, part: Tensor) -> Tensor:
        return super().gather(part).roll(part.shape[1], 1)


@contextmanager
def _sliced_by(fault: Callable[[dict[str, Tensor]], object]) -> Iterator[None]:
    """Every slice of a layer, spoilt."""
    right = LayerDivision.slice

    def slice_layer(division: LayerDivision, layer: Any) -> dict[str, Tensor]:
        sliced = right(division, layer)
        fault(sliced)
        return sliced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerDivision, "slice", slice_layer)
        yield


def of_faults(directory: Path, group: TensorGroup) -> Iterator[tuple[str, object]]:
    """Log-probabilities of a reply that are not the target's."""

    def scores(group: TensorGroup) -> Tensor:
        return log_probabilities(family_model(directory, group), PROMPT, REPLY)

    for kind in (Unsummed, SummedTwice, OtherOrder):
        yield kind.__name__, scores(kind(group.rank, group.size))
    shift = {"key heads": "self_attn.k_proj.weight", "output columns": "self_attn.o_proj.weight"}
    for name, tensor in shift.items():
        axis = int(tensor.endswith("o_proj.weight"))

        def spoil(layer: dict[str, Tensor], tensor: str = tensor, axis: int = axis) -> None:
            layer[tensor] = layer[tensor].roll(1, axis)

        with _sliced_by(spoil):
            yield name, scores(group)
    whole = "self_attn.o_proj.bias"
    with _sliced_by(lambda layer: layer.setdefault(whole, torch.ones(FAMILY["hidden_size"]))):
        yield "a bias on every rank", scores(group)


class Erring(TorchOps):
    """Chooses another token than the best."""

    def argmax(self, logits: Tensor) -> Tensor:
        return (super().argmax(logits) + 1) % logits.shape[-1]


def of_disagreement(group: TensorGroup) -> Iterator[tuple[str, object]]:
    """Ranks that draft different trees: rank 0's is taken."""
    model = small_model(group=group)
    drafter: Any = every_drafter(model)["ngram"](TREE)
    propose = drafter.candidates

    def candidates(*arguments: Any) -> Candidates:
        proposed: Candidates = propose(*arguments)
        tokens = torch.full_like(proposed.tokens, 7 + group.rank)
        scores = torch.zeros_like(proposed.scores) - group.rank
        return proposed._replace(tokens=tokens, scores=scores)

    drafter.candidates = candidates
    yield "disagreeing", replies(Engine(model, drafter=drafter, slots=2))
    erring = small_model(Erring() if group.rank else TorchOps(), group)
    yield "choosing otherwise", replies(Engine(erring, slots=2))
    with pytest.MonkeyPatch.context() as patch:  # a rank with less memory
        patch.setattr(
            "pipeline.decoder.engine.pages_that_fit", lambda *args, **kwargs: 20 - group.rank
        )
        yield "pages", Engine(model).pools.shared.pages
    longer, shorter = (log_probabilities(model, PROMPT[:9], reply) for reply in (REPLY, REPLY[:3]))
    yield "other tokens beside", (longer[:3], shorter)
    memory = open_batch(model, drafter, 1, 8, emitted=4)
    for name, agreeing in (("agreed", group), ("not agreed", None)):
        tree, _ = draft_tree(model.ops, drafter, *memory, TREE, agreeing)
        yield f"{name} tree", tree.tokens


def everything(group: TensorGroup, folder: Path) -> Iterator[tuple[str, object]]:
    """All that test_divided.py compares."""
    for directory in sorted(each for each in folder.iterdir() if each.is_dir()):
        model = family_model(directory, group)
        name = directory.name
        assert AutoConfig.from_pretrained(directory).num_attention_heads % group.size == 0
        yield f"scores {name}", log_probabilities(model, PROMPT, REPLY)
        request = Request("0", PROMPT, 12, ())
        drafter = every_drafter(model)[DRAFTERS[0]](TREE)
        for way, engine in (("plain", Engine(model)), ("tree", Engine(model, drafter=drafter))):
            (done,) = engine.generate([request])
            yield f"{way} {name}", done.token_ids
    temperatures = (0.0, 1.0) if group.size == 2 else (0.0,)
    yield from of_drafters(small_model(group=group), temperatures)
    if group.size == 2:
        for ops in (TorchOps(), EagerOps()):
            model, name = small_model(ops, group), type(ops).__name__
            drafter = every_drafter(model)[DRAFTERS[0]](TREE)
            yield f"plain by {name}", replies(Engine(model, slots=2))
            yield f"tree by {name}", replies(Engine(model, drafter=drafter, slots=2))
        model = small_model(TritonOps(torch.float32), group, **FUSED)
        drafter = every_drafter(model)[DRAFTERS[0]](TREE)
        yield "tree by TritonOps", short_reply(Engine(model, drafter=drafter))
        for name, came_out in of_disagreement(group):
            yield name, came_out
        for name, came_out in of_faults(folder / "biased", group):
            yield f"fault: {name}", came_out


def be_rank(rank: int, size: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", store, rank=rank, world_size=size)
    with torch.inference_mode():
        done = dict(everything(TensorGroup(rank, size), folder))
    torch.save(done, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def main(size: int, folder: Path) -> int:
    """How many have failed."""
    torch.set_num_threads(1)
    remember()
    started = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            be_rank(rank, size, folder)
            return 0
        started.append(pid)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in started)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))

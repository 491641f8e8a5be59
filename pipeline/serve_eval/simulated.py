"""`eagle3 simulate`: speed under load at acceptance lengths that are imposed, not measured.

What a head of another τ would bring on this machine can be seen before it is trained: rounds draft,
verify and extend as ever, and accept as many drafted tokens as they are told. The text is not the
target's. Nothing of it enters a run or a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from pydantic import Field

from pipeline.config import RunConfig, prepare_process
from pipeline.console import console, long_step, notice
from pipeline.errors import ConfigError
from pipeline.heads.base import DraftingHead
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import random_init, shape_for
from pipeline.heads.registry import open_head
from pipeline.records import Record
from pipeline.reports import LoadCurve
from pipeline.serve_eval.load import (
    Workload,
    filled,
    filled_length,
    fitting_contexts,
    measure_workloads,
)
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import first_question, load_evaluation_prompts, readable
from pipeline.store.location import Location
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.target.arithmetic import decoder_arithmetic
from pipeline.target.open import Target, open_target
from pipeline.tuning.verification import pattern_of


class SimulatedPoint(NamedTuple):
    """One concurrency at one imposed τ."""

    context: int | None  # None: prompts as they are
    concurrency: int
    asked: float
    reached: float  # what trees were deep enough for; a reply's last round is cut
    plain: float  # tokens/s
    simulated: float  # tokens/s

    @property
    def gain(self) -> float:
        return self.simulated / self.plain

    @property
    def pays_from(self) -> float:
        """τ at which drafting would be as fast as plain decoding: what a round costs, in tokens."""
        return self.reached / self.gain


class SimulatedLoad(Record):
    """What `eagle3 simulate --json` writes."""

    simulated: bool = Field(True, frozen=True)
    """Always: no acceptance in it was measured."""
    target: str
    """As in target.source."""
    drafter: str
    """Its name."""
    head: str
    """Directory of the head that drafted; random for one that was drawn, empty without."""
    tree: dict[str, Any]
    """top_k, steps, nodes."""
    machine: str
    """Arithmetic and threads."""
    curves: tuple[LoadCurve, ...]
    """Pairs, plain and simulated, by context and imposed acceptance length."""

    def points(self) -> Iterator[SimulatedPoint]:
        """In the order of the curves."""
        for plain, simulated in zip(self.curves[::2], self.curves[1::2], strict=True):
            for before, after in zip(plain.points, simulated.points, strict=True):
                accepted = after.acceptance
                yield SimulatedPoint(
                    context=simulated.settings.get("context"),
                    concurrency=after.concurrency,
                    asked=simulated.settings["imposed_acceptance_length"],
                    reached=accepted.acceptance_length.value if accepted else 1.0,
                    plain=before.throughput,
                    simulated=after.throughput,
                )


def simulate(config: RunConfig, lengths: Sequence[float]) -> SimulatedLoad:
    """Every acceptance length of `lengths` at each concurrency and context of `eval.load`.

    Raises ConfigError for a length that the tree cannot give, and for `tree: auto`.
    """
    prepare_process(config.run)
    section = config.eval
    _check(config, lengths)
    if not section.load.concurrency:
        load = section.load.model_copy(update={"concurrency": (1,)})
        section = section.model_copy(update={"load": load})
    target = open_target(config.target, decoded=True)
    template = target.template(system_prompt=section.system_prompt)
    prompts, _ = readable(load_evaluation_prompts(config)[0], [template])
    longest = max(len(first_question(prompt, template).context) for prompt in prompts)
    with long_step("simulate", "loading the target"):
        head, named = _head(config, target)
        positions = head.shape.max_position_embeddings if head else target.positions
        longest += section.max_new_tokens
        own = Comparison(
            *(config, target, head, template),
            dtype=target.dtype,
            max_length=min(positions, max(longest, filled_length(section, positions))),
        )
    contexts = fitting_contexts(own, prompts, {"": template})[""]
    workloads = [
        Workload(
            {"imposed_acceptance_length": tau, **({"context": length} if length else {})},
            filled(contexts, length) if length else contexts,
            stop_ids=(),
            imposed=pattern_of(tau),
        )
        for length, tau in product(section.load.contexts or (None,), lengths)
    ]
    curves = measure_workloads(own, workloads, section, "simulate")
    arithmetic = decoder_arithmetic(own.model.ops, own.model.dtype, own.model.device)
    return SimulatedLoad(
        target=target.contract.source,
        drafter=section.drafter.name,
        head=named,
        tree=own.tree.model_dump(),
        machine=f"{arithmetic}, {arithmetic.threads} threads",
        curves=tuple(_renamed(curve) for curve in curves),
    )


def print_simulated(load: SimulatedLoad) -> None:
    """A row for each point."""
    from rich.table import Table

    shape = "/".join(str(load.tree[key]) for key in ("steps", "top_k", "nodes"))
    title = f"imposed acceptance, not measured: {load.drafter} {shape}"
    table = Table(title=title, title_justify="left", title_style="bold")
    names = ("context", "at a time", "τ asked", "τ reached", "plain tokens/s", "simulated")
    for name in (*names, "over plain", "pays from τ"):
        table.add_column(name, justify="right")
    for each in load.points():
        table.add_row(
            f"{each.context:,}" if each.context else "prompts",
            str(each.concurrency),
            f"{each.asked:.2f}",
            f"{each.reached:.2f}",
            f"{each.plain:,.1f}",
            f"{each.simulated:,.1f}",
            f"{each.gain:.2f}×",
            f"{each.pays_from:.2f}",
        )
    console.print(table)
    notice("simulate", "simulated: no head was evaluated, and nothing was stored in the run")


def _renamed(curve: LoadCurve) -> LoadCurve:
    name = "simulated" if curve.name == "speculative" else curve.name
    return curve.model_copy(update={"name": name})


def _check(config: RunConfig, lengths: Sequence[float]) -> None:
    tree = config.eval.tree
    if tree == "auto":
        problem = "tree: auto is picked by acceptance, of which there is none here"
        raise ConfigError(problem, where="eval.tree", fix="give top_k, steps and nodes")
    for tau in lengths:
        if not 1 <= tau <= 1 + tree.steps:
            problem = (
                f"a round of {tree.steps} steps emits 1 to {1 + tree.steps} tokens, not {tau:g}"
            )
            raise ConfigError(problem, where="--acceptance", fix="ask for less, or draft deeper")


def _head(config: RunConfig, target: Target) -> tuple[DraftingHead | None, str]:
    """`eval.head`, the run's own, or one of random weights; and where it is from."""
    section = config.eval
    if not section.drafter.needs_head:
        return None, ""
    if section.head or find_manifest(config.run.uri, "train"):
        own = stage_location(config.run.uri, "train").child("head")
        location = Location(section.head) if section.head else own
        return open_head(location, expected=target.contract)[0], location.uri
    asked = config.train.head_config
    if config.train.algorithm != "eagle3" or asked.heads > 1:
        problem = "there is no head, and only one of a single EAGLE-3 layer is drawn at random"
        raise ConfigError(problem, where="eval.head", fix="train it first, or name one")
    from transformers import AutoConfig

    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    shape = shape_for(
        HeadShape,
        AutoConfig.from_pretrained(target.directory).get_text_config(),
        draft_vocab_size=asked.draft_vocab_size,
        **{name: getattr(asked, name) for name in sizes},
    )
    head = Eagle3Head(shape)
    random_init(head, config.run.seed)
    head.set_vocabulary(torch.arange(asked.draft_vocab_size))
    notice("simulate", "no head yet: one of train.head_config's shape drafts at random")
    return head.to(torch.bfloat16), "random"

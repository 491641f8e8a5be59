"""Small runs over SmolLM2-135M with drafters of every kind, and reports that engines are held
against: in fp32 and in bf16.

Stages are kept in `.venvs/line`: the next call goes on from there. EAGLE3_HEAD=DIR takes a trained
EAGLE-3 head for the same target instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pipeline.api import run
from pipeline.config import LiveServerSection, load
from pipeline.exchange.export import export_head
from pipeline.exchange.imports import import_head
from pipeline.reports import REPORT, EvalReport, ServerFinding
from pipeline.serve_eval.servers.check import compare_golden, replay_rounds
from pipeline.serve_eval.servers.findings import SeenServer
from pipeline.target.open import open_target
from tests.engines.environments import ROOT
from tests.engines.servers import EngineServer

FOLDER = ROOT / ".venvs/line"
DEMO = ROOT / "configs/demo.yaml"
_TRAINING = (
    "run.threads=1",
    "synth.max_prompts=120",
    "synth.shard_prompts=120",
    "synth.max_new_tokens=96",
)


@dataclass(frozen=True)
class Drafter:
    """How a kind of head is trained, and what the decoder drafts with it."""

    name: str
    run: str  # its folder
    tree: str
    shapes: str = "[]"
    training: tuple[str, ...] = ()
    drafter: tuple[str, ...] = ()  # of evaluation, where it is not the EAGLE-3 head's

    @property
    def evaluation(self) -> tuple[str, ...]:
        """Settings of its reports."""
        return (
            "run.threads=1",
            f"eval.tree={self.tree}",
            f"eval.shapes={self.shapes}",
            "eval.hf_prompts=2",
            "eval.drafter.lookup=null",
            *self.drafter,
            *(each for each in self.training if each.startswith("target.")),
        )


_TREE, _CHAINS = "{top_k: 4, steps: 4, nodes: 8}", "{top_k: 1, steps: 7, nodes: 8}"
_SHAPES = f"[{_CHAINS}, {{top_k: 4, steps: 5, nodes: 8}}]"
EAGLE3 = Drafter("EAGLE-3", "run", _TREE, _SHAPES)
EAGLE31 = Drafter(
    "EAGLE-3.1",
    "eagle31",
    _TREE,
    _SHAPES,
    ("train.head_config.fc_norm=true", "train.head_config.norm_output=true"),
)
#: EAGLE3's head with servers' sliding window of 64 positions; some prompts are longer.
WINDOW = Drafter("EAGLE-3, sliding window", "window", _TREE, _SHAPES)
#: Reports of EAGLE3's head whose own rounds had a lookup beside it, as no server's have.
LOOKUP = Drafter("EAGLE-3, lookup", "run", _TREE, _SHAPES, drafter=("eval.drafter.lookup={}",))
BLOCKS = Drafter(
    "block drafter",
    "blocks",
    _CHAINS,
    training=(
        "train.algorithm=dflash",
        "train.head_config={}",
        "train.dflash={draft_vocab_size: 4096, intermediate_size: 768, block_size: 8, anchors: 64}",
        "train.dtype=float32",
    ),
    drafter=("eval.drafter.name=dflash",),
)


@dataclass(frozen=True)
class Line:
    """What the stages made."""

    target: Path  # a directory that engines open
    head: Path
    evaluation: tuple[str, ...]  # settings of its reports

    def report_in(self, dtype: str) -> EvalReport:
        """With the decoder in that type; minutes on a CPU, so each is made when it is asked for."""
        return _report(self.head, dtype, self.evaluation)

    @property
    def report(self) -> EvalReport:
        """In fp32."""
        return self.report_in("float32")

    @property
    def reports(self) -> dict[str, EvalReport]:
        """By the decoder's dtype."""
        return {dtype: self.report_in(dtype) for dtype in ("float32", "bfloat16")}

    def assert_same_rounds(self, head: Path, seen: SeenServer, folder: Path) -> None:
        """A server in fp32 with `head` takes the decoder's rounds for every prompt; for one of them
        one more or less where that is a matter of rounding. `folder` is for disturbed heads."""
        off = {}
        for name, ours in seen.expected.items():
            theirs = seen.reported[name]
            if theirs.rounds != ours.rounds:
                off[name] = theirs.rounds - ours.rounds
            else:
                assert theirs.tokens == ours.tokens, name
        assert [abs(each) for each in off.values()] in ([], [1]), off
        if off:
            assert off.keys() <= self.undecided(head, seen, folder), off

    def undecided(self, head: Path, seen: SeenServer, folder: Path) -> set[str]:
        """Golden prompts of which the decoder takes other rounds with a thousandth of noise in the
        weights of `head`.

        float32 leaves open which they take: at a few tokens states of two implementations differ by
        6e-4, and from float64 by as much (docs/capture.md).
        """
        golden, shape, names = self.report.golden, seen.shape, set[str]()
        assert golden is not None and shape is not None
        for seed in range(1, 4):
            noisy = _with_noise(head, folder / str(seed), seed)
            settings = [f"run.uri={folder}", f"eval.head={noisy}", "target.dtype=float32"]
            replayed = replay_rounds(load(DEMO, [*settings, *self.evaluation]), golden, shape)
            names |= {
                each.id
                for each in replayed.prompts
                if each.id in seen.expected
                and each.shapes[shape.label].rounds != seen.expected[each.id].rounds
            }
        return names

    def held_against(
        self, server: EngineServer, *, dtype: str = "float32", **section: object
    ) -> tuple[SeenServer, list[ServerFinding]]:
        """What check-serving finds, with the report in that type."""
        given = LiveServerSection.model_validate({"url": server.url, **section})
        return compare_golden(self.report_in(dtype), given, where="the report")


def make_line(drafter: Drafter = EAGLE3) -> Line:
    """Trains what is not there yet."""
    head = os.environ.get("EAGLE3_HEAD") if drafter in (EAGLE3, LOOKUP) else None
    target = open_target(load(DEMO).target).directory
    if drafter is WINDOW:
        head = str(_with_window(make_line().head, target, FOLDER / drafter.run))
    if head is None:
        uri = FOLDER / drafter.run
        settings = [f"run.uri={uri}", *_TRAINING, *drafter.training]
        run(load(DEMO, settings), "synth", "features", "train")
        head = str(uri / "train/head")
    return Line(target, Path(head), drafter.evaluation)


def _with_noise(head: Path, folder: Path, seed: int) -> Path:
    """A copy in float32 whose weights are each a thousandth off, more or less."""
    shutil.copytree(head, folder)
    torch.manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, each in tensors.items():
        if each.is_floating_point():
            tensors[name] = each.float() * (1 + 1e-3 * torch.randn(each.shape))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _with_window(head: Path, target: Path, folder: Path) -> Path:
    """The head in speculators' dialect, with a window in the fields of its configuration, imported
    as if others had trained it so."""
    shutil.rmtree(folder, ignore_errors=True)
    foreign, own = folder / "foreign", folder / "head"
    export_head(str(head), format="speculators", out=str(foreign), target=str(target))
    config = json.loads((foreign / "config.json").read_text())
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 64, "use_sliding_window": True}
    config["transformer_layer_config"] |= layer
    (foreign / "config.json").write_text(json.dumps(config))
    import_head(str(foreign), target=str(target), out=str(own))
    return own


@cache
def _report(head: Path, dtype: str, evaluation: tuple[str, ...]) -> EvalReport:
    # A head has one report of a kind here: other weights, place or settings, another directory.
    settings = [f"target.dtype={dtype}", f"eval.head={head}", *evaluation]
    weights = [_digest(head / name) for name in ("model.safetensors", "config.json")]
    where = FOLDER / f"{dtype}-{hashlib.sha256(repr((weights, settings)).encode()).hexdigest()[:8]}"
    run(load(DEMO, [f"run.uri={where}", *settings]), "eval")
    return EvalReport.parse((where / "eval" / REPORT).read_bytes(), where=REPORT, fix="")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()

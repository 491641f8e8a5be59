"""One cell of the leaderboard: a head of a row, a budget and a seed, and what it accepts.

    runs/leaderboard/data/<number>/{synth,features}    what rows with the same data share
                     <row>/<budget>-<seed>/{synth,features} ─► those; features of its own where
                                                       training follows, and so deletes states
                                           train/      a run like any other
                                           peer/       or what another trainer wrote
                                           head/       and that imported
                                           result.json rounds and tokens of each prompt

A cell with a result is done; one without continues where it was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from uuid import uuid4

from bench.leaderboard.experiment import Experiment, configured
from bench.leaderboard.peers import train_peer
from bench.leaderboard.results import CellResult, PromptResult
from bench.leaderboard.usage import Trained, Usage, children_usage, run_measured
from bench.report import commit, processor
from pipeline.config import (
    DrafterSection,
    RunConfig,
    SourceSpec,
    TreeSection,
    load,
    prepare_process,
)
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request, Statistics
from pipeline.drafters.registry import drafter_name, load_drafter
from pipeline.errors import ConfigError, StageConflict, TargetError
from pipeline.heads.registry import load_head
from pipeline.prompts import balanced, load_prompts
from pipeline.records import Manifest, Prompt, Stage, digest
from pipeline.runtime import run_side_by_side
from pipeline.serve_eval.questions import first_question
from pipeline.store.manifest import (
    Awaited,
    Begin,
    find_manifest,
    read_begin,
    read_manifest,
    stage_location,
)
from pipeline.target.arithmetic import pick_device
from pipeline.target.open import open_target

#: The tree that all heads are compared on.
TREE = TreeSection(top_k=4, steps=5, nodes=16)
#: Requests decoded together; acceptance does not depend on it.
_SLOTS = 8
RESULT = "result.json"
#: What rows share, and the file in its folder that says what it is made from before it is begun.
_DATA: tuple[Stage, ...] = ("synth", "features")
_PURPOSE = "purpose.json"


class Bench:
    """Where cells are, and what all have in common."""

    def __init__(
        self,
        base: Path,
        folder: Path,
        evaluation: Sequence[Path],
        *,
        common: Sequence[str],
        prompts_per_set: int,
        new_tokens: int,
        peer_python: Path | None = None,
    ) -> None:
        self._base, self._folder, self._common = base, folder, list(common)
        self._new_tokens, self._peer_python = new_tokens, peer_python
        self._questions = [
            (path.stem, prompt) for path in evaluation for prompt in _drawn(path, prompts_per_set)
        ]
        self._model: DecoderModel | None = None

    def result(self, experiment: Experiment, budget: int, seed: int) -> CellResult:
        """Of a cell, computed if it does not exist."""
        cell = self._folder / experiment.name / f"{budget}-{seed}"
        done, fix = cell / RESULT, f"delete {cell}, or give another --out"
        fixed = [f"run.uri={cell}", f"run.seed={seed}", f"train.data_tokens={budget}"]
        overrides = [*experiment.overrides(), *self._common, *fixed]
        config = configured(self._base, experiment, [*self._common, *fixed])
        if done.is_file():
            result = CellResult.parse(done.read_bytes(), where=str(done), fix=fix)
            evaluation = self._questions_digest(), TREE, self._new_tokens, experiment.peer
            changed = experiment.peer is None and _changes(config, cell, "train")
            if changed or evaluation != (
                result.questions,
                result.tree,
                result.new_tokens,
                result.peer,
            ):
                problem = "belongs to another row, data set or evaluation"
                raise StageConflict(problem, where=str(done), fix=fix)
            return result
        self._link_data(experiment, cell)
        if config.eval.drafter.lookup is not None:
            trained = self._head_of(experiment.against, cell)
        elif experiment.peer:
            trained = train_peer(config, experiment, self._peer_python)
        else:
            trained = self._train(config, overrides)
        result = self._measured(config, experiment, budget, seed, trained)
        partial = done.with_suffix(".partial")
        partial.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(done)
        return result

    def _link_data(self, experiment: Experiment, cell: Path) -> None:
        """Make synth and features once for all rows with the same data, and all their seeds."""
        config = configured(self._base, experiment, self._common)
        data = self._data(config)
        overrides = [*experiment.overrides(), *self._common]
        for stage in _DATA[:1] if config.train.follow else _DATA:
            home = (data / stage).resolve().parent  # samples may be another folder's
            if find_manifest(str(home), stage) is None:
                self._run(stage, [*overrides, f"run.uri={home}"])
            cell.mkdir(parents=True, exist_ok=True)
            link = cell / stage
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(data / stage, cell))

    def _data(self, config: RunConfig) -> Path:
        """The folder that has the stages of this configuration, or will have them.

        Processes that look at once agree on it: a folder says what it is for before it is there.
        """
        above = self._folder / "data"
        above.mkdir(parents=True, exist_ok=True)
        while True:
            # First, so that what another process makes meanwhile is seen below, or has this number.
            fresh = next(each for n in count() if not (each := above / str(n)).exists())
            same = [each for each in sorted(above.iterdir()) if _is_for(config, each, "synth")]
            for folder in same:
                if _is_for(config, folder, "features"):
                    return folder
            unnamed = self._folder / f".{uuid4().hex}"
            unnamed.mkdir()
            purpose = {stage: config.section_hash(stage) for stage in _DATA}
            (unnamed / _PURPOSE).write_text(json.dumps(purpose), encoding="utf-8")
            if same:  # states of another kind, of the same samples
                (unnamed / "synth").symlink_to(os.path.relpath(same[0] / "synth", fresh))
            with suppress(OSError):  # another process has taken the number, perhaps for the same
                return unnamed.rename(fresh)
            shutil.rmtree(unnamed)

    def _head_of(self, row: str, cell: Path) -> Trained:
        """The head that another row has trained on the same tokens, which must be measured."""
        other = self._folder / row / cell.name
        if not (other / RESULT).is_file():
            problem, fix = f"row {row} has no head for {cell.name} yet", f"add {row} to --rows"
            raise ConfigError(problem, where="--rows", fix=fix)
        own = CellResult.parse((other / RESULT).read_bytes(), where=str(other / RESULT), fix="")
        for name in ("train", "head"):  # a peer's is in the latter
            if (other / name).exists() and not (cell / name).is_symlink():
                (cell / name).symlink_to(os.path.relpath(other / name, cell))
        usage = Usage(own.cpu_hours, own.peak_gb)
        return Trained(usage, own.data_tokens, own.trained_tokens, own.parameters)

    def _train(self, config: RunConfig, overrides: Sequence[str]) -> Trained:
        usage = self._run("train", overrides)
        details = read_manifest(config.run.uri, "train").details
        counts = (int(details[name]) for name in ("data_tokens", "tokens", "parameters"))
        return Trained(usage, *counts)

    def _run(self, stage: Stage, overrides: Sequence[str]) -> Usage:
        """A stage as a process of its own, features beside a training that follows."""
        config = load(self._base, overrides)
        if stage == "train" and config.train.follow:
            before = children_usage()
            run_side_by_side(config, ("features", stage))
            return Usage(children_usage().cpu_hours - before.cpu_hours, None)
        command = [sys.executable, "-m", "pipeline.cli", stage, "-c", str(self._base), *overrides]
        return run_measured(command, os.environ)

    def _since(self) -> str:
        """The minute in which the folder was begun; written once."""
        path = self._folder / "since"
        if not path.exists():
            path.write_text(f"{datetime.now(UTC):%Y-%m-%d %H:%M}", encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def _questions_digest(self) -> str:
        return digest([f"{name}/{prompt.sample_id}" for name, prompt in self._questions])[:16]

    def _measured(
        self, config: RunConfig, experiment: Experiment, budget: int, seed: int, trained: Trained
    ) -> CellResult:
        prepare_process(config.run)
        head, _ = load_head(Path(config.run.uri) / ("head" if experiment.peer else "train/head"))
        target = open_target(config.target)
        template = target.template()
        requests = [
            Request(
                f"{name}/{prompt.sample_id}",
                first_question(prompt, template).context,
                self._new_tokens,
                template.stop_ids,
            )
            for name, prompt in self._questions
        ]
        layers = target.contract.capture_layers
        if self._model is None or self._model.stack.captured != layers:
            self._model = DecoderModel.load(
                target.directory,
                layers,
                device=pick_device(config.target.device),
                dtype=target.dtype,
                max_length=max(len(request.prompt_ids) for request in requests) + self._new_tokens,
            )
        section = DrafterSection(name=drafter_name(head), lookup=config.eval.drafter.lookup)
        factory = load_drafter(section, self._model, target, head)
        assert factory is not None
        engine = Engine(self._model, drafter=factory(TREE), slots=_SLOTS)
        done: dict[str, Statistics] = {}
        for completion in engine.generate(requests):
            if error := completion.error:
                raise TargetError(error.what, where=completion.request_id, fix=error.fix)
            done[completion.request_id] = completion.statistics
        return CellResult(
            row=experiment.name,
            budget=budget,
            seed=seed,
            peer=experiment.peer,
            data_tokens=trained.data_tokens,
            trained_tokens=trained.trained_tokens,
            cpu_hours=round(trained.usage.cpu_hours, 3),
            peak_gb=trained.usage.peak_gb and round(trained.usage.peak_gb, 2),
            parameters=trained.parameters,
            machine=processor(),
            since=self._since(),
            commit=commit(),
            questions=self._questions_digest(),
            tree=TREE,
            new_tokens=self._new_tokens,
            prompts=tuple(
                PromptResult(name=name, rounds=each.rounds, tokens=each.round_tokens)
                for name, each in sorted(done.items())
            ),
        )


def _is_for(config: RunConfig, folder: Path, stage: Stage) -> bool:
    """Whether a folder of data has a stage of this configuration, or will have it."""
    changes = _changes(config, folder, stage)
    if changes is not None:
        return not changes
    named = folder / _PURPOSE
    return named.is_file() and json.loads(named.read_bytes())[stage] == config.section_hash(stage)


def _changes(config: RunConfig, folder: Path, stage: Stage) -> dict[str, tuple[str, str]] | None:
    """What differs between `config` and what a stage in `folder` was begun with; None if none was.

    A key that is younger than the stage counts as the default that it has.
    """
    begun = read_begin(stage_location(str(folder), stage))
    if begun is None:
        return None
    above: dict[Stage, Stage] = {"features": "synth", "train": "features"}
    parent: Manifest | Awaited | None = None
    if stage == "train" and config.train.follow:  # it begins before its states are all there
        states = read_begin(stage_location(str(folder), "features"))
        parent = None if states is None else Awaited.of(states)
    elif stage in above:
        parent = find_manifest(str(folder), above[stage])
    return begun.changes(Begin.of(config, stage, parent, {}), config)


def _drawn(path: Path, count: int) -> list[Prompt]:
    """The same prompts of a set for every row."""
    return balanced(load_prompts([SourceSpec(source=str(path))], seed=0), count, 0)

"""`make bench-scale`: a run of 100,000 shards and 100 million prompts, metadata only, as JSON.

python -m bench.scale [--shards N] [--out FOLDER]

The run is laid out as the stages leave it — selection, entries, begin records, the manifest of
synth — with shards of no bytes; half of the shards of synth, and half of those of features, are
committed. Then the stages' own code goes as far as it does before the first model is needed, each
step in a process of its own, imports included:

    synth_plan, features_plan       `eagle3 … --plan`
    synth_resume, features_resume   open the stage, see what is committed, claim the first shard
    synth_collect                   read all entries of a finished stage and add up their tallies

`…_s` is seconds, `…_gb` the most memory of the process, `…_gb_tenth` the same with a tenth of the
shards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.report import ROOT, peak_gigabytes, publish, rounded

PROMPTS_PER_SHARD = 1000
TOKENS_PER_PROMPT = 10  # few and narrow: the plan refuses what the disk cannot hold
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of no bytes
STEPS = ("synth_plan", "synth_resume", "features_plan", "features_resume", "synth_collect")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=100_000, help="shards of synth")
    parser.add_argument("--out", type=Path, help="folder of the JSON file, default runs/bench")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)  # the child's side
    options = parser.parse_args()
    if options.step:
        _step(*options.step)
        return
    figures: dict[str, float] = {"shards": options.shards}
    figures["prompts"] = options.shards * PROMPTS_PER_SHARD
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        for shards, suffix in ((options.shards // 10, "_tenth"), (options.shards, "")):
            run = Path(folder) / "run"
            lay_out(run, shards)
            for step in STEPS:
                seconds, gigabytes = _measured(step, run)
                figures |= {f"{step}_s{suffix}": seconds, f"{step}_gb{suffix}": gigabytes}
                print(f"{shards:,} shards  {step:16s} {seconds:6.2f} s  {gigabytes:.3f} GB")
            shutil.rmtree(run)
    import torch  # not above: the steps are processes of this file, and need none

    publish("scale", rounded(figures), device=torch.device("cpu"), folder=options.out)


def lay_out(run: Path, shards: int) -> None:
    """The files of a run whose synth is finished, or begun where `run` is its twin `begun`."""
    from pipeline.store.location import Location
    from pipeline.store.manifest import Begin, stage_location
    from pipeline.store.samples import PromptShard, Selection, create_selection

    run.mkdir(parents=True)
    names = [f"{index:06d}-0123abcd.parquet" for index in range(shards)]
    for part in ("begun", "finished"):
        config = _config(run / part)
        location = stage_location(config.run.uri, "synth")
        Begin.of(config, "synth", None, {}).create(location)
        chosen = tuple(
            PromptShard(name, f"{name[:-8]}.0.parquet", PROMPTS_PER_SHARD, 0, EMPTY)
            for name in names
        )
        create_selection(
            location,
            Selection(
                inputs="simulated",
                loaded=shards * PROMPTS_PER_SHARD,
                rejected={},
                turns=1,
                asked=shards * PROMPTS_PER_SHARD,
                characters=400 * shards * PROMPTS_PER_SHARD,
                shards=chosen,
            ),
        )
        half = names if part == "finished" else names[::2]
        _write_entries(Path(location.uri) / "shards", half, ".parquet")
    parent = _write_manifest(run / "finished", names)
    features = stage_location(_config(run / "finished").run.uri, "features")
    Begin.of(_config(run / "finished"), "features", parent, {}).create(features)
    states = [f"{index:06d}-000.safetensors" for index in range(0, shards, 2)]
    _write_entries(Path(features.uri) / "shards", states, ".safetensors")
    assert Location(str(run)).subdirectories() == ["begun", "finished"]


def _config(run: Path):  # type: ignore[no-untyped-def]
    from pipeline.config import parse

    return parse(
        {
            "run": {"uri": str(run)},
            "target": {"source": "simulated"},
            "synth": {"sources": [{"source": "prompts.jsonl"}], "pii": {"enabled": False}},
            # One shard of features for each of synth: as many entries.
            "features": {"shard_tokens": PROMPTS_PER_SHARD * TOKENS_PER_PROMPT},
        }
    )


def _write_entries(folder: Path, names: Sequence[str], suffix: str) -> None:
    """As `write_shard` leaves them, without a flush to the disk for each."""
    folder.mkdir(parents=True)
    for name in names:
        file = f"{name.removesuffix(suffix)}.0123456789abcdef{suffix}"
        (folder / file).touch()
        entry = {
            "shard": _shard(name, file),
            "seconds": 60.0,
            "stored": "",
            "arithmetic": None,
            "tallies": {
                "samples": PROMPTS_PER_SHARD,
                "licenses": {"MIT": PROMPTS_PER_SHARD},
                "lengths": {"reply": {str(length): 10 for length in range(100)}},
            },
        }
        (folder / f"{name}.entry.json").write_text(json.dumps(entry))


def _shard(name: str, file: str) -> dict[str, object]:
    tokens = PROMPTS_PER_SHARD * TOKENS_PER_PROMPT
    numbers = {"rows": PROMPTS_PER_SHARD, "tokens": tokens, "bytes": 0}
    return {"name": name, "file": file, **numbers, "sha256": EMPTY, "rejected": {}}


def _write_manifest(run: Path, names: Sequence[str]):  # type: ignore[no-untyped-def]
    from pipeline.records import Manifest, TargetContract, sealed_json

    contract = TargetContract(
        source="simulated",
        revision="local",
        fingerprint="0",
        dtype="bfloat16",
        hidden_size=1,
        num_layers=80,
        vocab_size=128_256,
        rope={"rope_type": "default", "rope_theta": 500_000.0},
        capture_layers=(1, 39, 76),
        tokenizer_hash="0",
        chat_template_hash="0",
        parameters=70_553_706_496,
    )
    manifest = Manifest.model_validate(
        {
            "stage": "synth",
            "config_hash": _config(run).section_hash("synth"),
            "parent_uri": None,
            "parent_hash": None,
            "contract": contract,
            "shards": [_shard(name, f"{name[:-8]}.0123456789abcdef.parquet") for name in names],
            "rejected": {},
            "licenses": {"MIT": len(names) * PROMPTS_PER_SHARD},
            "sources": {"simulated": len(names) * PROMPTS_PER_SHARD},
            "details": {
                "supervised_tokens": len(names) * PROMPTS_PER_SHARD * TOKENS_PER_PROMPT // 2
            },
            "software": {},
            "wall_seconds": 1.0,
        }
    )
    data = sealed_json(manifest.model_dump(mode="json"))
    (run / "synth/manifest.json").write_bytes(data)
    return manifest


def _measured(step: str, run: Path) -> tuple[float, float]:
    """Seconds and peak gigabytes of a process that does `step`."""
    command = [sys.executable, "-m", "bench.scale", "--step", step, str(run)]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{step}: {done.stdout}{done.stderr}")
    return seconds, float(done.stdout.splitlines()[-1])


def _step(step: str, folder: str) -> None:
    """One step, and as the last line of standard output the most memory that it took."""
    stage, _, what = step.partition("_")
    run = Path(folder) / ("begun" if step in ("synth_plan", "synth_resume") else "finished")
    config = _config(run)
    if what == "plan":
        from pipeline.cli import plan_of

        print(plan_of(stage)(config, None))  # type: ignore[arg-type]
    elif what == "resume":
        _resume(config, stage)
    else:
        _collect(config)
    print(peak_gigabytes())


def _resume(config, stage: str) -> None:  # type: ignore[no-untyped-def]
    from pipeline.store.manifest import read_manifest, stage_location
    from pipeline.store.parts import parts_of
    from pipeline.store.stage_run import make_shards, open_stage
    from pipeline.synth.select import find_selection

    if stage == "synth":
        stage_run = open_stage(config, "synth", None)
        selection = find_selection(stage_location(config.run.uri, "synth"))
        assert selection
        names: Sequence[str] = selection.names
    else:
        parent = read_manifest(config.run.uri, "synth")
        stage_run = open_stage(config, "features", parent)
        names = list(parts_of(parent.shards, config.features.shard_tokens))
    assert 2 * len(stage_run.committed) == len(names)

    class FirstShard(Exception):
        pass

    def make(taken: Iterator[str]) -> None:
        assert next(taken) == names[1]
        raise FirstShard

    try:
        make_shards(stage_run, names, config.run, make)
    except FirstShard:
        return
    raise AssertionError("no shard was left")


def _collect(config) -> None:  # type: ignore[no-untyped-def]
    from pipeline.store.manifest import stage_location
    from pipeline.store.shards import committed, read_committed
    from pipeline.synth.audit import Tallies, add

    location = stage_location(config.run.uri, "synth")
    names = sorted(committed(location.child("shards").names()))
    total: Tallies = {}
    for entry in read_committed(location, names):
        add(total, entry.tallies)
    assert total["samples"] == len(names) * PROMPTS_PER_SHARD


if __name__ == "__main__":
    main()

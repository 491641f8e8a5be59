"""`--plan` of the shipped fleet configuration, number by number, and how plans are chained.

1,056,000 prompts of 200 tokens with 30 of template, replies of 717 (70 % of 1,024): 947 each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main, make_plans
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.records import STAGES, Plan, Stage
from pipeline.train.plan import check_size

FILE = Path(__file__).resolve().parents[2] / "configs/llama-3.3-70b.yaml"
PROMPTS, TOKENS, GENERATED = 1_056_000, 1_000_032_000, 757_152_000


def fleet(tmp_path: Path, *overrides: str) -> RunConfig:
    fixed = [f"run.uri={tmp_path / 'run'}", "plan.workers=64"]
    return load(FILE, [*fixed, *overrides])


def plans(config: RunConfig, *stages: Stage) -> list[Plan]:
    return make_plans(config, stages or STAGES)


def test_a_billion_tokens_of_70b_on_64_gpus(tmp_path: Path) -> None:
    synth, features, train, evaluated = plans(fleet(tmp_path))
    assert (synth.records, synth.tokens, synth.supervised_tokens) == (PROMPTS, TOKENS, GENERATED)
    # 1,056,000 / 1,024 rounded up; a file and an entry each, and four more.
    assert (synth.shards, synth.objects, synth.storage_bytes) == (1_032, 2_069, 5 * TOKENS)
    assert "131.4 GiB a copy" in synth.basis[3] and "3,072 requests" in synth.basis[3]

    assert (features.state, features.tokens) == ("waiting for synth", TOKENS)
    # A shard of synth has 969,024 tokens, which 60 shards of 16,384 hold.
    assert (features.shards, features.objects) == (61_920, 123_843)
    # int8: 3 rows of 8,193 bytes, an id of 4, a bit; a row more for a supervised one; 80 a sample;
    # 900 and 4 scales of 2 bytes for 8,192 channels a shard.
    expected = TOKENS * 24_583.125 + GENERATED * 8_193 + PROMPTS * 80 + 61_920 * (900 + 65_536)
    assert features.storage_bytes == round(expected)
    assert features.memory == {
        "weights": 2 * 70_553_706_496,
        "states held": 4 * 16_384 * 65_536,
        "activations": 8_192 * 8_192 * 2 * 32,
    }

    assert (train.state, train.tokens, len(train.zero)) == ("waiting for features", TOKENS, 2)
    assert train.storage_bytes == (2 * 12 + 4) * 1_403_027_456
    # Initialisation: the head and the embedding in fp32, the embedding in bf16, 12 · 32,768²,
    # 8 · 32,768 · 8,192 and 28 · 32,768 · 1,024. It takes less than training.
    *training, solving = train.memory.values()
    assert solving == 5_612_109_824 + 6_304_038_912 + 15_971_909_632
    assert train.peak_memory_bytes == train.zero[1].total == sum(training) > solving
    assert train.problems == () and train.parameters == 1_403_027_456
    assert evaluated.peak_memory_bytes == 8 * 70_553_706_496
    assert not (tmp_path / "run").exists(), "a plan leaves nothing behind"


def test_a_share_of_assumed_prompts_is_answered(tmp_path: Path) -> None:
    synth, features, train, _ = plans(fleet(tmp_path, "synth.share=0.1"))
    assert (synth.records, synth.tokens) == (PROMPTS // 10, TOKENS // 10)
    assert f"{PROMPTS // 10:,} prompts assumed (0.1 of {PROMPTS:,}, synth.share)" in synth.basis[0]
    assert features.tokens == train.tokens == TOKENS // 10
    [least] = plans(fleet(tmp_path, "synth.share=1.0e-9"), "synth")
    assert least.records == 1


def test_the_command_prints_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plan", "--workers", "64", f"run.uri={tmp_path / 'run'}"]
    assert main(["run", "-c", str(FILE), *options]) == 0
    text = capsys.readouterr().out
    for part in ("1,403,027,456", "1,000,032,000", "123,843", "ZeRO", "all stages: "):
        assert part in text
    assert main(["features", "-c", str(FILE), *options]) == 0
    text = capsys.readouterr().out
    assert "123,843" in text and "eagle3 synth" not in text


def test_processes_that_share_the_target_hold_a_part_each(tmp_path: Path) -> None:
    """The embedding whole; each of 8 has its own key/value head, of 16 two have the same."""
    embedding = 128_256 * 8_192
    local = ["synth.generator={}", "features.backend=local", "features.engine={}"]
    shared = [f"{stage}.parallel=tensor" for stage in ("synth", "features", "eval")]
    for ranks, heads in ((1, 8), (8, 1), (16, 1)):
        config = fleet(tmp_path, *local, *shared, f"plan.ranks={ranks}")
        own = embedding + -(-(70_553_706_496 - embedding) // ranks)
        synth, features, _, evaluated = plans(config)
        assert synth.memory["weights"] == 2 * own == features.memory["weights"]
        assert evaluated.peak_memory_bytes == 8 * own
        assert config.synth is not None
        entries = config.synth.slots("cpu") * (config.synth.max_prompt_tokens + 1_024)
        assert synth.memory["keys and values"] == entries * 80 * 2 * heads * 128 * 2
        said = f"memory of each of {ranks} processes (plan.ranks)"
        assert all(
            any(said in line for line in each.basis) for each in (synth, features, evaluated)
        )
    alone = plans(fleet(tmp_path, *local, "plan.ranks=8"))[0]
    assert alone.memory["weights"] == 2 * 70_553_706_496


def test_workers_belong_to_plans(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", str(FILE), "--workers", "2"])
    assert ended.value.code == 2 and "--workers requires --plan" in capsys.readouterr().err


def test_zero_splits_the_optimiser_over_workers(tmp_path: Path) -> None:
    few, many = (plans(fleet(tmp_path, f"plan.workers={count}"))[2] for count in (8, 64))
    assert few.zero[1].optimiser == pytest.approx(8 * many.zero[1].optimiser)
    assert few.zero[0] == many.zero[0]


def test_a_bundled_generator_holds_the_target_and_its_slots(tmp_path: Path) -> None:
    local = fleet(tmp_path, "synth.generator={backend: local}", "synth.batch_size=8")
    (plan,) = plans(local, "synth")
    assert plan.memory == {
        "weights": 2 * 70_553_706_496,
        "keys and values": 8 * 2_048 * 327_680,
    }


@pytest.mark.parametrize(("device", "slots", "forward"), [("cuda", 256, 8192), ("cpu", 32, 2048)])
def test_batches_are_larger_on_a_gpu(tmp_path: Path, device: str, slots: int, forward: int) -> None:
    own = "synth.generator={backend: local}", "features.batch_tokens=null"
    config = fleet(tmp_path, *own, f"target.device={device}")
    synth, features = plans(config, "synth", "features")
    assert synth.memory["keys and values"] == slots * 2_048 * 327_680
    assert any("servers of the target" in line for line in synth.basis) == (device == "cuda")
    width = synth.memory["weights"] // 70_553_706_496
    assert features.memory["activations"] == forward * 8192 * width * 32


def test_a_head_that_training_would_refuse_is_a_problem_of_the_plan(tmp_path: Path) -> None:
    """11.8 % of Llama-3.2-1B, found out before replies and states are made for it."""
    small = fleet(tmp_path, "target.source=meta-llama/Llama-3.2-1B-Instruct")
    (problem,) = plans(small)[2].problems
    assert "above the limit of 5.0%" in problem and "train.head_config.max_share" in problem
    with pytest.raises(ConfigError, match=r"11.8% of the target's parameters, above"):
        check_size(small)
    raised = fleet(
        tmp_path,
        f"target.source={small.target.source}",
        "train.head_config.max_share_of_target=0.5",
    )
    assert not plans(raised)[2].problems
    check_size(raised)
    continued = fleet(
        tmp_path, f"target.source={small.target.source}", "train.start_from=hub:some/head"
    )
    plan = plans(continued)[2]
    assert not plan.problems and "that of train.start_from keeps its own" in plan.basis[0]
    check_size(fleet(tmp_path, "target.source=someone/unknown"))  # what is assumed refuses nothing


def test_a_run_of_all_stages_begins_none_for_a_head_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.cli.run", lambda *_: pytest.fail("a stage was begun"))
    file, uri = tmp_path / "run.yaml", f"run.uri={tmp_path / 'run'}"
    prompts = "synth: {sources: [{source: prompts.jsonl}]}"
    file.write_text(f"target: {{source: smollm2-135m-instruct}}\n{prompts}\n")
    assert main(["run", "-c", str(file), uri, "train.head_config.draft_vocab_size=30000"]) == 2
    assert "train.head_config.max_share_of_target" in capsys.readouterr().err


def test_sources_elsewhere_are_not_fetched(tmp_path: Path) -> None:
    def planned(*overrides: str, **limits: Any) -> Plan:
        source = {"source": "hub:no/such", **limits}
        config = fleet(tmp_path, f"synth.sources=[{source}]", "plan.prompts=null", *overrides)
        return plans(config, "synth")[0]

    assert planned("synth.max_prompts=500").records == 500
    assert planned("synth.max_prompts=500", limit=300).records == 300
    assert planned(read_at_most=700).records == 700
    with pytest.raises(ConfigError, match=r"set synth\.max_prompts, plan\.prompts, or a limit"):
        planned()


def test_a_plan_belongs_to_no_hash(tmp_path: Path) -> None:
    one, other = fleet(tmp_path), fleet(tmp_path, "plan.workers=8", "plan.prompts=5")
    assert one != other
    assert all(one.section_hash(stage) == other.section_hash(stage) for stage in STAGES)

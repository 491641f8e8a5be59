"""`--plan` of the shipped fleet configuration, number by number, and how plans are chained.

1,056,000 prompts of 200 tokens with 30 of template, replies of 717 (70 % of 1,024): 947 each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.cli.commands import make_plans
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.records import STAGES, Plan, Stage
from pipeline.train.plan import check_size

FILE = Path(__file__).resolve().parents[2] / "configs/llama-3.3-70b.yaml"
PROMPTS, TOKENS, GENERATED = 1_056_000, 1_000_032_000, 757_152_000


def fleet(tmp_path: Path, *overrides: str) -> RunConfig:
    fixed = [f"run.uri={tmp_path / 'run'}", "plan.device=h100", "plan.workers=64"]
    return load(FILE, [*fixed, *overrides])


def plans(config: RunConfig, *stages: Stage) -> list[Plan]:
    return make_plans(config, stages or STAGES)


def test_a_billion_tokens_of_70b_on_64_gpus(tmp_path: Path) -> None:
    synth, features, train, evaluated = plans(fleet(tmp_path))
    assert (synth.records, synth.tokens, synth.supervised_tokens) == (PROMPTS, TOKENS, GENERATED)
    # 1,056,000 / 1,024 rounded up; a file and an entry each, and four more.
    assert (synth.shards, synth.objects, synth.storage_bytes) == (1_032, 2_069, 5 * TOKENS)
    assert "16 servers on 4 GPUs each, 192 requests" in synth.basis[3]
    # Prompts: 2·70.55e9 FLOP for each of 242,880,000 tokens at 4 · 395.8 TFLOP/s: 21,647 s. Steps:
    # 757,152,000 / 192 of 141.1 GB + 192 · 588.5 · 327,680 bytes at 6.7 TB/s: 104,846 s. Over 16
    # servers; 2 · 1,056,000 texts of 4 ms to screen over 16 processes: 528 s; 15 s to load.
    assert synth.seconds == pytest.approx((21_647 + 104_846) / 16 + 528 + 15, rel=1e-4)

    assert (features.state, features.tokens) == ("waiting for synth", TOKENS)
    # A shard of synth has 969,024 tokens, which 60 shards of 16,384 hold.
    assert (features.shards, features.objects) == (61_920, 123_843)
    # int8: 3 rows of 8,193 bytes, an id of 4, a bit; a row more for a supervised one; 80 a sample;
    # 900 and 4 scales of 2 bytes for 8,192 channels a shard.
    expected = TOKENS * 24_583.125 + GENERATED * 8_193 + PROMPTS * 80 + 61_920 * (900 + 65_536)
    assert features.storage_bytes == round(expected)
    # 64 · 395.8 TFLOP/s; the states would take 30.8 TB / (64 · 0.5 GB/s) = 962 s.
    flops = 2 * 70_553_706_496 * TOKENS
    assert features.seconds == pytest.approx(10 + flops / (64 * 395.8e12))
    assert features.memory == {
        "weights": 35_276_853_248,
        "states held": 4 * 16_384 * 65_536,
        "activations": 8_192 * 8_192 * 2 * 32,
    }

    assert (train.state, train.tokens, len(train.zero)) == ("waiting for features", TOKENS, 2)
    # The start, on one GPU at 20.1 TFLOP/s: half the products of 983,040 rows of 32,768 and 28,672
    # numbers, those with 8,192, six factors, one pass of the head. 37,782 MFLOP a token at
    # 64 · 296.85 TFLOP/s, and 3,814 times 11.05 GB at 50 GB/s.
    sums = 983_040 * (32_768 * (32_768 + 16_384) + 28_672 * (28_672 + 16_384))
    sums += 2 * (32_768**3 + 28_672**3)
    start = (sums + 2 * 983_040 * 1_403_027_456) / 20.1e12
    computing = 37_782_290_432 * TOKENS / (64 * 296.85e12)
    assert train.seconds == pytest.approx(15 + start + computing + 3_814 * 11_048_841_216 / 50e9)
    assert train.storage_bytes == (2 * 12 + 4) * 1_403_027_456
    # The start: the head and the embedding in fp32, the embedding in bf16, 12 · 32,768²,
    # 8 · 32,768 · 8,192 and 28 · 32,768 · 1,024. It takes less than training.
    *training, solving = train.memory.values()
    assert solving == 5_612_109_824 + 6_304_038_912 + 15_971_909_632
    assert train.peak_memory_bytes == train.zero[1].total == sum(training) > solving
    assert train.problems == () and "does not fit" in evaluated.problems[0]
    assert not (tmp_path / "run").exists(), "a plan leaves nothing behind"


def test_the_command_prints_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plan", "--device", "h100", "--workers", "64", f"run.uri={tmp_path / 'run'}"]
    assert main(["run", "-c", str(FILE), *options]) == 0
    text = capsys.readouterr().out
    for part in ("64 × NVIDIA H100 SXM", "1,000,032,000", "123,843", "ZeRO", "all stages: "):
        assert part in text
    assert main(["features", "-c", str(FILE), *options]) == 0
    text = capsys.readouterr().out
    assert "123,843" in text and "eagle3 synth" not in text


@pytest.mark.parametrize("option", [["--device", "h100"], ["--workers", "2"]])
def test_devices_belong_to_plans(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", str(FILE), *option])
    assert ended.value.code == 2 and "belongs to --plan" in capsys.readouterr().err


def test_more_workers_take_less_time_and_hold_less_each(tmp_path: Path) -> None:
    few, many = (plans(fleet(tmp_path, f"plan.workers={count}")) for count in (8, 64))
    assert few[1].seconds - 10 == pytest.approx(8 * (many[1].seconds - 10))
    assert few[2].zero[1].optimiser == pytest.approx(8 * many[2].zero[1].optimiser)
    assert few[2].zero[0] == many[2].zero[0]


@pytest.mark.parametrize(
    ("overrides", "stage", "problem"),
    [
        (["plan.workers=2"], 0, "a copy of the target needs 8 GPUs"),
        (["plan.device=l4"], 0, "target and 384 requests do not fit"),
        (["plan.device=l4"], 1, "lower features.shard_tokens"),
        (["plan.device=l4", "plan.workers=1"], 2, "raise train.zero_stage"),
        (["plan.device=l4"], 2, "set train.head_config.init_layer=target_last"),
        (
            ["plan.device=l4", "train.algorithm=dflash"],
            2,
            "set train.dflash.init_layers=target_last",
        ),
        (["synth.generator={backend: local}"], 0, "synth.generator to servers"),
    ],
)
def test_what_does_not_fit_is_a_problem(
    tmp_path: Path, overrides: list[str], stage: int, problem: str
) -> None:
    assert any(problem in line for line in plans(fleet(tmp_path, *overrides))[stage].problems)


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
    check_size(fleet(tmp_path, "target.source=someone/unknown"))  # what is assumed refuses nothing


def test_a_run_of_all_stages_begins_none_for_a_head_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.cli.commands.run", lambda *_: pytest.fail("a stage was begun"))
    file, uri = tmp_path / "run.yaml", f"run.uri={tmp_path / 'run'}"
    prompts = "synth: {sources: [{source: prompts.jsonl}]}"
    file.write_text(f"target: {{source: smollm2-135m-instruct}}\n{prompts}\n")
    assert main(["run", "-c", str(file), uri, "train.head_config.draft_vocab_size=30000"]) == 2
    assert "train.head_config.max_share_of_target" in capsys.readouterr().err


def test_servers_go_at_the_rate_that_was_measured(tmp_path: Path) -> None:
    screening = 2 * PROMPTS * 0.004
    (measured,) = plans(fleet(tmp_path, "plan.server_tokens_per_second=5000"), "synth")
    assert measured.seconds == pytest.approx(15 + screening + GENERATED / 5000)
    (assumed,) = plans(fleet(tmp_path, "plan.device=cpu"), "synth")
    assert assumed.seconds == pytest.approx(15 + screening + GENERATED / (3072 * 30))


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

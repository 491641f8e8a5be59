"""The whole stage on a tiny target: real template, real decoder, real store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from pipeline.config import RunConfig, load
from pipeline.errors import (
    ConfigError,
    DataError,
    MissingPackage,
    StageConflict,
    StageIncomplete,
    TemplateError,
    UnsupportedModel,
)
from pipeline.records import Manifest, Sample
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.store.samples import read_samples
from pipeline.synth import screening, stage
from pipeline.synth.plan import plan
from pipeline.synth.stage import run
from pipeline.target.parallel import Group
from tests.conftest import CHATML
from tests.forked import Command, kill_at
from tests.synth.conftest import tree

Configure = Callable[..., RunConfig]


def samples_of(config: RunConfig, manifest: Manifest) -> list[Sample]:
    location = stage_location(config.run.uri, "synth")
    return [sample for shard in manifest.shards for sample in read_samples(location, shard)]


def checksums(manifest: Manifest) -> dict[str, str]:
    return {shard.name: shard.sha256 for shard in manifest.shards}


def test_every_prompt_becomes_a_sample_or_is_counted(
    make_config: Configure, prompts_file: Path
) -> None:
    long = {"id": "long", "source": "ours", "turns": ["word " * 400], "license": "MIT"}
    free = {"id": "free", "source": "ours", "turns": ["Anything"], "license": "none"}
    with prompts_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in (long, free))
    config = make_config()
    manifest = run(config)
    samples = samples_of(config, manifest)
    assert manifest.rejected == {"license:none": 1, "prompt_too_long": 1}
    assert (len(samples), manifest.rows, len(manifest.shards)) == (24, 24, 4)
    assert manifest.licenses == {"MIT": 24} and manifest.sources == {"ours": 24}
    assert manifest.details["prompts"] == {"loaded": 26, "selected": 25, "samples": 24}
    assert {len(sample.supervised) for sample in samples} == {1, 2}, (
        "some replies ended and were followed up, some hit the limit"
    )
    supervised = sum(span.end - span.start for sample in samples for span in sample.supervised)
    details, share = manifest.details, pytest.approx(supervised / manifest.tokens, abs=1e-6)
    assert (details["supervised_tokens"], details["supervised_share"]) == (supervised, share)
    assert details["sampling"]["temperature"] == 1.0 and details["pii"] == {"enabled": False}
    assert find_manifest(config.run.uri, "synth") == manifest


def test_what_replies_were_computed_with_is_printed_and_kept(
    make_config: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run goes on with other slots and another type: what is committed stays."""
    config = make_config(max_prompts=8, shard_prompts=4)
    whole = run(config)
    (arithmetic,) = whole.arithmetic
    assert f"synth arithmetic: {arithmetic}" in " ".join(capsys.readouterr().out.split())
    assert arithmetic.dtype == "float32" and arithmetic.device == "cpu"
    location = stage_location(config.run.uri, "synth")
    for name in ("manifest.json", "selection.json"):
        location.delete(name)
    location.child("shards").delete(f"{whole.shards[1].name}.entry.json")
    target = config.target.model_copy(update={"dtype": "bfloat16"})
    other = make_config(max_prompts=8, shard_prompts=4, batch_size=2)
    both = run(other.model_copy(update={"target": target}))
    assert "of 1 committed shards 1 by float32" in " ".join(capsys.readouterr().out.split())
    assert both.shards[0] == whole.shards[0] and len(both.shards) == 2
    assert {each.dtype for each in both.arithmetic} == {"float32", "bfloat16"}


def part_of(config: RunConfig, shard: str) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"shard": shard})})


def test_parts_in_any_order_and_the_last_one_finishes(make_config: Configure) -> None:
    whole, config = run(make_config("whole")), make_config("parts")
    for shard, missing in (("2/3", "2 of 3"), ("0/3", "1 of 3"), ("0/3", "1 of 3")):
        with pytest.raises(StageIncomplete, match=f"{missing} shards are missing") as caught:
            run(part_of(config, shard))
        assert caught.value.exit_code == 75
    assert find_manifest(config.run.uri, "synth") is None
    last = run(part_of(config, "1/3"))
    assert last.shards == whole.shards and last.content_hash == whole.content_hash
    assert run(part_of(config, "0/3")) == last == run(config)
    for name in ("audit.json", "datasheet.md"):
        one, other = (
            Path(each.run.uri) / "synth" / name for each in (config, make_config("whole"))
        )
        assert one.read_bytes() == other.read_bytes()


def test_parts_at_the_same_time(tmp_path: Path, make_config: Configure) -> None:
    """Three processes, two of them at the same part; all end well, whoever is last."""
    whole, config = run(make_config("whole")), make_config("parts")
    file, printed = tmp_path / "parts.yaml", tmp_path / "printed"
    file.write_text(config.model_dump_json())
    processes = [
        Command(["synth", "-c", str(file), f"run.shard={part}"], printed)
        for part in ("0/2", "1/2", "1/2")
    ]
    codes = [process.wait(timeout=300) for process in processes]
    assert set(codes) <= {0, 75} and 0 in codes, (codes, printed.read_text())
    made = find_manifest(config.run.uri, "synth")
    assert made and made.shards == whole.shards and made.content_hash == whole.content_hash


@pytest.mark.parametrize("shard", ["4/4", "x", "1/0", "-1/3"])
def test_a_part_that_there_is_not(
    shard: str, tmp_path: Path, tiny_target: Path, prompts_file: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree(tiny_target, prompts_file, tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"run\.yaml: run\.shard"):
        load(path, shard=shard)


def test_a_finished_stage_is_left_alone(
    make_config: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(max_prompts=8)
    first = run(config)
    folder = Path(config.run.uri)
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(config) == first
    assert "complete" in capsys.readouterr().out
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_stage_that_another_process_finishes_while_this_one_starts(
    make_config: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(max_prompts=8)
    firsts: list[Manifest | None] = []

    open_pipeline = stage._open_pipeline

    def open_slowly(config: RunConfig, group: Group) -> Any:
        if not firsts:
            firsts.append(None)
            firsts.append(run(config))
            capsys.readouterr()
        return open_pipeline(config, group)

    monkeypatch.setattr(stage, "_open_pipeline", open_slowly)
    assert run(config) == firsts[1]
    assert "complete" in capsys.readouterr().out


def test_the_seed_decides_the_replies(make_config: Configure) -> None:
    same, again = run(make_config("a", max_prompts=8)), run(make_config("b", max_prompts=8))
    assert checksums(same) == checksums(again) and same.content_hash == again.content_hash
    config = make_config("c", max_prompts=8)
    other = run(config.model_copy(update={"run": config.run.model_copy(update={"seed": 6})}))
    assert set(checksums(other).values()).isdisjoint(checksums(same).values())


def test_killed_in_the_middle_it_ends_with_the_same_bytes(
    tiny_target: Path, prompts_file: Path, tmp_path: Path
) -> None:
    """`kill -9` after the first committed shard, then the same command."""
    whole = run(
        load_tree(
            tmp_path / "whole.yaml",
            tree(tiny_target, prompts_file, tmp_path / "whole", shard_prompts=2),
        )
    )
    config = load_tree(
        tmp_path / "cut.yaml", tree(tiny_target, prompts_file, tmp_path / "cut", shard_prompts=2)
    )
    command = ["synth", "-c", str(tmp_path / "cut.yaml")]
    kill_at(tmp_path / "cut", "**/*.entry.json", command, tmp_path / "printed")
    left = len(list((tmp_path / "cut").rglob("*.entry.json")))
    assert find_manifest(config.run.uri, "synth") is None and 0 < left < 12
    assert f"{left} of 12 shards committed" in plan(config).state
    resumed = run(config)
    assert checksums(resumed) == checksums(whole) and resumed.content_hash == whole.content_hash


def load_tree(path: Path, content: dict[str, object]) -> RunConfig:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load(path)


def test_prompts_are_those_that_were_selected_first(
    make_config: Configure, prompts_file: Path
) -> None:
    """A file that changes under a begun run changes none of its samples."""
    config, whole = make_config(), run(make_config("whole"))
    with pytest.raises(StageIncomplete):
        run(part_of(config, "0/3"))
    prompts_file.write_text(prompts_file.read_text().replace("What is 0", "What was 0"))
    assert run(config).shards == whole.shards
    assert not list((Path(config.run.uri) / "synth").glob("prompts/*")), "they are not screened"


def test_shards_of_another_selection_are_refused(
    make_config: Configure, prompts_file: Path
) -> None:
    config = make_config()
    run(config)
    for name in ("manifest.json", "selection.json"):
        (Path(config.run.uri) / "synth" / name).unlink()
    prompts_file.write_text(prompts_file.read_text().replace("What is 0", "What was 0"))
    with pytest.raises(StageConflict, match="made from prompts that the sources no longer give"):
        run(config)


@pytest.mark.parametrize("what", ["weights", "salt", "patterns"])
def test_what_shapes_a_begun_run_may_not_change_unnoticed(
    make_config: Configure,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """The target's name, and the configuration, stay as they are."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    monkeypatch.setenv("EAGLE3_PII_SALT", "one")
    made = make_config(pii={"action": "drop"}) if what != "weights" else make_config()
    source = made.target.model_copy(update={"source": str(target)})
    config = made.model_copy(update={"target": source})
    with pytest.raises(StageIncomplete):
        run(part_of(config, "0/3"))
    if what == "weights":
        tensors = load_file(target / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    elif what == "salt":
        monkeypatch.setenv("EAGLE3_PII_SALT", "another")
    else:
        monkeypatch.setattr(screening, "FINDERS_VERSION", "newer")
    names = {"weights": r"target\.fingerprint", "salt": r"pii\.salt", "patterns": r"pii\.patterns"}
    with pytest.raises(StageConflict, match=rf"begun work for another .*{names[what]} \S+ → \S+"):
        run(part_of(config, "1/3"))


def test_planted_personal_data_reaches_no_artefact(
    make_config: Configure, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = {
        "anna.schmidt@firm.com": "Mail anna.schmidt@firm.com now",
        "AKIAIOSFODNN7EXBMPLE": "The id is AKIAIOSFODNN7EXBMPLE",
    }
    records = [
        {"id": f"p{index}", "turns": [text], "license": "MIT", "source": "ours"}
        for index, text in enumerate(planted.values())
    ]
    prompts_file.write_text(
        "".join(json.dumps(record) + "\n" for record in records)
        + "".join(prompts_file.read_text().splitlines(keepends=True)[:4])
    )
    dropping, redacting = (
        make_config("drop", pii={"action": "drop"}),
        make_config("redact", pii={"action": "redact"}),
    )
    dropped, redacted = run(dropping), run(redacting)
    assert dropped.rejected == {"pii:API_KEY": 1, "pii:EMAIL_ADDRESS": 1} and dropped.rows == 4
    assert redacted.rejected == {} and redacted.rows == 6
    assert [sample.messages[0].content for sample in samples_of(redacting, redacted)[:2]] == [
        "Mail <EMAIL_ADDRESS> now",
        "The id is <API_KEY>",
    ]
    assert (
        dropped.details["pii"]["prompts"] == "drop"
        and "API_KEY" in dropped.details["pii"]["entities"]
    )
    printed = capsys.readouterr()
    for config in (dropping, redacting):
        files = [path for path in Path(config.run.uri).rglob("*") if path.is_file()]
        text = (
            b"".join(path.read_bytes() for path in files).decode("utf-8", "replace")
            + str(samples_of(config, run(config)))
            + printed.out
            + printed.err
        )
        assert len(files) >= 4 and not [value for value in planted if value in text]


def test_a_target_without_a_chat_template_is_refused(
    make_config: Configure, tiny_target: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in tiny_target.iterdir():
        if path.name != "chat_template.jinja":
            (bare / path.name).symlink_to(path)
    config = make_config()
    with pytest.raises(TemplateError, match="no chat template"):
        run(
            config.model_copy(
                update={"target": config.target.model_copy(update={"source": str(bare)})}
            )
        )
    assert find_manifest(config.run.uri, "synth") is None


def test_bad_sources_leave_nothing_that_looks_complete(
    make_config: Configure, prompts_file: Path
) -> None:
    prompts_file.write_text('{"turns": ["fine"]}\n{"turns": "broken"}\n')
    config = make_config()
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: turns: is a text, not a list"):
        run(config)
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        run(make_config(sources=[{"source": "gone.jsonl"}]))
    with pytest.raises(ConfigError, match="config: synth: required but not set"):
        run(config.model_copy(update={"synth": None}))
    prompts_file.write_text('{"turns": ["fine"], "license": "MIT"}\n')
    with pytest.raises(UnsupportedModel, match="the target has 512 positions"):
        run(make_config(max_prompt_tokens=500))
    with pytest.raises(MissingPackage, match="en-core-web-none"):
        run(make_config(pii={"spacy_model": "en_core_web_none"}))
    left = [path for path in Path(config.run.uri).rglob("*") if path.is_file()]
    assert not left, "the corrected config can use the same run"


def test_the_plan_counts_prompts_and_writes_nothing(make_config: Configure) -> None:
    config = make_config(max_prompts=10)
    planned = plan(config)
    assert (planned.state, planned.records) == ("not started", 10)
    assert planned.tokens > 10 * 30 and planned.storage_bytes > 0 and planned.peak_memory_bytes > 0
    assert not Path(config.run.uri).exists()
    run(config)
    stored = [path for path in Path(config.run.uri).rglob("*") if path.is_file()]
    assert len(stored) == planned.objects
    assert plan(config).state == "complete"
    assert plan(make_config(max_prompts=9)).state == "complete for another config"


def test_the_plan_needs_no_torch(
    make_config: Configure, tmp_path: Path, tiny_target: Path, prompts_file: Path
) -> None:
    load_tree(tmp_path / "run.yaml", tree(tiny_target, prompts_file, tmp_path / "run"))
    program = (
        "import sys; from pipeline.config import load; from pipeline.synth.plan import plan\n"
        f"plan(load({str(tmp_path / 'run.yaml')!r}))\n"
        "heavy = {'torch', 'transformers', 'presidio_analyzer', 'spacy', 'datasets'}\n"
        "assert not heavy & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


REFUSING = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML
DIVIDING = "{{ 1 // (messages[0].content | length - 7) }}{{ messages[0].content[0:9][8] }}" + CHATML


@pytest.mark.parametrize(
    ("template", "odd"),
    [
        (REFUSING, {"messages": [{"role": "system", "content": "Hm."}, {"role": "user"}]}),
        (DIVIDING, {"turns": ["7 chars"]}),
    ],
)
def test_a_record_on_which_the_template_fails_is_counted(
    make_config: Configure,
    tiny_target: Path,
    prompts_file: Path,
    tmp_path: Path,
    template: str,
    odd: dict[str, Any],
) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    (target / "chat_template.jinja").write_text(template)
    if "messages" in odd:
        odd["messages"][1]["content"] = "Hi."
    with prompts_file.open("a") as file:
        file.write(json.dumps({"id": "odd", "source": "ours", "license": "MIT", **odd}) + "\n")
    config = make_config()
    manifest = run(
        config.model_copy(
            update={"target": config.target.model_copy(update={"source": str(target)})}
        )
    )
    assert manifest.rejected == {"not_rendered": 1} and manifest.rows == 24
    audit = json.loads((Path(config.run.uri) / "synth/audit.json").read_text())
    assert audit["rejected"] == {"not_rendered": 1}


def test_a_template_that_continues_no_conversation_ends_no_run(
    make_config: Configure,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As R1's with reasoning open: what begins a reply is in no later rendering."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    opening = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    (target / "chat_template.jinja").write_text(opening)
    config = make_config()
    manifest = run(
        config.model_copy(
            update={"target": config.target.model_copy(update={"source": str(target)})}
        )
    )
    assert manifest.rows == 24 and not manifest.rejected
    audit = json.loads((Path(config.run.uri) / "synth/audit.json").read_text())
    assert set(audit["ended"]) == {"template_rewrites", "length"}, "no second turn"
    said = " ".join(capsys.readouterr().out.split())
    assert "end with their first reply, counted under template_rewrites" in said


def test_a_template_that_renders_nothing_leaves_nothing(
    make_config: Configure, tiny_target: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    (target / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    config = make_config()
    with pytest.raises(TemplateError, match="cannot be rendered: integer division"):
        run(
            config.model_copy(
                update={"target": config.target.model_copy(update={"source": str(target)})}
            )
        )
    assert not Path(config.run.uri).exists()

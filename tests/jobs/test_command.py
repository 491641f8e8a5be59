"""`eagle3 jobs render`: what it prints and writes, and the image that its pods run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from pipeline import cli, jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        "run: {uri: 'gs://bucket/x'}\ntarget: {source: org/model}\n"
        "synth: {sources: [{source: 'hub:org/prompts'}]}\njobs: {image: 'eagle3:1'}\n"
    )
    return file


def test_prints_one_stream_of_objects(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without eval's prompts there is no job of eval."""
    words = ["jobs", "render", "-c", str(config_file), "--for", "kubernetes"]
    assert cli.main([*words, "jobs.stages.synth.workers=3"]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    rendered = [value for value in objects if value["kind"] == "Job"]
    assert [job["metadata"]["name"] for job in rendered] == ["x-synth", "x-features", "x-train"]
    assert rendered[0]["spec"]["parallelism"] == 3


def test_writes_files_over_earlier_ones(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "jobs"
    words = ["jobs", "render", "-c", str(config_file), "--for", "slurm", "--out", str(out)]
    for workers in (1, 5):
        assert cli.main([*words, f"jobs.stages.synth.workers={workers}"]) == 0
    assert "array=0-4" in (out / "synth.sbatch").read_text()
    assert os.access(out / "submit.sh", os.X_OK)
    assert str(out / "submit.sh") in capsys.readouterr().out
    written = {"run.yaml", "synth.sbatch", "features.sbatch", "train.sbatch", "submit.sh"}
    assert {file.name for file in out.iterdir()} == written


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["jobs.image=null"], "jobs.image: required for Kubernetes"),
        (["jobs.imag=x"], "did you mean 'image'?"),
        (["--out", "/proc/no"], "/proc/no: cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    config_file: Path, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    render = ["jobs", "render", "-c", str(config_file), "--for", "kubernetes"]
    assert cli.main([*render, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line and "(fix: " in line


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines as one."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def test_the_image_has_the_makefiles_torch_and_no_root() -> None:
    made = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made and made[1] in (ROOT / "constraints.txt").read_text().splitlines()
    runs = [arguments for name, arguments in instructions() if name == "RUN"]
    assert sum(arguments.endswith(made[1]) for arguments in runs) == 1
    assert all("-c constraints.txt" in run or "--no-deps ." in run for run in runs if "pip" in run)
    last = {name: arguments for name, arguments in instructions()}
    assert last["USER"] == f"{jobs.USER}:{jobs.USER}" and last["ENTRYPOINT"] == '["eagle3"]'


def test_the_context_is_what_the_image_copies() -> None:
    copied = {
        source
        for name, arguments in instructions()
        if name == "COPY"
        for source in arguments.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == {
        source for source in copied if "/" not in source
    }


def test_templates_are_part_of_the_package() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert list((ROOT / "pipeline/jobs").glob("*.j2")) and '"jobs/*.j2"' in settings

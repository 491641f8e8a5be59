"""The one reader: what no document may hold, and what its callers make of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import documents
from pipeline.cli import main
from pipeline.config import load
from pipeline.documents import (
    BrokenDocument,
    NotAFile,
    check_header,
    parse_json,
    parse_yaml,
    read_file,
)
from pipeline.errors import ConfigError, CorruptShard, HeadError, TargetError
from pipeline.heads.checkpoint import read_json
from pipeline.planning.targets import read_shape
from pipeline.records import Manifest
from pipeline.store.location import Location
from pipeline.store.manifest import parse_manifest, read_begin
from pipeline.store.samples import find_selection
from pipeline.store.shards import read_entry
from pipeline.target.files import weight_names
from pipeline.target.template import read_end_ids

DIGITS = "9" * 5000
#: Text → what is said of it.
JSON = {
    '{"a": {"b": 1, "b": 2}}': "a.b: is there twice",
    "[" * 100_000: "is nested more than 64 layers deep",
    "[" * 70 + "]" * 70: "is nested more than 64 layers deep",
    '{"a": [1, NaN]}': "a.1: nan is not a finite number",
    '{"a": -Infinity}': "a: -inf is not a finite number",
    '{"a": 1e999}': "a: inf is not a finite number",
    f'{{"a": {DIGITS}}}': "a: an integer of 5000 digits does not fit into 64 bits",
    '{"a": 9223372036854775808}': "a: an integer of 19 digits does not fit into 64 bits",
    '{"a": "\\ud800"}': "a: holds half a surrogate pair",
    '{"a": 1': "not JSON: Expecting ',' delimiter at line 1, column 8",
    "": "not JSON: Expecting value at line 1, column 1",
}


def bomb(*, merged: bool = False) -> str:
    """Nine layers of ten aliases each: a gigabyte of values in half a kilobyte."""
    lines = ["a: &a {x: 1}"]
    for above, name in zip("abcdefgh", "bcdefghi", strict=True):
        aliases = ", ".join([f"*{above}"] * 10)
        lines.append(f"{name}: &{name} " + (f"{{<<: [{aliases}]}}" if merged else f"[{aliases}]"))
    return "\n".join(lines)


YAML = {
    "run: {uri: a}\nsynth: 1\nrun: {uri: b}": "run: is there twice",
    "synth:\n  mix: [{name: a, name: b}]": "synth.mix.0.name: is there twice",
    "{1: a, 0x1: b}": "0x1: is there twice",
    "{yes: a, on: b}": "on: is there twice",
    bomb(): "its aliases expand to more than 100,000 values",
    bomb(merged=True): "its aliases expand to more than 100,000 values",
    "a: &a {b: *a}": "a.b: contains itself",
    "a: {b: .inf}": "a.b: inf is not a finite number",
    "a: -.INF": "a: -inf is not a finite number",
    "a: [.nan]": "a.0: nan is not a finite number",
    "a: 1.0e+999": "a: inf is not a finite number",
    f"a: {DIGITS}": "a: an integer of 5000 digits does not fit into 64 bits",
    "a: 99999999999999999999": "a: an integer of 20 digits does not fit into 64 bits",
    "[" * 20_000: "is nested more than 64 layers deep",
    "a: !!bool maybe": "not valid YAML: there is no such bool",
    "a: !!int x": "not valid YAML: there is no such int",
    "a: !!timestamp x": "a: has the tag tag:yaml.org,2002:timestamp",
    "a: !!set {b, c}": "a: has the tag tag:yaml.org,2002:set",
    "a: !!python/object/apply:os.system [x]": "a: has the tag tag:yaml.org,2002:python/",
    "? [a, b]\n: 1": "not valid YAML: found unhashable key",
    "a: [1": "not valid YAML: ",
    "a: \x07": "not valid YAML: unacceptable character",
    '"\\ud800"': "holds half a surrogate pair",
}


@pytest.mark.parametrize(("text", "problem"), JSON.items(), ids=range(len(JSON)))
def test_broken_json(text: str, problem: str) -> None:
    with pytest.raises(BrokenDocument) as caught:
        parse_json(text.encode())
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(("text", "problem"), YAML.items(), ids=range(len(YAML)))
def test_broken_yaml(text: str, problem: str) -> None:
    with pytest.raises(BrokenDocument) as caught:
        parse_yaml(text)
    assert problem in str(caught.value)


def test_what_is_read() -> None:
    value = {"a": [1, -(2**63), 2.5e300, "Grüße 👋", None, True], "b": {"": {}}}
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json(b'{"model_max_length": 1000000000000000019884624838656}')
    assert parse_json(b'{"limit": [0.0, Infinity]}', finite=False)["limit"][1] > 1e308
    base = "base: &b {lr: 1.0e-3}\ntrain: {<<: *b, epochs: 2}\nday: 2026-11-27\nnone:\nalso: *b"
    assert parse_yaml(base) == {
        "base": {"lr": 0.001},
        "train": {"lr": 0.001, "epochs": 2},
        "day": "2026-11-27",
        "none": None,
        "also": {"lr": 0.001},
    }
    assert parse_yaml("") is None


def test_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(BrokenDocument, match="holds more than 10 bytes"):
        read_file(tmp_path / "a", most=10)
    with pytest.raises(BrokenDocument, match="holds more than 1,048,576 bytes"):
        parse_yaml("# " + "x" * (1 << 20))
    header = tmp_path / "b.safetensors"
    header.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(BrokenDocument, match="has no safetensors header"):
        check_header(header)
    monkeypatch.setattr(documents, "LARGEST_HEADER", 3)
    header.write_bytes((4).to_bytes(8, "little") + b"{}  ")
    with pytest.raises(BrokenDocument, match="a header of more than 3 bytes"):
        check_header(header)


@pytest.mark.parametrize("text", JSON, ids=range(len(JSON)))
def test_every_json_that_we_read(text: str, tmp_path: Path) -> None:
    """Manifests, entries, selections, heads, targets: an error that names the file."""
    names = ["begin.json", "manifest.json", "selection.json", "a.entry.json", "config.json"]
    for name in [*names, "generation_config.json", "model.safetensors.index.json"]:
        (tmp_path / name).write_text(text)
    header = tmp_path / "x.safetensors"
    header.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    location = Location(str(tmp_path))
    ours: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: read_begin(location), CorruptShard),
        (lambda: parse_manifest(location, location.read("manifest.json"), "synth"), CorruptShard),
        (lambda: Manifest.parse(text.encode(), where=f"{tmp_path}/m", fix="f"), CorruptShard),
        (lambda: find_selection(location), CorruptShard),
        (lambda: read_entry(location, "a.entry.json"), CorruptShard),
        (lambda: read_json(tmp_path / "config.json"), HeadError),
    ]
    targets: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: read_shape(tmp_path / "config.json"), TargetError),
        (lambda: weight_names(tmp_path), TargetError),
        (lambda: read_end_ids(tmp_path, source=str(tmp_path)), TargetError),
    ]
    # Others' models have infinite numbers in fields that we do not read.
    for read, error in ours + targets * ("finite" not in JSON[text]):
        with pytest.raises(error) as caught:
            read()
        assert str(tmp_path) in str(caught.value)
    with pytest.raises(BrokenDocument):
        check_header(header)


@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
def test_every_yaml_that_we_read(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["show", "-c", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}") and "(fix: " in line
    path.write_text("run: {uri: a}\ntarget: {source: b}")
    assert main(["show", "-c", str(path), f"target.chat_template_kwargs={{a: {text}}}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: override target.chat_template_kwargs: ") and "(fix: " in line


def test_a_second_section_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {uri: a}\ntarget: {source: b}\nrun: {uri: c}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:3: run: is there twice"):
        load(path)
    path.write_text("run: text\n")
    with pytest.raises(ConfigError, match="'run' is not a section"):
        load(path, force=True)


HANGS = """
import sys
from pipeline.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(*argv: str) -> tuple[int, str]:
    """Exit code and errors of a command that may hang."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, *argv], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFile, match="is a named pipe, not a file"):
        read_file(tmp_path / "pipe")
    with pytest.raises(NotAFile, match="is a device, not a file"):
        read_file("/dev/zero")
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    code, errors = command("show", "-c", str(tmp_path / "pipe"))
    assert code == 2 and "cannot be read: is a named pipe, not a file (fix: " in errors


def test_replies_of_servers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import httpx

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b"[" + b"1, " * 100 + b"1]")

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await documents.fetch_reply(http, "GET", "http://server/")

    assert len(parse_json(asyncio.run(ask()).content)) == 101
    monkeypatch.setattr(documents, "LARGEST_REPLY", 100)
    with pytest.raises(BrokenDocument, match="more than 100 bytes"):
        asyncio.run(ask())


def test_our_own_configurations_are_read() -> None:
    for path in sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml")):
        assert parse_yaml(path.read_bytes()) == yaml.safe_load(path.read_text())

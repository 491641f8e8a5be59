"""Repositories on the Hub: read at one commit, written by one commit, and everything in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from pipeline.errors import ConfigError, Eagle3Error, StoreError, StoreUnavailable
from pipeline.store import output
from pipeline.store.hub import HubAddress, commit_of, license_fields, resolved
from pipeline.store.location import Location, as_directory
from pipeline.store.output import Publication, output_directory
from tests.hub_server import READER, WRITER, Fault, HubServer

CARD = "eagle3.json"
HEAD = {
    "README.md": b"---\nlicense: mit\n---\nA head.\n",
    "config.json": b"{}\n",
    CARD: b'{"contract": 1}\n',
    "model.safetensors": bytes(range(256)) * 40,
}
UPLOAD = Publication(upload=True)


def publish(
    out: str, publication: Publication | None = UPLOAD, files: dict[str, bytes] | None = None
) -> None:
    with output_directory(out, last=CARD, publication=publication, leaving=("said",)) as folder:
        for name, data in (files or HEAD).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


def refused(call: Callable[[], object]) -> Eagle3Error:
    with pytest.raises(Eagle3Error) as caught:
        call()
    assert WRITER not in str(caught.value) and "\n" not in str(caught.value)
    return caught.value


def written(hub: HubServer) -> list[str]:
    """Requests that change something."""
    return [each for each in hub.requests if each.startswith(("POST", "PUT"))]


def test_nothing_is_uploaded_unasked(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    publish("hub:org/head", None)
    assert written(hub) == [] and hub.repositories == {}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"would upload to model {hub.url}/org/head, branch main (new, private)"
    for name, data in HEAD.items():
        assert f"  {name}  {len(data):,} bytes" in lines
    assert lines[-2:] == [
        "  said",
        "nothing was uploaded; add --upload to the same command to do it",
    ]
    publish("hub:org/head", Publication(public=True))
    assert "(new, PUBLIC)" in capsys.readouterr().out and hub.repositories == {}


def test_what_was_uploaded_is_what_the_client_downloads(hub: HubServer, tmp_path: Path) -> None:
    publish("hub:org/head")
    repository = hub.repositories["model", "org/head"]
    assert repository.private and len(repository.commits) == 2, "its first one, and ours"
    folder = Path(snapshot_download("org/head", cache_dir=tmp_path / "own"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == HEAD | {
        ".gitattributes": repository.files[".gitattributes"]
    }
    location = Location("hub:org/head")
    assert location.sizes() == {name: len(repository.files[name]) for name in repository.files}
    assert location.read("model.safetensors") == HEAD["model.safetensors"]
    assert location.read_range("model.safetensors", 10, 20) == bytes(range(10, 20))
    assert b"".join(location.blocks(CARD)) == HEAD[CARD]
    with as_directory(location, [CARD, "absent.json"]) as directory:
        assert [path.name for path in directory.iterdir()] == [CARD]


def test_a_folder_of_a_repository_leaves_the_others_alone(hub: HubServer) -> None:
    hub.put("model", "org/heads", {"README.md": b"all", "small/config.json": b"1"})
    publish("hub:org/heads/large")
    files = hub.repositories["model", "org/heads"].files
    assert files["README.md"] == b"all" and files["small/config.json"] == b"1"
    assert {name: files[f"large/{name}"] for name in HEAD} == HEAD
    location = Location("hub:org/heads")
    assert location.subdirectories() == ["large", "small"]
    assert location.child("large").names() == sorted(HEAD)
    assert Location("hub:org/heads/large").read(CARD) == HEAD[CARD]


def test_a_process_reads_one_commit(hub: HubServer) -> None:
    first = hub.put("model", "org/head", HEAD)
    location = Location("hub:org/head")
    assert location.read(CARD) == HEAD[CARD]
    second = hub.put("model", "org/head", {"config.json": b"other", CARD: b"other"})
    assert location.read("config.json") == HEAD["config.json"], "as card and weights"
    assert Location("hub:org/head").read(CARD) == HEAD[CARD]
    assert commit_of("hub:org/head") == f"hub:org/head@{first}"
    assert commit_of("/a/directory") == "/a/directory"
    resolved.cache_clear()  # another process
    assert commit_of("hub:org/head") == f"hub:org/head@{second}"
    assert Location(f"hub:org/head@{first}").read(CARD) == HEAD[CARD]
    assert Location("hub:org/head").read(CARD) == b"other"


def test_nothing_is_written_over(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.put("model", "org/head", {"config.json": b"theirs", "notes.txt": b"theirs"})
    before = dict(hub.repositories["model", "org/head"].commits)
    error = refused(lambda: publish("hub:org/head"))
    assert error.problem == "holds 2 files already" and f"--replace {commit}" in error.fix
    stale = Publication(upload=True, replace="0" * 40)
    assert f"it is at commit {commit}" in refused(lambda: publish("hub:org/head", stale)).problem
    assert hub.repositories["model", "org/head"].commits == before
    publish("hub:org/head", Publication(upload=True, replace=commit))
    files = hub.repositories["model", "org/head"].files
    assert {name: files[name] for name in files if name != ".gitattributes"} == HEAD
    assert before[commit] == hub.repositories["model", "org/head"].commits[commit], "history stays"
    # The same command again: all of it is there.
    capsys.readouterr()
    hub.requests.clear()
    publish("hub:org/head")
    assert "it is there already, as commit" in capsys.readouterr().out and written(hub) == []


def test_a_public_repository_takes_nothing_by_default(hub: HubServer) -> None:
    hub.create("model", "org/head", private=False)
    assert refused(lambda: publish("hub:org/head")).problem == "this repository is public"
    publish("hub:org/head", Publication(upload=True, public=True))
    assert CARD in hub.repositories["model", "org/head"].files


def test_of_two_uploads_at_once_one_is_there_whole(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, errors = threading.Barrier(2), list[str]()
    commit = output._commit

    def together(*arguments: object) -> str:
        barrier.wait(30)
        return commit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(output, "_commit", together)

    def upload(number: int) -> None:
        try:
            publish("hub:org/head", files=HEAD | {CARD: b"%d" % number})
        except StoreError as error:
            errors.append(error.problem)

    threads = [threading.Thread(target=upload, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    repository = hub.repositories["model", "org/head"]
    assert len(errors) == 1 and "somebody has committed since" in errors[0]
    assert len(repository.commits) == 2 and repository.files[CARD] in (b"0", b"1")


@pytest.mark.parametrize("at", ["PUT /large/", "POST .*/commit/"])
def test_an_upload_that_ends_half_way_shows_nothing(hub: HubServer, at: str) -> None:
    hub.faults.append(Fault(at, 0))
    assert isinstance(refused(lambda: publish("hub:org/head")), StoreError)
    repository = hub.repositories["model", "org/head"]
    assert list(repository.files) == [".gitattributes"], "as it was created"
    hub.faults.clear()
    publish("hub:org/head")
    assert {name: repository.files[name] for name in HEAD} == HEAD


def test_a_commit_whose_answer_was_lost_counts(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "20")
    replace = hub.put("model", "org/old", {"notes.txt": b"theirs"})  # a second deletion is refused
    for name, commit, commits in (("org/head", None, 2), ("org/old", replace, 3)):
        hub.faults[:] = [Fault("POST .*/commit/", 0, times=1, after=True)]
        publish(f"hub:{name}", Publication(upload=True, replace=commit))
        repository = hub.repositories["model", name]
        assert len(repository.commits) == commits and "notes.txt" not in repository.files
        said = f"uploaded: {hub.url}/{name}/commit/{repository.branches['main']}"
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "headers", "problem", "fix"),
    [
        (401, {}, "there is no such model on the Hub", "hf auth login"),
        (403, {}, "this token may not read it", "hf auth login"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated", "ask for access at http"),
        (404, {"X-Error-Code": "RepoNotFound"}, "there is no such model", "check the name"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "there is no revision v9", "a branch, a tag"),
        (400, {}, "the Hub refused", "correct what it names"),
    ],
)
def test_what_the_hub_refuses_is_said(
    hub: HubServer, status: int, headers: dict[str, str], problem: str, fix: str
) -> None:
    hub.put("model", "org/head", HEAD)
    hub.faults.append(Fault("GET /api", status, headers=headers, message=f"not with {WRITER}"))
    error = refused(lambda: Location("hub:org/head@v9").names())
    assert problem in error.problem and fix in error.fix and error.exit_code == 2


@pytest.mark.parametrize("status", [429, 500, 503, 0])
@pytest.mark.parametrize("request_", ["GET /api", "HEAD /org"])
def test_an_outage_is_waited_for_and_then_said(
    hub: HubServer, status: int, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("model", "org/head", HEAD)
    hub.faults.append(Fault(request_, status))
    error = refused(lambda: Location("hub:org/head").read(CARD))
    assert isinstance(error, StoreUnavailable) and error.exit_code == 75
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "20")
    hub.faults[:] = [Fault(request_, status, times=1)]
    assert Location("hub:org/head").read(CARD) == HEAD[CARD]


def test_offline_is_said(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "60")  # nothing to wait for
    for call in (lambda: Location("hub:org/head").names(), lambda: publish("hub:org/head", None)):
        error = refused(call)
        assert error.problem == "HF_HUB_OFFLINE is set, and this asks the Hub"
        assert "unset HF_HUB_OFFLINE" in error.fix and error.exit_code == 2
    assert hub.requests == []


def test_tokens_that_may_not_write(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    error = refused(lambda: publish("hub:org/head"))
    assert "this token may not write to it" in error.problem and READER not in str(error)
    monkeypatch.setenv("HF_TOKEN", "hf_forgottenforgotten1")
    error = refused(lambda: publish("hub:org/head"))
    assert "the Hub does not know this token" in error.problem
    assert "hf_forgotten" not in str(error) and hub.repositories == {}


def test_what_is_fetched_is_what_the_commit_has(hub: HubServer, tmp_path: Path) -> None:
    hub.put("model", "org/head", HEAD)
    location = Location("hub:org/head")
    location.read("model.safetensors")
    (cached,) = (tmp_path / "hub-cache").rglob("snapshots/*/model.safetensors")
    cached.resolve().write_bytes(b"\0" * len(HEAD["model.safetensors"]))
    from pipeline.store.hub import _fetched

    _fetched.cache_clear()  # another process
    error = refused(lambda: location.read("model.safetensors"))
    assert "is not what commit" in error.problem and str(cached.parent) in error.fix


def test_only_what_is_named_is_fetched(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("model", "org/head", HEAD | {"pytorch_model.bin": b"pickle", "modeling.py": b"import"})
    with as_directory(Location("hub:org/head"), list(HEAD)) as directory:
        assert sorted(path.name for path in directory.iterdir()) == sorted(HEAD)
    fetched = {each.rpartition("/")[2] for each in hub.requests if "/resolve/" in each}
    assert fetched == set(HEAD)
    monkeypatch.setattr("pipeline.store.hub.LARGEST", 10)
    hub.put("model", "org/large", {"config.json": b"[" * 11})
    hub.requests.clear()
    error = refused(lambda: Location("hub:org/large").read("config.json"))
    assert "has 11 bytes, at most 10 are read" in error.problem
    assert not [each for each in hub.requests if "/resolve/" in each], "not even begun"


@pytest.mark.parametrize(
    "uri",
    [
        *("hub:", "hub:name", "hub:org/", "hub:../etc", "hub:org/name/../other", "hub:org/na me"),
        *("hub:org/name@", "hub:org/name@-x", "hub:/org/name", f"hub:{WRITER}@org/name"),
    ],
)
def test_addresses_that_are_none(uri: str) -> None:
    error = refused(lambda: Location(uri))
    assert "is not the address of a repository" in error.problem and "hub:org/name" in error.fix


def test_addresses() -> None:
    address = HubAddress.parse("hub:org/na.me/a/b@refs/pr/3")
    assert tuple(address) == ("model", "org/na.me", "a/b", "refs/pr/3")
    assert str(address) == "hub:org/na.me/a/b@refs/pr/3"
    assert str(address.child("c")) == "hub:org/na.me/a/b/c@refs/pr/3"
    assert HubAddress.parse("hub:datasets/org/name") == ("dataset", "org/name", "", None)
    assert str(HubAddress.parse("hub:org/name", "dataset")) == "hub:datasets/org/name"
    assert HubAddress.parse("hub:datasets/org/name", "dataset").repo == "org/name"


def test_a_repository_is_no_run(hub: HubServer) -> None:
    hub.put("model", "org/head", HEAD)
    error = refused(lambda: Location("hub:org/head").write("config.json", b""))
    assert error.problem == "a repository on the Hub is only read here"
    assert refused(lambda: Location("hub:org/head").delete("config.json"))
    assert hub.repositories["model", "org/head"].files["config.json"] == HEAD["config.json"]


def test_flags_of_the_hub_apply_to_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apply to the Hub alone"):
        publish(str(tmp_path / "out"))
    publish(str(tmp_path / "out"), None)
    assert json.loads((tmp_path / "out" / CARD).read_text()) == {"contract": 1}


def test_branches(hub: HubServer) -> None:
    error = refused(lambda: publish("hub:org/head@v2"))
    assert "a new repository has no branch v2" in error.problem and hub.repositories == {}
    repository = hub.create("model", "org/head")
    assert "there is no revision v2" in refused(lambda: publish("hub:org/head@v2")).problem
    repository.branches["v2"] = repository.branches["main"]
    publish("hub:org/head@v2")
    assert CARD not in repository.files
    assert Location("hub:org/head@v2").read(CARD) == HEAD[CARD]


def test_licences_in_the_words_of_the_hub() -> None:
    assert license_fields(["MIT"]) == {"license": "mit"}
    several = {"license": "other", "license_name": "CC-BY-4.0, MIT"}
    assert license_fields(["MIT", "CC-BY-4.0", "MIT"]) == several
    own = {"license": "other", "license_name": "LicenseRef-ours"}
    assert license_fields(["LicenseRef-ours"]) == own

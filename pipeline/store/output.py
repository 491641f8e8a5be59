"""A new directory for a head or a set of samples: here, on an object store, or on the Hub.

It appears whole or not at all, and takes nobody's place:

    a local directory   written beside it, then renamed
    an object store     each file exclusively, the one that makes it a head last
    hub:org/name        one commit on top of the one that was looked at, and only with --upload

What would leave the machine is printed first, with or without it. An upload that was killed, or
whose answer was lost, is repeated by the same command: large files that arrived are not sent
again, and a repository that has all of it already is left as it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipeline.console import one_line, readable_bytes
from pipeline.errors import ConfigError, StoreError
from pipeline.store.backend import explain_os_error, status_of
from pipeline.store.hub import (
    HUB,
    HubAddress,
    HubFile,
    Kind,
    Repository,
    asking,
    checksum_of,
    find_repository,
    hub_api,
    web_page,
)
from pipeline.store.location import Location

#: What the Hub itself puts into a new repository.
_ATTRIBUTES = ".gitattributes"
_CONFLICT = (409, 412)


class Publication(NamedTuple):
    """How a command was told to write to the Hub."""

    upload: bool = False  # else it says what it would upload
    public: bool = False
    replace: str | None = None  # the commit whose files may be replaced


@contextmanager
def output_directory(
    out: str,
    *,
    last: str,
    kind: Kind = "model",
    publication: Publication | None = None,
    leaving: Sequence[str] = (),
) -> Iterator[Path]:
    """A local directory to write to, which becomes `out` when the block ends without an error; of
    two writers at once one succeeds.

    Where files appear one by one, the one called `last` does so last. `leaving` is said, beside the
    files, of what an upload gives away. Raises StoreError when `out` holds anything: it may be the
    head itself, or somebody's home.
    """
    publication = publication or Publication()
    if out.startswith(HUB):
        address = HubAddress.parse(out, kind)
        with tempfile.TemporaryDirectory(prefix="eagle3-") as temporary:
            folder = Path(temporary) / "new"
            yield folder
            _publish(folder, address, publication, leaving)
        return
    if publication != Publication():
        problem = "--upload, --public and --replace apply to the Hub alone"
        raise ConfigError(problem, where=f"--out {out}", fix="leave them out, or write --out hub:…")
    location, fix = Location(out), "choose another directory, or delete this one first"
    taken = StoreError("is not empty", where=f"--out {out}", fix=fix)
    if location.is_local and location.local_path(".").is_file():
        raise StoreError("is a file", where=f"--out {out}", fix="choose another directory")
    if location.names() or location.subdirectories():
        raise taken
    if location.is_local:
        with _beside(location.local_path(".").absolute(), taken) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-") as temporary:
        folder = Path(temporary) / "new"
        yield folder
        names = [name for name in _files_in(folder) if name != last]
        for name in (*names, last):
            above, _, file = name.rpartition("/")
            if not (location.child(above) if above else location).create_from(file, folder / name):
                raise taken  # what is there stays: files that were the same may be the other's


@contextmanager
def _beside(final: Path, taken: StoreError) -> Iterator[Path]:
    """A directory that is renamed to `final`. Raises StoreError, `taken` where that holds files."""
    folder = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        try:
            folder.mkdir(parents=True)  # what cannot be written is known before there is work in it
            folder.rmdir()
        except OSError as error:
            raise _unwritable(error, final) from error
        try:
            yield folder
        except OSError as error:
            if _is_of_writing(error, folder):
                raise _unwritable(error, final) from error
            raise
        try:
            os.rename(folder, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise taken from None
            raise explain_os_error(error, str(final), writing=True) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unwritable(error: OSError, final: Path) -> StoreError:
    problem = f"cannot be written: {error.strerror or error}"
    fix = "free some space, or choose another directory"
    return StoreError(problem, where=f"--out {final}", fix=fix)


def _is_of_writing(error: OSError, folder: Path) -> bool:
    """Whether it is of a file in `folder`, and not of one that is read for it."""
    path = Path(error.filename) if isinstance(error.filename, str) else None
    named = path is not None and folder in (path, *path.parents)
    return named or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _files_in(folder: Path) -> list[str]:
    """Paths from `folder` of all files in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files)


def _publish(
    folder: Path, address: HubAddress, publication: Publication, leaving: Sequence[str]
) -> None:
    """Print what would be uploaded, and upload it where that was asked for.

    Raises StoreError where the repository holds other files, or is more public than asked for.
    """
    files = {name: folder / name for name in _files_in(folder)}
    repository = find_repository(address)
    _announce(files, address, repository, publication, leaving)
    if repository and _holds(repository, address, files):
        print(f"it is there already, as commit {repository.commit}; nothing was uploaded")
        return
    _check_free(repository, address, publication)
    if not publication.upload:
        print("nothing was uploaded; add --upload to the same command to do it")
        return
    if repository is None:
        repository = _create(address, publication)
    print(f"uploaded: {web_page(address)}/commit/{_commit(files, address, repository)}")


def _announce(
    files: dict[str, Path],
    address: HubAddress,
    repository: Repository | None,
    publication: Publication,
    leaving: Sequence[str],
) -> None:
    verb, visible = "upload" if publication.upload else "would upload", publication.public
    if repository:
        visible, at = not repository.private, f"at commit {repository.commit}"
    where = f"{address.kind} {web_page(address)}, branch {address.revision or 'main'}"
    state = f"exists, {at}" if repository else "new"
    print(f"{verb} to {where} ({state}, {'PUBLIC' if visible else 'private'})")
    sizes = {name: path.stat().st_size for name, path in files.items()}
    for name, size in sizes.items():
        print(f"  {address.path(name)}  {size:,} bytes")
    print(f"  {len(sizes)} files, {readable_bytes(sum(sizes.values()))}")
    for line in leaving:
        print(f"  {one_line(line)}")


def _holds(repository: Repository, address: HubAddress, files: dict[str, Path]) -> bool:
    """Whether the folder has these files, byte for byte, and no others."""
    there = _there(repository, address)
    return there.keys() == files.keys() and all(
        checksum_of(path, there[name].checksum.partition(":")[0]) == there[name].checksum
        for name, path in files.items()
    )


def _there(repository: Repository, address: HubAddress) -> dict[str, HubFile]:
    files = address.below(repository.files)
    return {name: file for name, file in files.items() if name != _ATTRIBUTES}


def _check_free(
    repository: Repository | None, address: HubAddress, publication: Publication
) -> None:
    where, replace = f"--out {address}", publication.replace
    if repository is None:
        if replace:
            problem = f"--replace names commit {replace}, and there is no such repository"
            raise StoreError(problem, where=where, fix="check the name, or leave --replace out")
        if address.revision not in (None, "main"):
            problem = f"a new repository has no branch {address.revision}"
            raise StoreError(problem, where=where, fix="leave the revision out")
        return
    if not repository.private and not publication.public:
        fix = "make it private on the Hub, choose another name, or pass --public"
        raise StoreError("this repository is public", where=where, fix=fix)
    if replace not in (None, repository.commit):
        problem = f"--replace names {replace}, it is at commit {repository.commit}"
        raise StoreError(problem, where=where, fix="look at what has changed there first")
    if (there := _there(repository, address)) and replace is None:
        problem = f"holds {len(there)} files already"
        fix = f"choose another name or folder, or replace them with --replace {repository.commit}"
        raise StoreError(problem, where=where, fix=fix)


def _create(address: HubAddress, publication: Publication) -> Repository:
    """A new repository. One that somebody else has created meanwhile is as good, if it is empty
    and as private: of two commits on top of its first the Hub takes one."""

    def create() -> None:
        hub_api().create_repo(
            address.repo, repo_type=address.kind, private=not publication.public, exist_ok=False
        )

    try:
        asking(create, address, writing=True)
    except StoreError as error:
        if status_of(error.__cause__) != 409:
            raise
    repository = find_repository(address)
    if repository is None:
        problem = "the repository was created, and is not there"
        raise StoreError(problem, where=str(address), fix="run the same command again")
    _check_free(repository, address, publication)
    return repository


def _commit(files: dict[str, Path], address: HubAddress, repository: Repository) -> str:
    """The commit with the files in place of those that the folder has in `repository`.

    Raises StoreError where somebody else has committed since that was read.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    removed = _there(repository, address).keys() - files.keys()

    def commit() -> str:
        added = [CommitOperationAdd(address.path(name), str(files[name])) for name in files]
        deleted = [CommitOperationDelete(address.path(name)) for name in sorted(removed)]
        done = hub_api().create_commit(
            address.repo,
            [*added, *deleted],
            commit_message="Upload by eagle3",
            repo_type=address.kind,
            revision=address.revision,
            parent_commit=repository.commit,
        )
        return str(done.oid)

    try:
        return asking(commit, address, writing=True)
    except StoreError as error:
        if status_of(error.__cause__) not in _CONFLICT:
            raise
    now = find_repository(address)
    if now and _holds(now, address, files):  # ours, and its answer was lost
        return now.commit
    problem = f"somebody has committed since {repository.commit[:12]}; nothing of this is there"
    raise StoreError(problem, where=f"--out {address}", fix="look at it, then run this again")

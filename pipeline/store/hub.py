"""Repositories on the Hugging Face Hub, read at one commit.

    hub:org/name                     a model repository, at the head of its default branch
    hub:org/name/folder@v1.0         a folder in it, at a branch, a tag or a commit
    hub:datasets/org/name            a data set

The revision is resolved once a process, and everything is then read at that commit: `commit_of`
says which, for manifests and cards. A repository is anybody's: only files that a caller names are
fetched, none larger than its kind may be, and each is compared with the hash that the commit has
of it, also where it lay in the local cache. Nothing is written here: output.py uploads, by one
commit.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pipeline.config import store_timeout_seconds
from pipeline.documents import LARGEST
from pipeline.errors import Eagle3Error, StoreError, brief
from pipeline.store.backend import BLOCK, FileInfo, explain_os_error, is_transient, retry, status_of

T = TypeVar("T")
HUB = "hub:"
Kind = Literal["model", "dataset"]
_DATASETS = "datasets/"
_NAME = r"[A-Za-z0-9][\w.-]*"
_ADDRESS = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?P<folder>(?:/{_NAME})*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII
)
#: Larger than any head or shard of samples; a text is bounded by what is parsed.
_LARGEST = 64 << 30
_TOKEN = re.compile(r"\bhf_\w+")
#: SPDX ids that the Hub has in small letters (huggingface.co/docs/hub/repositories-licenses).
_LICENSES = frozenset(
    {
        *("apache-2.0", "mit", "isc", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "unlicense"),
        *("cc0-1.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-4.0"),
        *("cc-by-nc-sa-4.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "odbl", "odc-by"),
    }
)
_LOG_IN = "`hf auth login`, or set HF_TOKEN"


class HubAddress(NamedTuple):
    """A folder of a repository; "" is its root. None leaves the revision to the Hub."""

    kind: Kind
    repo: str
    folder: str
    revision: str | None

    @classmethod
    def parse(cls, uri: str, kind: Kind | None = None) -> HubAddress:
        """Of `hub:…`; `kind` is what the caller wants, so that `datasets/` may be left out.

        Raises StoreError for anything else.
        """
        text = uri.removeprefix(HUB)
        if text.startswith(_DATASETS) and kind != "model":
            text, kind = text.removeprefix(_DATASETS), "dataset"
        matched = _ADDRESS.fullmatch(text)
        if matched is None:
            form = "hub:org/name, with /folder and @revision where they are needed"
            problem = "is not the address of a repository on the Hub"
            raise StoreError(problem, where=_TOKEN.sub("hf_…", uri), fix=f"write {form}")
        folder = matched["folder"].removeprefix("/")
        return cls(kind or "model", matched["repo"], folder, matched["revision"])

    def __str__(self) -> str:
        above = HUB + (_DATASETS if self.kind == "dataset" else "")
        folder = f"/{self.folder}" if self.folder else ""
        return f"{above}{self.repo}{folder}{f'@{self.revision}' if self.revision else ''}"

    @property
    def root(self) -> HubAddress:
        """All of the repository."""
        return self._replace(folder="")

    def child(self, name: str) -> HubAddress:
        """The folder `name` below this one."""
        return self._replace(folder=self.path(name))

    def path(self, name: str) -> str:
        """Where the repository has the file `name` of this folder."""
        return f"{self.folder}/{name}" if self.folder else name

    def below(self, files: Mapping[str, HubFile]) -> dict[str, HubFile]:
        """Of the repository's `files` those in this folder, however deep, by path from here."""
        above = self.path("")
        return {
            path.removeprefix(above): file for path, file in files.items() if path.startswith(above)
        }


class HubFile(NamedTuple):
    """A file as a commit has it."""

    size: int
    checksum: str  # "sha256:<hex>" of a large file, "git:<hex>" of a small one


class Repository(NamedTuple):
    """A repository at one commit."""

    commit: str
    private: bool
    files: dict[str, HubFile]  # by path


def read_repository(address: HubAddress) -> Repository:
    """What the Hub says of it now. Raises StoreError, StoreUnavailable for an outage."""

    def ask() -> Any:
        return hub_api().repo_info(
            address.repo,
            repo_type=address.kind,
            revision=address.revision,
            timeout=store_timeout_seconds(),
            files_metadata=True,
        )

    info = asking(ask, address)
    files = {}
    for each in info.siblings or ():
        large = each.lfs and f"sha256:{each.lfs.sha256}"
        files[str(each.rfilename)] = HubFile(int(each.size or 0), large or f"git:{each.blob_id}")
    return Repository(str(info.sha), bool(info.private), files)


def find_repository(address: HubAddress) -> Repository | None:
    """As `read_repository`; None where there is none, or this token may not see it."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return read_repository(address)
    except StoreError as error:
        absent = isinstance(error.__cause__, RepositoryNotFoundError)
        if not absent or isinstance(error.__cause__, GatedRepoError):
            raise
        return None


@cache
def resolved(address: HubAddress) -> Repository:
    """As `read_repository` of a `root`, the same for all of a process."""
    return read_repository(address)


def commit_of(uri: str, kind: Kind | None = None) -> str:
    """The address with the commit that this process reads; other URIs as they are."""
    if not uri.startswith(HUB):
        return uri
    address = HubAddress.parse(uri, kind)
    return str(address._replace(revision=resolved(address.root).commit))


def license_fields(licenses: Sequence[str]) -> dict[str, str]:
    """Of a card's YAML block: the Hub has words of its own for licences, `other` among them."""
    names = sorted(set(licenses))
    if len(names) == 1 and names[0].lower() in _LICENSES:
        return {"license": names[0].lower()}
    return {"license": "other", "license_name": ", ".join(names)}


def checksum_of(path: Path, kind: str) -> str:
    """Of a local file, as a HubFile has it: its SHA-256, or the id of git's blob."""
    checksum = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if kind != "sha256":
        checksum.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            checksum.update(block)
    return f"{kind}:{checksum.hexdigest()}"


class Hub:
    """The folder at an address, as a Backend: it can be read alone."""

    def __init__(self, uri: str) -> None:
        self._address = HubAddress.parse(uri)

    def attempt(self, call: Callable[[], T], where: str) -> T:
        """Once: what asks the Hub repeats by itself."""
        del where
        return call()

    def info(self, name: str) -> FileInfo | None:
        return self.files().get(name)

    def files(self) -> dict[str, FileInfo]:
        return {
            path: FileInfo(file.size) for path, file in self._below().items() if "/" not in path
        }

    def directories(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self._below() if "/" in path})

    def others(self) -> dict[str, str]:
        return {}

    def read(self, name: str) -> bytes:
        return self._fetch(name).read_bytes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._fetch(name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def blocks(self, name: str) -> Iterator[bytes]:
        with self._fetch(name).open("rb") as file:
            while block := file.read(BLOCK):
                yield block

    def write(self, name: str, data: bytes) -> FileInfo:
        raise self._read_only(name)

    def create(self, name: str, data: bytes) -> bool:
        raise self._read_only(name)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo:
        raise self._read_only(name)

    def create_from(self, name: str, path: str | os.PathLike[str]) -> bool:
        raise self._read_only(name)

    def delete(self, name: str) -> None:
        raise self._read_only(name)

    def delete_tree(self) -> None:
        raise self._read_only("")

    def _below(self) -> dict[str, HubFile]:
        return self._address.below(resolved(self._address.root).files)

    def _fetch(self, name: str) -> Path:
        file = self._below().get(name)
        if file is None:
            raise FileNotFoundError(name)
        return _fetched(self._address, name, file)

    def _read_only(self, name: str) -> StoreError:
        fix = "write to a directory, and upload it with `eagle3 export --out hub:… --upload`"
        where = str(self._address.child(name) if name else self._address)
        return StoreError("a repository on the Hub is only read here", where=where, fix=fix)


@cache
def _fetched(address: HubAddress, name: str, file: HubFile) -> Path:
    """The file's copy in the local cache. Raises StoreError for one that is too large or other."""
    from huggingface_hub import hf_hub_download

    where, most = str(address.child(name)), LARGEST if name.endswith(".json") else _LARGEST
    if file.size > most:
        problem = f"has {file.size:,} bytes, at most {most:,} are read"
        raise StoreError(problem, where=where, fix="check whose repository this is")
    repository = resolved(address.root)

    def fetch() -> str:
        return hf_hub_download(
            address.repo,
            address.path(name),
            repo_type=address.kind,
            revision=repository.commit,
        )

    path = Path(asking(fetch, address))
    if checksum_of(path, file.checksum.partition(":")[0]) != file.checksum:
        problem = f"is not what commit {repository.commit[:12]} has under this name"
        fix = f"delete the copy {path}, and fetch it again"
        raise StoreError(problem, where=where, fix=fix)
    return path


def hub_api() -> Any:
    """The client, for the endpoint and the token of the environment."""
    from huggingface_hub import HfApi

    return HfApi(library_name="eagle3")


def web_page(address: HubAddress) -> str:
    """Where people see the repository."""
    return f"{hub_api().endpoint}/{_DATASETS * (address.kind == 'dataset')}{address.repo}"


def asking(call: Callable[[], T], address: HubAddress, *, writing: bool = False) -> T:
    """The result of a call of huggingface_hub, repeated while its failures are transient.

    Raises StoreError, from what the library raised, and StoreUnavailable for an outage.
    """

    def translated() -> T:
        try:
            return call()
        except Exception as error:
            raise _explained(error, address, writing) from error

    try:
        return retry(translated, str(address))
    except OSError as error:
        raise explain_os_error(error, str(address), writing=writing) from error


def _explained(error: Exception, address: HubAddress, writing: bool) -> Exception:
    """A StoreError, or an OSError that `retry` and `explain_os_error` know."""
    from huggingface_hub import errors

    if isinstance(error, Eagle3Error):
        return error
    chain: list[Any] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    # What a library wraps says more than its wrapping.
    answered = [each for each in chain if isinstance(each, errors.HfHubHTTPError)]
    where, text = str(address), _without_token(brief((answered or chain)[0]))
    if any(isinstance(each, errors.OfflineModeIsEnabled) for each in chain):
        fix = "unset HF_HUB_OFFLINE, or pass a local directory"
        return StoreError("HF_HUB_OFFLINE is set, and this asks the Hub", where=where, fix=fix)
    status = status_of(answered[0]) if answered else None
    if status is not None and is_transient(answered[0]):
        return ConnectionError(text)
    if not answered:
        if any(type(each).__module__.split(".")[0] in _CLIENTS for each in chain):
            return ConnectionError(text)
        if isinstance(error, OSError):  # of the local cache
            return error
        fix = "check the address, then the versions of huggingface_hub and of this package"
        return StoreError(f"{type(error).__name__}: {text}", where=where, fix=fix)
    may = "write to it" if writing else "read it"
    if isinstance(answered[0], errors.GatedRepoError):
        fix = f"ask for access at {web_page(address)}, then {_LOG_IN}"
        return StoreError("is gated: its owners choose who may read it", where=where, fix=fix)
    if isinstance(answered[0], errors.RevisionNotFoundError):
        problem = f"there is no revision {address.revision or 'main'}"
        return StoreError(problem, where=where, fix="name a branch, a tag or a commit that it has")
    if isinstance(answered[0], errors.EntryNotFoundError):
        return FileNotFoundError(text)
    is_known = "invalid credentials" not in str(answered[0]).lower()
    if isinstance(answered[0], errors.RepositoryNotFoundError) or (status == 401 and is_known):
        problem = f"there is no such {address.kind} on the Hub, or this token may not see it"
        fix = f"check the name; for a private one {_LOG_IN}"
        return StoreError(problem, where=where, fix=fix)
    if status in (401, 403):
        token = "the Hub does not know this token" if status == 401 else f"this token may not {may}"
        return StoreError(token, where=where, fix=f"{_LOG_IN}, with a token that may {may}")
    return StoreError(f"the Hub refused: {text}", where=where, fix="correct what it names")


#: Whose errors are of the network: huggingface_hub passes them on.
_CLIENTS = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests"})


def _without_token(text: str) -> str:
    """A server may quote what it was sent."""
    from huggingface_hub import get_token

    token = get_token()
    return _TOKEN.sub("hf_…", text.replace(token, "…") if token else text)

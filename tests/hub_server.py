"""A stand-in for the Hugging Face Hub: what huggingface_hub and datasets ask for, over HTTP.

Git as far as clients see it: commits that hold whole trees, branches, large files by SHA-256 that
are there before a commit names them. Nothing becomes visible but by a commit, which is one request.
The client is the real one; docs/head-format.md says that no real Hub was asked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

WRITER, READER = "hf_writerwriterwriter1", "hf_readerreaderreader1"
_LARGE = (".safetensors", ".parquet", ".gguf")
#: Of huggingface.co/docs/hub/repositories-licenses, those that the tests meet.
_LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "other"}


@dataclass
class Repository:
    private: bool
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # id → its tree
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, tree: dict[str, bytes], branch: str = "main") -> str:
        parent = self.branches.get(branch, "")
        listed = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in tree.items())
        name = hashlib.sha1(json.dumps([parent, listed]).encode()).hexdigest()
        self.commits[name], self.branches[branch] = dict(tree), name
        return name

    @property
    def files(self) -> dict[str, bytes]:
        """At the head of main."""
        return self.commits[self.branches["main"]]


@dataclass
class Fault:
    """The next `times` requests that match are answered with `status`, or not at all (0)."""

    request: str  # pattern of "METHOD /path"
    status: int
    times: int = 10**6
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    after: bool = False  # the answer alone is lost: the request was carried out
    reached: threading.Event | None = None  # set by the first, which then waits for its client


class HubServer:
    """Repositories by kind and name, and what was asked."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self.url = ""

    def create(self, kind: str, name: str, *, private: bool = True) -> Repository:
        repository = Repository(private)
        repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.repositories[kind, name] = repository
        return repository

    def put(self, kind: str, name: str, files: dict[str, bytes]) -> str:
        """Commit `files` on top of what is there; large ones are where they belong."""
        repository = self.repositories.get((kind, name)) or self.create(kind, name)
        for data in files.values():
            self.large[hashlib.sha256(data).hexdigest()] = data
        return repository.commit(repository.files | files)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Refused(Exception):
    def __init__(self, status: int, message: str = "", **headers: str) -> None:
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def _is_large(path: str) -> bool:
    return path.endswith(_LARGE)


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.path = urlsplit(self.path).path
        request = f"{self.command} {self.path}"
        with self.hub.lock:
            self.hub.requests.append(request)
            fault = next(
                (f for f in self.hub.faults if f.times > 0 and re.search(f.request, request)), None
            )
            if fault:
                fault.times -= 1
        if fault and fault.reached:
            fault.reached.set()
            self.connection.settimeout(60)
            self.rfile.read(1)  # until the client is gone
        try:
            if fault and not fault.after:
                raise _Refused(fault.status, fault.message, **fault.headers)
            with self.hub.lock:
                status, headers, data = self._route()
            if fault:
                raise _Refused(fault.status, fault.message, **fault.headers)
        except _Refused as refused:
            if refused.status == 0:  # the connection is dropped
                self.close_connection = True
                self.connection.close()
                return
            status, data = refused.status, json.dumps({"error": refused.message}).encode()
            headers = {"X-Error-Message": refused.message, **refused.headers}
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _token(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", WRITER, READER):
            raise _Refused(401, "Invalid credentials in Authorization header")
        return token

    def _require_writer(self) -> None:
        if self._token() != WRITER:
            raise _Refused(401 if not self._token() else 403, "you need write access")

    def _repository(self, kind: str, name: str) -> Repository:
        token = self._token()
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and not token):
            status = 404 if token else 401
            raise _Refused(status, "Repository not found", X_Error_Code="RepoNotFound")
        if repository.gated and token != WRITER:
            raise _Refused(403, "Access to model is restricted", X_Error_Code="GatedRepo")
        return repository

    def _tree(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            message = f"Invalid rev id: {revision}"
            raise _Refused(404, message, X_Error_Code="RevisionNotFound")
        return commit, repository.commits[commit]

    def _route(self) -> tuple[int, dict[str, str], bytes]:
        path = unquote(self.path) if "/refs%2F" not in self.path else self.path
        if self.command == "POST" and path == "/api/repos/create":
            return self._create()
        if self.command == "POST" and path == "/api/validate-yaml":
            return self._validate()
        if self.command == "PUT" and path.startswith("/large/"):
            checksum = path.rpartition("/")[2]
            if hashlib.sha256(self.body).hexdigest() != checksum:
                raise _Refused(400, "other bytes than announced")
            self.hub.large[checksum] = self.body
            return 200, {}, b"{}"
        if matched := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch()
        pattern = r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/(.*))?)?"
        if matched := re.fullmatch(pattern, path):
            kind, name, action, rest = matched.groups()
            repository = self._repository(kind, name)
            if self.command == "GET" and action in (None, "revision"):
                return self._info(repository, name, unquote(rest or "main"))
            if self.command == "GET" and action == "tree":
                return self._list(repository, rest)
            if self.command == "POST" and action == "paths-info":
                return self._paths(repository, unquote(rest))
            if self.command == "POST" and action in ("preupload", "commit"):
                self._require_writer()
                call = self._preupload if action == "preupload" else self._commit
                return call(repository, unquote(rest))
        pattern = r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)"
        if self.command in ("GET", "HEAD") and (matched := re.fullmatch(pattern, path)):
            kind, name, revision, file = matched.groups()
            return self._resolve("dataset" if kind else "model", name, unquote(revision), file)
        raise _Refused(404, f"no route for {self.command} {path}")

    def _create(self) -> tuple[int, dict[str, str], bytes]:
        self._require_writer()
        fields = json.loads(self.body)
        kind, name = fields.get("type", "model"), f"{fields['organization']}/{fields['name']}"
        if (kind, name) in self.hub.repositories:
            raise _Refused(409, "You already created this repo")
        private = fields.get("private", fields.get("visibility") == "private")
        self.hub.create(kind, name, private=private)
        url = f"{self.hub.url}/{'datasets/' * (kind == 'dataset')}{name}"
        return 200, {}, json.dumps({"url": url, "name": name}).encode()

    def _validate(self) -> tuple[int, dict[str, str], bytes]:
        text = json.loads(self.body)["content"]
        _, block, _ = text.split("---\n", 2)
        license = yaml.safe_load(block).get("license", "other")
        if license not in _LICENSES:
            errors = [{"message": f'"license" must be one of {sorted(_LICENSES)}'}]
            return 400, {}, json.dumps({"errors": errors, "warnings": []}).encode()
        return 200, {}, json.dumps({"errors": [], "warnings": []}).encode()

    def _info(
        self, repository: Repository, name: str, revision: str
    ) -> tuple[int, dict[str, str], bytes]:
        commit, tree = self._tree(repository, revision)
        siblings = [{"rfilename": path, **_facts(path, tree[path])} for path in sorted(tree)]
        for each in siblings:
            each["blobId"] = each.pop("oid")
        fields = {
            "_id": "0",
            "id": name,
            "sha": commit,
            "private": repository.private,
            "gated": repository.gated and "auto",
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return 200, {}, json.dumps(fields).encode()

    def _list(self, repository: Repository, rest: str) -> tuple[int, dict[str, str], bytes]:
        revision, _, folder = rest.partition("/")
        _, tree = self._tree(repository, unquote(revision))
        above = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, data in sorted(tree.items()):
            if path.startswith(above):
                first, *more = path.removeprefix(above).split("/")
                if more and "recursive=True" not in self.requestline:
                    entries[first] = {"type": "directory", "path": above + first, "oid": "0" * 40}
                    continue
                entries[path] = {"type": "file", "path": path, **_facts(path, data)}
        if folder and not entries:
            raise _Refused(404, f"{folder} does not exist", X_Error_Code="EntryNotFound")
        return 200, {}, json.dumps(list(entries.values())).encode()

    def _paths(self, repository: Repository, revision: str) -> tuple[int, dict[str, str], bytes]:
        _, tree = self._tree(repository, revision)
        try:
            asked = json.loads(self.body)["paths"]
        except ValueError:
            fields = (pair.split("=", 1) for pair in self.body.decode().split("&"))
            asked = [unquote(value) for name, value in fields if name == "paths"]
        entries = []
        for path in [asked] if isinstance(asked, str) else asked:
            if path in tree:
                entries.append({"type": "file", "path": path, **_facts(path, tree[path])})
            elif any(each.startswith(f"{path}/") for each in tree):
                entries.append({"type": "directory", "path": path, "oid": "0" * 40})
        return 200, {}, json.dumps(entries).encode()

    def _preupload(
        self, repository: Repository, revision: str
    ) -> tuple[int, dict[str, str], bytes]:
        _, tree = self._tree(repository, revision)
        files = []
        for each in json.loads(self.body)["files"]:
            mode = "lfs" if _is_large(each["path"]) else "regular"
            there = tree.get(each["path"])
            known = None
            if there is not None:
                known = hashlib.sha256(there).hexdigest() if mode == "lfs" else git_blob(there)
            files.append(
                {"path": each["path"], "uploadMode": mode, "shouldIgnore": False, "oid": known}
            )
        return 200, {}, json.dumps({"files": files, "commitOid": ""}).encode()

    def _batch(self) -> tuple[int, dict[str, str], bytes]:
        self._require_writer()
        objects = []
        for each in json.loads(self.body)["objects"]:
            known = each["oid"] in self.hub.large
            upload = {"upload": {"href": f"{self.hub.url}/large/{each['oid']}"}}
            objects.append(
                {"oid": each["oid"], "size": each["size"], **({} if known else {"actions": upload})}
            )
        return 200, {}, json.dumps({"transfer": "basic", "objects": objects}).encode()

    def _commit(self, repository: Repository, branch: str) -> tuple[int, dict[str, str], bytes]:
        commit, before = self._tree(repository, branch)
        tree = dict(before)
        for line in self.body.splitlines():
            key, value = (json.loads(line)[name] for name in ("key", "value"))
            if key == "header" and value.get("parentCommit") not in (None, commit):
                raise _Refused(412, "A commit has happened since. Please refresh and try again.")
            if key == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            if key == "lfsFile":
                if value["oid"] not in self.hub.large:
                    raise _Refused(400, f"{value['path']} was not uploaded")
                tree[value["path"]] = self.hub.large[value["oid"]]
            if key == "deletedFile":
                del tree[value["path"]]
        name = repository.commit(tree, branch)
        url = f"{self.hub.url}{self.path.removeprefix('/api').replace('/models/', '/')}"
        url = f"{url.rpartition('/commit/')[0]}/commit/{name}"
        fields = {"success": True, "commitOid": name, "commitUrl": url}
        return 200, {}, json.dumps(fields).encode()

    def _resolve(
        self, kind: str, name: str, revision: str, path: str
    ) -> tuple[int, dict[str, str], bytes]:
        commit, tree = self._tree(self._repository(kind, name), revision)
        headers = {"X-Repo-Commit": commit}
        if path not in tree:
            raise _Refused(404, "Entry not found", X_Error_Code="EntryNotFound", **headers)
        data = tree[path]
        facts = _facts(path, data)
        etag = facts["lfs"]["oid"] if "lfs" in facts else facts["oid"]
        headers |= {"ETag": f'"{etag}"', "Content-Type": "application/octet-stream"}
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(data))}
        status = 200
        if matched := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(matched[1]), min(int(matched[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
            headers["Content-Length"] = str(len(data))
        return status, headers, data


def _facts(path: str, data: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {"size": len(data), "oid": git_blob(data)}
    if _is_large(path):
        checksum = hashlib.sha256(data).hexdigest()
        facts["lfs"] = {"oid": checksum, "sha256": checksum, "size": len(data), "pointerSize": 130}
    return facts

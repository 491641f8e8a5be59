"""The one reader of JSON, YAML and safetensors headers, whoever wrote them.

    parse_json(data)    bytes → value         read_json(path)     the same of a file
    parse_record(text)  a line of a data set
    parse_yaml(data)    likewise              read_file(path)     bytes of a regular file
    check_header(path)  a safetensors file's header      fetch_reply(http, …)  a server's reply

What passes holds finite numbers, integers of at most 64 bits, text that can be written as UTF-8,
every key once, and at most DEEPEST layers; YAML is not expanded beyond MOST_VALUES by its aliases.
Everything else is a BrokenDocument that names the key. Named pipes, devices and sockets are refused
before they are read, as NotAFile. Errors of Python's own parsers (RecursionError, OverflowError,
KeyError) do not get out of here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from pipeline.errors import ConfigError, brief

if TYPE_CHECKING:
    import httpx

#: Bytes of a JSON file: a manifest of 100,000 shards has 50 MB.
LARGEST = 256 << 20
#: Of a YAML file, which a person wrote: a megabyte takes seconds.
LARGEST_YAML = 1 << 20
#: Of a server's reply, where the caller knows no less: a page of metrics has 1 MB.
LARGEST_REPLY = 4 << 20
#: Of an error's, of which no more is read.
LARGEST_REFUSAL = 64 << 10
#: Characters of a name.
LONGEST_NAME = 200
#: Of a safetensors header, as safetensors has it.
LARGEST_HEADER = 100 << 20
DEEPEST = 64
#: In a YAML file once its aliases are expanded.
MOST_VALUES = 100_000
#: Keys at which transformers writes 10^30 for "no limit".
_UNLIMITED = frozenset({"model_max_length"})
_MOST_DIGITS = 40
#: `gs:/bucket`, `s3:bucket`, `file:/tmp`: `://` was meant.
_NO_SCHEME = re.compile(
    r"(?=[a-z][a-z0-9+.-]*:/(?!/)|(?:file|local|memory|gs|gcs|s3|az|abfs):(?!//))([^:]+)",
    re.IGNORECASE,
)
#: Characters of a key that a message shows.
_SHOWN = 80


class BrokenDocument(ValueError):
    """Text that is no document, or that holds what no file of ours may; names the key."""

    def __init__(
        self, problem: str, *, key: str = "", line: int | None = None, is_syntax: bool = False
    ) -> None:
        self.problem, self.key, self.line, self.is_syntax = problem, key, line, is_syntax
        super().__init__(f"{key}: {problem}" if key else problem)


class NotAFile(OSError):
    """A named pipe, a device or a socket where a file is needed."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, open for reading.

    Raises OSError, of which NotAFile is one. Nothing of another kind is opened, so nothing hangs.
    """
    require_file(os.stat(path))
    # What has become a pipe meanwhile does not block, either.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_file(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def require_inside(path: str | os.PathLike[str], folder: Path) -> None:
    """Raises NotAFile where links lead out of the `folder`."""
    real, above = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath((real, above)) != above:
        raise NotAFile(errno.EINVAL, f"is a link that leads out of {folder}")


def require_file(status: os.stat_result) -> None:
    """Raises NotAFile or IsADirectoryError."""
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(mode):
        raise NotAFile(errno.EINVAL, f"is {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    kinds: dict[str, Callable[[int], bool]] = {
        "a named pipe": stat.S_ISFIFO,
        "a device": stat.S_ISCHR,
        "a disk": stat.S_ISBLK,
        "a socket": stat.S_ISSOCK,
    }
    return next((name for name, is_kind in kinds.items() if is_kind(mode)), "something else")


def local_path(uri: str) -> str | None:
    """The path of a local file or directory, `~` expanded; None for one elsewhere.

    Raises ConfigError for a scheme without `://`: it would name a directory beside the others.
    """
    if uri.startswith("hub:"):
        return None
    if match := _NO_SCHEME.match(uri):
        scheme, rest = match[1], uri[len(match[1]) + 1 :]
        right = f"{scheme}://{rest if scheme.lower() in ('file', 'local') else rest.lstrip('/')}"
        fix = f"write {right}, or ./{uri} for a local path"
        raise ConfigError(f"{scheme}: is not followed by //", where=uri, fix=fix)
    path = uri.removeprefix("file://").removeprefix("local://")
    if path.startswith("localhost/") and path != uri:  # RFC 8089
        path = path.removeprefix("localhost")
    return None if "://" in path else os.path.expanduser(path)


def refuse_other_kinds(source: str) -> str:
    """As `open_file`, for a library that opens a local path or `file://` URI: what it is to open.
    Others pass as they are. Raises ConfigError as `local_path`."""
    path = local_path(source)
    if path is None:
        return source
    require_file(os.stat(path))
    return path


def read_file(path: str | os.PathLike[str], *, most: int = LARGEST) -> bytes:
    """All bytes of a regular file. Raises OSError, and BrokenDocument for more than `most`."""
    with open_file(path) as file:
        data = file.read(most + 1)
    _require_size(data, most)
    return data


def _require_size(data: bytes | bytearray | str, most: int) -> None:
    if len(data) > most:
        raise BrokenDocument(f"holds more than {most:,} bytes")


def read_json(path: str | os.PathLike[str], *, finite: bool = True) -> Any:
    """As `parse_json`, of a file. Raises OSError too."""
    return parse_json(read_file(path), finite=finite)


def parse_json(data: bytes | bytearray | str, *, most: int = LARGEST, finite: bool = True) -> Any:
    """The value in UTF-8 `data`. Raises BrokenDocument.

    Without `finite`, NaN and infinity pass: configurations of others' models hold them.
    """
    _require_size(data, most)
    try:
        value = _loaded(data if isinstance(data, str) else data.decode())
    except UnicodeDecodeError as error:
        raise BrokenDocument(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise BrokenDocument(problem, line=error.lineno, is_syntax=True) from None
    _check_values(value, finite=finite)
    return value


def parse_record(text: str) -> Any:
    """The value in one line of a data set, most of whose fields nobody reads.

    Raises BrokenDocument as `parse_json` does, but any number that Python holds passes, and so does
    any text: whoever reads a field checks it.
    """
    try:
        value = _loaded(text)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at column {error.colno}"
        raise BrokenDocument(problem, is_syntax=True) from None
    _check_values(value, finite=False, storable=False)
    return value


def _loaded(text: str) -> Any:
    """With a _Broken in the place of each value that no document may hold."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise BrokenDocument(_TOO_DEEP) from None


_TOO_DEEP = f"is nested more than {DEEPEST} layers deep"


class _Broken:
    """Stands for a value that cannot be, until its key is known."""

    def __init__(self, problem: str, key: str = "") -> None:
        self.problem, self.key = problem, key


def _object(pairs: list[tuple[str, Any]]) -> Any:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        return _Broken("is there twice", next(key for key in keys if keys.count(key) > 1))
    return fields


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= _MOST_DIGITS else _Broken(_too_long(len(digits)))


def _too_long(digits: int) -> str:
    return f"an integer of {digits} digits does not fit into 64 bits"


#: Keys from the value up to the document.
_Path = tuple[Any, Any] | None


def _check_values(document: Any, *, finite: bool, storable: bool = True) -> None:
    """Raises BrokenDocument for the first value that may not be.

    `storable` ones fit into 64 bits, or can be written as UTF-8.
    """
    waiting: list[tuple[Any, _Path, int]] = [(document, None, 0)]
    while waiting:
        value, path, depth = waiting.pop()
        if isinstance(value, dict | list):
            if depth >= DEEPEST:
                raise BrokenDocument(_TOO_DEEP)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs:
                if storable:
                    _check_text(key, path)
                waiting.append((each, (path, key), depth + 1))
        elif isinstance(value, str):
            if storable:
                _check_text(value, path)
        elif isinstance(value, float):
            if finite and not math.isfinite(value):
                raise BrokenDocument(f"{value} is not a finite number", key=_dotted(path))
        elif isinstance(value, _Broken):
            at = (path, value.key) if value.key else path
            raise BrokenDocument(value.problem, key=_dotted(at))
        elif storable and type(value) is int and not _fits(value, path):
            raise BrokenDocument(_too_long(len(str(abs(value)))), key=_dotted(path))


def _fits(number: int, path: _Path) -> bool:
    is_limit = path is not None and path[1] in _UNLIMITED
    return is_limit or -(2**63) <= number < 2**63


def _check_text(text: Any, path: _Path) -> None:
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BrokenDocument("holds half a surrogate pair", key=_dotted(path)) from None


def _dotted(path: _Path) -> str:
    keys: list[str] = []
    while path:
        path, key = path
        keys.append(str(key).encode(errors="replace").decode())
    return ".".join(reversed(keys))[:_SHOWN]


def parse_yaml(data: bytes | str, *, most: int = LARGEST_YAML) -> Any:
    """The value in a UTF-8 YAML document, of plain types alone; dates are text.

    Raises BrokenDocument, with the line where it is known.
    """
    _require_size(data, most)
    try:
        text = data.decode() if isinstance(data, bytes) else data
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(loader, node, None, {})
        value = loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise BrokenDocument(f"byte {error.start + 1} is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = f"not valid YAML: {error.problem}"
        raise BrokenDocument(problem, line=line, is_syntax=True) from None
    except yaml.YAMLError as error:  # a character that YAML does not have
        problem = f"not valid YAML: {' '.join(str(error).split())}"
        raise BrokenDocument(problem, is_syntax=True) from None
    except RecursionError:
        raise BrokenDocument(_TOO_DEEP) from None
    _check_values(value, finite=True)
    return value


class _YamlLoader(yaml.SafeLoader):
    """Scalars that cannot be constructed are errors of the YAML, not of Python."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError):
            problem = f"there is no such {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_MERGE = "tag:yaml.org,2002:merge"
#: Ends of those that plain values have.
_TAGS = tuple(
    f":{name}" for name in (["str", "int", "float", "bool", "null", "seq", "map", "merge"])
)
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(_TAGS)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _check_node(
    loader: _YamlLoader, node: yaml.Node, path: _Path, counted: dict[int, int], depth: int = 0
) -> int:
    """Values in `node` once its aliases are expanded. Raises BrokenDocument.

    `counted` holds those of nodes that were seen, 0 for those that are being counted.
    """
    line = node.start_mark.line + 1
    if id(node) in counted:
        if counted[id(node)] == 0:
            raise BrokenDocument("contains itself", key=_dotted(path), line=line)
        return counted[id(node)]
    if depth > DEEPEST:
        raise BrokenDocument(_TOO_DEEP, line=line)
    if not node.tag.endswith(_TAGS):
        problem = f"has the tag {node.tag[:_SHOWN]}; texts, numbers, lists and mappings are read"
        raise BrokenDocument(problem, key=_dotted(path), line=line)
    counted[id(node)] = 0
    count = 1
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            count += _check_node(loader, key, path, counted, depth + 1)
            at = path, key.value if isinstance(key, yaml.ScalarNode) else "?"
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                name = loader.construct_object(key)  # of a 1 and a 0x1 there is one, too
                if name in seen:
                    line = key.start_mark.line + 1
                    raise BrokenDocument("is there twice", key=_dotted(at), line=line)
                seen.add(name)
            count += _check_node(loader, value, at, counted, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            count += _check_node(loader, value, (path, index), counted, depth + 1)
    elif node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
        raise BrokenDocument(_too_long(len(node.value)), key=_dotted(path), line=line)
    if count > MOST_VALUES:
        problem = f"its aliases expand to more than {MOST_VALUES:,} values"
        raise BrokenDocument(problem, key=_dotted(path), line=line)
    counted[id(node)] = count
    return count


def check_header(path: str | os.PathLike[str]) -> None:
    """Raise BrokenDocument or OSError where a safetensors file's header is none."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise BrokenDocument("has no safetensors header")
        if length > LARGEST_HEADER:
            raise BrokenDocument(f"has a header of more than {LARGEST_HEADER:,} bytes")
        fields = parse_json(file.read(length))
    if not isinstance(fields, dict):
        raise BrokenDocument("its header is not a JSON object")


def name_in(value: Any) -> str:
    """A name or a version in what a server says of itself; "" for what is none."""
    is_name = isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()
    return value if is_name else ""


def rows_in(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects that a page of the OpenAI API lists as `data`."""
    listed = page.get("data")
    return [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []


class HttpReply(NamedTuple):
    """What a server answered, of limited size; of an error's content the beginning."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


#: Of requests: replies are read as they are sent, so that none is larger than what has come.
UNCOMPRESSED = {"Accept-Encoding": "identity"}


def check_url(url: str, where: str) -> None:
    """Raises ConfigError for an address whose host httpx cannot ask for: it says so late, and not
    always by an error of its own."""
    import httpx

    try:
        _ = httpx.URL(url).host  # decoded
    except (httpx.InvalidURL, ValueError) as error:
        problem = f"is no server's address: {brief(error)}"
        raise ConfigError(problem, where=where, fix="correct the host's name") from None


async def fetch_reply(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    seconds: float | None = None,
    most: int | None = None,
    **options: Any,
) -> HttpReply:
    """Ask a server, and read at most `most` bytes, or LARGEST_REPLY, within so many `seconds`:
    httpx limits the wait for each piece alone.

    Raises BrokenDocument for more bytes, or compressed ones, TimeoutError, and what httpx raises.
    """
    async with (
        asyncio.timeout(seconds),
        http.stream(method, url, headers=UNCOMPRESSED, **options) as reply,
    ):
        content = await read_content(reply, LARGEST_REPLY if most is None else most)
        return HttpReply(reply.status_code, reply.headers, content)


async def read_content(reply: httpx.Response, most: int) -> bytes:
    """The bytes of a reply, or the beginning of an error's. Raises as `fetch_reply`."""
    data, is_error = bytearray(), reply.status_code != 200
    if is_error and _is_compressed(reply):
        return b""
    async for block in _blocks_of(reply):
        data += block
        if is_error and len(data) >= LARGEST_REFUSAL:
            return bytes(data[:LARGEST_REFUSAL])
        _require_size(data, most)
    return bytes(data)


async def read_lines(reply: httpx.Response, *, most: int, most_line: int) -> AsyncIterator[str]:
    """Lines of a reply as they come. Raises as `fetch_reply`, for a longer line too."""
    count, line = 0, bytearray()
    async for block in _blocks_of(reply):
        count += len(block)
        if count > most:
            raise BrokenDocument(f"holds more than {most:,} bytes")
        *ended, rest = block.split(b"\n")
        for each in ended:
            _require_size(line + each, most_line)
            yield (line + each).decode(errors="replace").rstrip("\r")
            line.clear()
        line += rest
        _require_size(line, most_line)
    if line:
        yield line.decode(errors="replace")


async def _blocks_of(reply: httpx.Response) -> AsyncIterator[bytes]:
    if _is_compressed(reply):
        raise BrokenDocument("is compressed, which was not asked for")
    async for block in reply.aiter_bytes():
        yield block


def _is_compressed(reply: httpx.Response) -> bool:
    encoding = reply.headers.get("Content-Encoding", "").strip().lower()
    return encoding not in ("", "identity")

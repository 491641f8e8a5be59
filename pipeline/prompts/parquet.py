"""Parquet files, unpacked by a process of their own.

    here     open_batches(source) ◄── Arrow stream ─────────┐
    child    python parquet.py SOURCE MEMORY ── pyarrow ────┘

Some broken files end the process that reads them (an exception of C++ that pyarrow does not catch),
and a few bytes may unpack to any size, whatever their footer says. Then the child ends, and the
file is refused. The child imports none of ours, so it starts soon.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

#: Bytes that a child may take to unpack a file, beside what it starts with.
MEMORY = 2 << 30
#: Of a file, decoded at one time.
_ROWS = 4096
#: Bytes that a column of a row group may unpack to, however small it is packed.
_SMALL = 128 << 20
#: Values of the lists in a row group.
_MOST_VALUES = 16 << 20
#: How many times smaller texts get when they are packed; those of people seldom ten times.
_MOST_PACKED = 200
#: Of a schema: how many rows its file has, by its own account.
_COUNT = b"rows"
_TOO_LARGE = "write the file again, with smaller row groups and pages of a few megabytes"
_WRITE_AGAIN = "write the file again"


@contextmanager
def open_batches(source: str) -> Iterator[tuple[int, Any, Iterator[Any]]]:
    """How many rows a file has by its own account, its schema, and its record batches, in which
    texts that occur often may be dictionaries. Raises DataError, also for what shows later.
    """
    import pyarrow  # type: ignore[import-untyped]

    # No allocator that reserves address space, which the limit would count.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [sys.executable, "-P", __file__, source, str(MEMORY)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        try:
            stream = pyarrow.ipc.open_stream(child.stdout)
            yield int(stream.schema.metadata[_COUNT]), stream.schema, _whole(stream, child)
        except (pyarrow.ArrowException, OSError, _Ended):
            child.stdout.close()  # type: ignore[union-attr]
            code = child.wait()
            errors.seek(0)
            _refuse(source, code, errors)
        finally:
            child.kill()


class _Ended(Exception):
    """The child did, before the file's end."""


def _whole(stream: Any, child: subprocess.Popen[bytes]) -> Iterator[Any]:
    """All batches of the stream, which has no end of its own where the child has none either."""
    yield from stream
    if child.wait():
        raise _Ended


def _refuse(source: str, code: int, errors: BinaryIO) -> NoReturn:
    from pipeline.errors import DataError

    text = errors.read(1 << 16).decode(errors="replace").strip()
    where, problem, fix = source, f"not a readable Parquet file: {text[-300:]}", _WRITE_AGAIN
    if code == 1 and text.startswith("{"):
        said = json.loads(text)
        where, problem, fix = source + said["at"], said["problem"], said["fix"]
    elif code < 0:
        name = signal.Signals(-code).name
        problem = f"not a readable Parquet file: pyarrow ends with {name}: {text[-300:]}"
    raise DataError(" ".join(problem.split()), where=where, fix=fix)


def main(source: str, memory: int) -> None:
    """The child: the file's batches on standard output, or an error and code 1."""
    import fsspec  # type: ignore[import-untyped]
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    compression = "gzip" if source.endswith(".gz") else None
    with fsspec.open(source, "rb", compression=compression) as file:
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data, so far
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        try:
            table = pyarrow.parquet.ParquetFile(file)
            _refuse_bombs(table.metadata)
            columns = [table.schema.column(index) for index in range(len(table.schema))]
            texts = [each.path for each in columns if each.physical_type == "BYTE_ARRAY"]
            table = pyarrow.parquet.ParquetFile(file, read_dictionary=texts)
            schema = table.schema_arrow.with_metadata({_COUNT: str(table.metadata.num_rows)})
            with pyarrow.ipc.new_stream(sys.stdout.buffer, schema) as out:
                for batch in table.iter_batches(_ROWS, use_threads=False):
                    out.write_batch(batch.replace_schema_metadata(schema.metadata))
            sys.stdout.flush()
            os._exit(0)  # at an orderly end, pyarrow's threads may abort
        except BrokenPipeError:
            os._exit(0)  # nobody reads any more
        except MemoryError:
            _end(f"takes more than {memory >> 20:,} MiB to unpack", _TOO_LARGE)
        except (pyarrow.ArrowException, OSError) as error:
            _end(f"not a readable Parquet file: {str(error).splitlines()[0]}", _WRITE_AGAIN)


def _refuse_bombs(metadata: Any) -> None:
    """End for a column that says it fills the memory once it is unpacked: pages that were packed,
    and values of lists, of which a run of equal ones takes a few bytes."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            size, packed = column.total_uncompressed_size, max(1, column.total_compressed_size)
            at = f": {column.path_in_schema}"
            if size > _SMALL and size > _MOST_PACKED * packed:
                _end(f"unpacks to {size // packed:,} times its size", _TOO_LARGE, at)
            if column.num_values - group.num_rows > max(_MOST_VALUES, 8 * packed):
                _end(f"holds {column.num_values:,} values in {packed:,} bytes", _TOO_LARGE, at)


def _end(problem: str, fix: str, at: str = "") -> NoReturn:
    print(json.dumps({"at": at, "problem": problem[:300], "fix": fix}), file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

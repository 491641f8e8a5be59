"""Files of prompts: what is read, and how each broken record is reported."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from pipeline.config import SourceSpec
from pipeline.errors import DataError
from pipeline.prompts import files, load_prompts
from pipeline.prompts.bad_records import BadRecords
from pipeline.prompts.sources import hub_commits, read_source
from pipeline.records import Prompt, SamplingOverride
from tests.hub_server import HubServer

RECORDS: list[dict[str, Any]] = [
    {
        "id": "a",
        "source": "ours",
        "license": "MIT",
        "category": "math",
        "turns": ["What is 2+2?", "And 3+3?"],
        "meta": {"ignored": True},
    },
    {"question_id": 81, "prompt": "Write a haiku."},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "SECRET REPLY"},
            {"role": "user", "content": "Bye"},
        ]
    },
    {
        "conversations": [
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "SECRET REPLY"},
        ]
    },
]


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def load(source: str, **options: Any) -> list[Prompt]:
    return load_prompts([SourceSpec(source=source, **options)], seed=0)


def test_every_record_form_gives_its_user_turns(tmp_path: Path) -> None:
    prompts = load(write_jsonl(tmp_path / "mine.jsonl", RECORDS))
    assert [prompt.turns for prompt in prompts] == [
        ("What is 2+2?", "And 3+3?"),
        ("Write a haiku.",),
        ("Hi", "Bye"),
        ("Why?",),
    ]
    assert prompts[0] == Prompt(
        sample_id="a",
        source="ours",
        license="MIT",
        category="math",
        turns=("What is 2+2?", "And 3+3?"),
    )
    assert [prompt.sample_id for prompt in prompts] == ["a", "81", "mine:3", "mine:4"]
    assert {(prompt.source, prompt.license, prompt.category) for prompt in prompts[1:]} == {
        ("mine", "unknown", "mine")
    }
    assert [prompt.system for prompt in prompts] == [None, None, "Be brief.", None]
    assert "SECRET" not in str(prompts)


@pytest.mark.parametrize(
    ("record", "turns", "system"),
    [
        ({"prompt": [{"role": "user", "content": "Hi"}], "chosen": "SECRET REPLY"}, ("Hi",), None),
        (
            {"instruction": "Sum it up.", "input": "A text.", "output": "SECRET REPLY"},
            ("Sum it up.\n\nA text.",),
            None,
        ),
        (
            {"instruction": "Sum it up.", "context": " ", "response": "SECRET REPLY"},
            ("Sum it up.",),
            None,
        ),
        (
            {"question": "Why?", "answer": "SECRET REPLY", "system_prompt": "Be kind."},
            ("Why?",),
            "Be kind.",
        ),
        (
            {
                "system": "",
                "conversation": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ],
            },
            ("a\nb",),
            None,
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ]
            },
            ("Hi",),
            "Be brief.",
        ),
        (
            {"conversations": [{"from": "system", "value": " "}, {"from": "human", "value": "Hi"}]},
            ("Hi",),
            None,
        ),
    ],
)
def test_usual_shapes_are_mapped(
    tmp_path: Path, record: dict[str, Any], turns: tuple[str, ...], system: str | None
) -> None:
    (prompt,) = load(write_jsonl(tmp_path / "p.jsonl", [record]))
    assert (prompt.turns, prompt.system) == (turns, system)


def test_a_field_can_be_named(tmp_path: Path) -> None:
    records = [{"text": "one", "prompt": "other"}, {"text": ["two", "three"]}]
    path = write_jsonl(tmp_path / "p.jsonl", records)
    assert [prompt.turns for prompt in load(path, field="text")] == [("one",), ("two", "three")]
    fix = "correct the source's `field`; the record has text"
    with pytest.raises(DataError, match=rf"p\.jsonl:2: prompt: is missing \(fix: {fix}\)"):
        load(path, field="prompt")


def test_reading_stops_where_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a"]}\n{"turns": ["b"]}\nnot JSON\n', encoding="utf-8")
    assert [prompt.turns for prompt in load(str(path), read_at_most=2)] == [("a",), ("b",)]


def test_a_sources_sampling_is_that_of_its_prompts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    (prompt,) = load(path, sampling={"temperature": 0.5})
    assert prompt.sampling == SamplingOverride(temperature=0.5)


def test_compressed_and_parquet_files_read_the_same(tmp_path: Path) -> None:
    records = [
        {"id": str(index), "turns": [f"question {index}"], "license": "MIT"} for index in range(5)
    ]
    plain = load(write_jsonl(tmp_path / "p.jsonl", records))
    with gzip.open(tmp_path / "p.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write((tmp_path / "p.jsonl").read_text() + "\n")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    assert load(str(tmp_path / "p.jsonl.gz")) == plain
    assert load(str(tmp_path / "p.parquet")) == plain
    for name in ("p.jsonl", "p.parquet"):
        assert load(f"file://localhost{tmp_path}/{name}") == plain
        assert load(f"file://{tmp_path}/{name}") == plain


def test_the_configured_labels_win(tmp_path: Path) -> None:
    prompts = load(write_jsonl(tmp_path / "p.jsonl", RECORDS), license="CC0-1.0", category="mixed")
    assert {(prompt.license, prompt.category) for prompt in prompts} == {("CC0-1.0", "mixed")}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"turns": ["a"', "not valid JSON"),
        ("[1]", "is a list, not an object"),
        ('{"text": "a"}', "none of the fields turns"),
        ('{"turns": "a"}', ": turns: is a text, not a list"),
        ('{"turns": []}', ": turns: has no user turn"),
        ('{"turns": ["a", "  "]}', "turn 2 is blank"),
        ('{"turns": [3]}', "turn 1 is not a text"),
        (
            '{"prompt": null, "messages": [{"content": "a"}]}',
            ": messages: has a message without a role",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            ": messages: message 1: has more than text",
        ),
        ('{"messages": [{"role": "system", "content": "a"}]}', ": messages: has no user turn"),
        ('{"turns": ["a"], "license": ["MIT"]}', ": license: is not a text"),
        ('{"turns": ["\\ud800"]}', "turn 1 is not valid Unicode"),
        ('{"turns": ["a"], "id": "\\udc00"}', ": id: is not valid Unicode"),
        ('{"turns": ["a"], "source": " "}', ": source: is blank"),
        ('{"turns": ["a"], "id": true}', ": id: is not a text"),
        ("[" * 200_000, "is nested more than 64 layers deep"),
        ('{"id": ' + "9" * 5000 + "}", ": id: an integer of 5000 digits"),
        ('{"turns": ["a"], "system": 3}', "the system prompt is not a text"),
        ('{"turns": ["a"], "license": "GPL-3.0", "license": "MIT"}', ": license: is there twice"),
        (
            '{"messages": [{"role": "user", "content": "a", "role": "system"}]}',
            ": messages.0.role: is there twice",
        ),
        (
            json.dumps({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}),
            ": messages: is a text, not a list",
        ),
        (
            json.dumps({"messages": "[{'role': 'user', 'content': 'a', 'content': 'b'}]"}),
            ": messages: is a text, not a list",
        ),
    ],
)
def test_a_broken_line_is_named_with_file_line_field_and_fix(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"turns": ["fine"]}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError) as raised:
        load(str(path))
    assert str(raised.value).startswith(f"{path}:3: ") and problem in str(raised.value)
    assert raised.value.fix


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"turns": ["é"]}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:1: byte 13 is not UTF-8"):
        load(str(tmp_path / "latin.jsonl"))


def test_a_mark_of_utf8_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"turns": ["\xef\xbb\xbfa"]}\n{"turns": ["b"]}\n')
    assert [prompt.turns for prompt in load(str(path))] == [("\ufeffa",), ("b",)]
    path.write_text('{"turns": ["a"]}\n', encoding="utf-16")
    with pytest.raises(DataError, match=r"p\.jsonl: is UTF-16 \(fix: save the file as UTF-8\)"):
        load(str(path))


def test_a_row_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    texts = pa.array([b"fine", b"caf\xe9", b"good"]).cast(pa.binary())
    path = str(tmp_path / "p.parquet")
    pq.write_table(pa.table({"prompt": texts.view(pa.string())}), path)
    with pytest.raises(DataError, match=r"p\.parquet: row 2: byte 4 is not UTF-8"):
        load(path)
    bad = BadRecords()
    [spec] = [SourceSpec(source=path)]
    with pytest.raises(DataError, match="1 of 3 records of this source cannot be used"):
        list(read_source(spec, bad))
    assert bad.counts == {"record:not_utf8": 1}


_TIMES = (
    *(pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("ns"), pa.timestamp("ms")),
    *(pa.timestamp("ns"), pa.timestamp("us", tz="Nowhere/Bad"), pa.duration("s")),
)


@pytest.mark.parametrize("kind", _TIMES, ids=str)
def test_a_time_that_python_cannot_hold_does_not_matter(tmp_path: Path, kind: Any) -> None:
    stored = pa.int32() if kind.bit_width == 32 else pa.int64()
    at = pa.array([2**30 if kind.bit_width == 32 else 2**61, None], stored).view(kind)
    role, content = pa.array(["user"] * 2).dictionary_encode(), pa.array(["Why?", "How?"])
    message = pa.StructArray.from_arrays([role, content, at], ["role", "content", "at"])
    one = pa.array([0, 1, 2], pa.int32())
    columns = {
        "messages": pa.ListArray.from_arrays(one, message),
        "at": at,
        "log": pa.MapArray.from_arrays(one, pa.array(["a", "b"]), at),
        "pairs": pa.FixedSizeListArray.from_arrays(pa.concat_arrays([at, at]), 2),
        "large": pa.LargeListArray.from_arrays(one.cast(pa.int64()), at),
        "packed": at.dictionary_encode(),
        "id": pa.array([7, 8]),
    }
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    prompts = load(str(tmp_path / "p.parquet"))
    assert [(each.turns, each.sample_id) for each in prompts] == [
        (("Why?",), "7"),
        (("How?",), "8"),
    ]


@pytest.mark.parametrize("inside", [False, True])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, inside: bool) -> None:
    """A record would have the last of them, and with it maybe another licence."""
    columns = [pa.array(["GPL-3.0"]), pa.array(["MIT"]), pa.array(["Why?"])]
    names = ["license", "license", "prompt"]
    table, path = pa.table(columns, names), str(tmp_path / "p.parquet")
    if inside:
        table = pa.table({"all": pa.StructArray.from_arrays(columns, names)})
    pq.write_table(table, path)
    expected = rf"p\.parquet: has two columns {'all.' * inside}license \(fix: rename"
    with pytest.raises(DataError, match=expected):
        load(path)


READ = """
import resource, sys
from pipeline.config import SourceSpec
from pipeline.prompts.bad_records import BadRecords
from pipeline.prompts.sources import read_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

import pandas, pyarrow.parquet
before, bad = peak(), BadRecords()
prompts = list(read_source(SourceSpec(source=sys.argv[1]), bad))
print(len(prompts), dict(bad.counts), peak() - before)
"""


def _bomb(path: Path) -> None:
    """A small file of 100 prompts and a text of 400 MB: one line, or all of the cells in a row."""
    good = [{"turns": ["Why?"]} for _ in range(100)]
    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(b"".join(json.dumps(each).encode() + b"\n" for each in good[:50]))
            file.write(b'{"turns": ["')
            for _ in range(400):
                file.write(b"x" * (1 << 20))
            file.write(b'"]}\n')
            file.write(b"".join(json.dumps(each).encode() + b"\n" for each in good[50:]))
        return
    cells = pa.DictionaryArray.from_arrays(
        pa.array([0] * 100 + [1] * 25 + [2], pa.int32()),
        pa.array(["Why?", "y" * (16 << 20), "z" * (17 << 20)]),
    )
    lists = pa.ListArray.from_arrays(pa.array([*range(101), 125, 126], pa.int32()), cells)
    pq.write_table(pa.table({"turns": lists}), path, compression="zstd")


def test_a_table_that_unpacks_to_far_more_than_it_is_is_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "p.parquet")
    texts = pa.array(["y" * (16 << 20)] * 20)
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"p\.parquet: prompt: unpacks to .* times its size"):
        load(path)


def _size(number: int, width: int = 0) -> bytes:
    """A positive integer of a footer (Thrift's zigzag varint), in at least `width` bytes."""
    digits: list[int] = []
    number <<= 1
    while number or len(digits) < width or not digits:
        digits.append(number & 127)
        number >>= 7
    return bytes([*(each | 128 for each in digits[:-1]), digits[-1]])


def test_a_table_that_says_it_is_small_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.prompts.parquet.MEMORY", 128 << 20)
    path, texts = tmp_path / "p.parquet", [f"{number:{16 << 20}}" for number in range(20)]
    plainly: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd", **plainly)
    column = pq.read_metadata(path).row_group(0).column(0)
    said = _size(column.total_uncompressed_size)
    packed = _size(column.total_compressed_size, len(said))
    whole = path.read_bytes()
    assert said in whole and len(packed) == len(said)
    path.write_bytes(whole.replace(said, packed))
    with pytest.raises(DataError, match=r"p\.parquet: takes more than 128 MiB to unpack \(fix: wr"):
        load(str(path))


def test_a_table_that_ends_the_process_that_reads_it_is_refused(tmp_path: Path) -> None:
    """pyarrow 26 does not catch it where the counts of nulls belong to a column without any."""
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["Why?"]}), path)
    nullable, required = (bytes([0x25, each, 0x18, 6]) + b"prompt" for each in (2, 0))
    whole = path.read_bytes()
    assert whole.count(nullable) == 1
    path.write_bytes(whole.replace(nullable, required))
    with pytest.raises(DataError, match=r"p\.parquet: not a readable Parquet file: pyarrow ends w"):
        load(str(path))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("p.jsonl.gz", 1), ("p.parquet", 2)])
def test_a_small_file_cannot_fill_the_memory(tmp_path: Path, name: str, count: int) -> None:
    path = tmp_path / name
    _bomb(path)
    assert path.stat().st_size < 4 << 20
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    prompts, rest = done.stdout.split(" ", 1)
    counts, grown = rest.rsplit(" ", 1)
    assert (prompts, counts) == ("100", f"{{'record:too_long': {count}}}")
    assert int(grown) < 200, "MiB"


def _listed(values: Any) -> Any:
    """One list of all values."""
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _equal(text: str, count: int) -> Any:
    """A text many times, which takes no room in a file."""
    return pa.DictionaryArray.from_arrays(
        pa.repeat(pa.scalar(0, pa.int32()), count), pa.array([text])
    )


def _empty_lists(count: int) -> Any:
    ends = pa.repeat(pa.scalar(0, pa.int32()), count + 1)
    return pa.ListArray.from_arrays(ends, pa.array([], pa.int32()))


def _mapped(count: int) -> Any:
    ends, keys = pa.array([0, count], pa.int32()), pa.array(map(str, range(count)))
    return pa.MapArray.from_arrays(ends, keys, _equal("a" * 900_000, count))


@pytest.mark.parametrize(
    "values",
    [
        lambda count: _listed(_equal("", count)),
        lambda count: _listed(pa.repeat(False, count)),
        lambda count: _listed(pa.nulls(count)),
        lambda count: _listed(_empty_lists(count)),
        lambda count: _listed(pa.StructArray.from_arrays([_equal("user", count)], ["role"])),
        lambda count: _mapped(count >> 16),
    ],
    ids=["texts", "bools", "nulls", "lists", "structs", "map"],
)
def test_a_list_of_millions_of_equal_values_is_not_read(
    tmp_path: Path, values: Callable[[int], Any]
) -> None:
    """In the file it takes a few bytes, in Python 64 times its length."""
    path, count = str(tmp_path / "p.parquet"), 17 << 20
    short = values(1 << 20)
    rows = pa.chunked_array([short, short, values(12 << 20)])
    pq.write_table(pa.table({"prompt": ["Why?"] * 3, "x": rows}), path, compression="zstd")
    kinds = [type(record) for _, record in files._read_parquet(path)]
    assert kinds == [dict, dict, files._RowSize]
    if not pa.types.is_map(short.type):
        pq.write_table(pa.table({"prompt": ["Why?"], "x": values(count)}), path)
        with pytest.raises(DataError, match=rf"p\.parquet: x\.\S*: holds {count:,} values in"):
            load(path)


BAD = {
    "record:blank": b'{"turns": ["fine", " "]}',
    "record:not_unicode": b'{"turns": ["\\ud83d"]}',
    "record:not_utf8": b'{"turns": ["caf\xe9"]}',
    "record:not_json": b'{"turns": ["a"',
    "record:not_object": b"[1]",
    "record:fields": b'{"text": "a"}',
}


def test_bad_records_are_counted_where_they_are_few(tmp_path: Path) -> None:
    path, bad = tmp_path / "p.jsonl", BadRecords()
    good = [f'{{"turns": ["question {index}"]}}'.encode() for index in range(120)]
    path.write_bytes(b"\n".join([*BAD.values(), *good]))
    spec = SourceSpec(source=str(path))
    prompts = list(read_source(spec, bad))
    assert bad.counts == dict.fromkeys(BAD, 1)
    assert [prompt.sample_id for prompt in prompts] == [f"p:{number}" for number in range(7, 127)]
    told = str(bad)
    assert (
        f"first {path}:1: user turn 2 is blank; {path}:2: " in told and told.count(str(path)) == 3
    )
    path.write_bytes(b"\n".join([*good[:110], *BAD.values()]))
    with pytest.raises(DataError) as raised:
        list(read_source(spec, BadRecords()))
    assert raised.value.where == f"{path}:111" and "6 of 116 records" in raised.value.problem
    assert "user turn 2 is blank" in raised.value.problem and raised.value.fix
    with pytest.raises(DataError, match=rf"{path}:111: user turn 2 is blank \(fix"):
        load(str(path))  # an evaluation's: every record counts


def test_a_source_of_bad_records_alone_is_not_read_to_its_end(tmp_path: Path) -> None:
    path, bad = tmp_path / "p.jsonl", BadRecords()
    path.write_text('{"turns": ["a"]}\n' * 5000)
    expected = r"p\.jsonl:1: text: is missing; 100 of the first 100 .* \(fix: correct the source's"
    with pytest.raises(DataError, match=expected):
        list(read_source(SourceSpec(source=str(path), field="text"), bad))
    assert bad.counts == {"record:fields": 100}


USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
UNSUITED: dict[str, list[object]] = {
    "record:assistant_first": [ANSWER, USER],
    "record:system_later": [USER, ANSWER, {"role": "system", "content": "Be brief."}, USER],
    "record:user_twice": [USER, USER],
    "record:media": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    "record:role": [{"role": "narrator", "content": "Once."}, USER],
}


def test_a_source_may_have_many_conversations_that_no_head_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    spec = SourceSpec(source=str(path))
    kinds: list[dict[str, object]] = [{"messages": each} for each in UNSUITED.values()]
    unsuited = kinds * 30
    good: list[dict[str, object]] = [{"turns": ["fine"]}]
    write_jsonl(path, unsuited + good)
    bad = BadRecords()
    [prompt] = read_source(spec, bad)
    assert prompt.turns == ("fine",) and bad.counts == dict.fromkeys(UNSUITED, 30)
    write_jsonl(path, unsuited)
    expected = r"p\.jsonl:1: messages: message 1: is the assistant's.*; 150 of 150 records"
    with pytest.raises(DataError, match=expected):
        list(read_source(spec, BadRecords()))
    # What is damaged still counts, and is what the error names.
    write_jsonl(path, unsuited + good + [{"text": "a"}] * 10)
    with pytest.raises(DataError, match=r"p\.jsonl:152: .*; 10 of 161 records"):
        list(read_source(spec, BadRecords()))


def test_a_file_that_is_missing_empty_or_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        load(str(tmp_path / "gone.jsonl"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="holds no prompts"):
        load(str(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError, match="not a kind of prompts file"):
        load(str(tmp_path / "prompts.csv"))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"turns": ["fine"]}\n' * 500)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cannot be read to its end"):
        load(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load(str(tmp_path / "cut.parquet"))


def test_a_hub_data_set_is_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `datasets` treats ORG/NAME as a directory when there is one, so this needs no network.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    write_jsonl(tmp_path / "org" / "name" / "train.jsonl", [{"turns": ["Why?"], "license": "MIT"}])
    assert load("hub:org/name") == [
        Prompt(
            sample_id="org/name:1",
            source="org/name",
            license="MIT",
            category="org/name",
            turns=("Why?",),
        )
    ]
    with pytest.raises(DataError, match="hub:org/name: split 'test' cannot be loaded"):
        load("hub:org/name", split="test")


def test_a_process_reads_a_hub_data_set_at_one_commit(hub: HubServer) -> None:
    first = hub.put("dataset", "org/prompts", {"train.jsonl": b'{"prompt": "Why?"}\n'})
    spec = SourceSpec(source="hub:org/prompts")
    assert hub_commits([spec, SourceSpec(source="a.jsonl")]) == {"hub:org/prompts": first}
    second = hub.put("dataset", "org/prompts", {"train.jsonl": b'{"prompt": "And now?"}\n'})
    assert [prompt.turns for prompt in read_source(spec)] == [("Why?",)]
    named = SourceSpec(source="hub:org/prompts", revision=second)
    assert [prompt.turns for prompt in read_source(named)] == [("And now?",)]
    with pytest.raises(DataError, match="hub:org/absent: split 'train' cannot be loaded"):
        list(read_source(SourceSpec(source="hub:org/absent")))

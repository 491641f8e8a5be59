"""Engine by format of head: whether it loads, takes the decoder's rounds, its τ and its speed.

    python -m tests.engines.table [--engines vLLM,SGLang,llama.cpp] [--format TEXT] [--json FILE]

Every row serves a right head twice, in fp32 and in bf16, one request at a time, and holds the
golden replies against the decoder's report in that type, as `eagle3 check-serving` does. Heads and
reports that are not there yet are made (tests/engines/lines.py). Rows go to stderr as they are
made, and to FILE, where a call that was interrupted goes on; the table goes to stdout.

    loads     warnings in the log about weights or a configuration that the same server without a
              head does not give
    fp32      prompts whose reply, rounds, drafted and accepted tokens are all the decoder's
    bf16      τ of the server and of the decoder over the same text: whole replies, or what comes
              before the first other token; how many replies part, at near-ties
    speed     tokens a second, drafting over plain, in bf16 with one thread; not where a stand-in
              of ours computes
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.config import TreeSection
from pipeline.exchange.export import Format, export_head
from pipeline.serve_eval.servers.findings import ComparedRounds, SeenServer, rounds_until
from tests.engines.gguf_files import in_float32, target_in_float32
from tests.engines.lines import BLOCKS, EAGLE3, EAGLE31, WINDOW, Drafter, Line, make_line
from tests.engines.servers import EngineServer, llama_server, sglang_server, vllm_server

_WARNING = re.compile(r"\b(W|WARN|WARNING)\b|Warning")
_OF_HEAD = re.compile(
    r"weight|tensor|missing|unexpected|ignor|unused|config|rope|vocab|fallback", re.I
)
Served = Callable[[Line, bool, Path, str], AbstractContextManager[EngineServer]]


@dataclass(frozen=True)
class Case:
    """An engine, a head, and how it is served: `served(line, drafting, folder, dtype)`."""

    engine: str
    drafter: Drafter
    served: Served
    note: str = ""
    stand_in: bool = False

    @property
    def format(self) -> str:
        return f"{self.drafter.name}, {self.note}"


@dataclass(frozen=True)
class Row:
    """What was seen of it."""

    engine: str
    format: str
    loads: str
    fp32: str
    bf16: str
    speed: str


def vllm(format: Format = "sglang", method: str = "eagle3", drafts: int = 3) -> Served:
    """The head's directory as it is, or exported."""

    @contextmanager
    def serve(line: Line, drafting: bool, folder: Path, dtype: str) -> Iterator[EngineServer]:
        head = line.head if drafting else None
        if drafting and format != "sglang":
            head = folder / "exported"
            export_head(str(line.head), format=format, out=str(head), target=str(line.target))
        log, speculative = folder / "log", {"method": method}
        with vllm_server(
            line.target, head, log, dtype=dtype, drafts=drafts, speculative=speculative
        ) as server:
            yield server

    return serve


def sglang(shape: tuple[int, int, int]) -> Served:
    @contextmanager
    def serve(line: Line, drafting: bool, folder: Path, dtype: str) -> Iterator[EngineServer]:
        head, log = line.head if drafting else None, folder / "log"
        with sglang_server(line.target, head, log, shape=shape, dtype=dtype) as server:
            yield server

    return serve


@contextmanager
def llama(line: Line, drafting: bool, folder: Path, dtype: str) -> Iterator[EngineServer]:
    """In bf16: the head as it is exported, keys and values in fp16; the target stays in fp32."""
    head = None
    if drafting:
        head = folder / "exported.gguf"
        export_head(str(line.head), format="gguf", out=str(head))
        if dtype == "float32":
            head = in_float32(head, folder / "head.gguf")
    target, kv_type = target_in_float32(folder / "target.gguf"), "F32"
    if dtype == "bfloat16":
        kv_type = "F16"
    with llama_server(target, head, folder / "log", kv_type=kv_type) as server:
        yield server


CASES = (
    Case("vLLM", EAGLE3, vllm(), "our directory"),
    Case("vLLM", EAGLE3, vllm("speculators"), "`--format speculators`"),
    Case("vLLM", EAGLE31, vllm(), "our directory"),
    Case("vLLM", EAGLE31, vllm("speculators"), "`--format speculators`"),
    Case("vLLM", WINDOW, vllm("speculators"), "64 positions, `--format speculators`"),
    Case("vLLM", BLOCKS, vllm("speculators", "dflash", 7), "`--format speculators`"),
    Case("SGLang", EAGLE3, sglang((3, 1, 4)), "chain 3/1/4", stand_in=True),
    Case("SGLang", EAGLE3, sglang((5, 4, 8)), "tree 5/4/8", stand_in=True),
    Case("SGLang", EAGLE31, sglang((3, 1, 4)), "chain 3/1/4", stand_in=True),
    Case("SGLang", EAGLE31, sglang((5, 4, 8)), "tree 5/4/8", stand_in=True),
    Case("llama.cpp", EAGLE3, llama, "`--format gguf`"),
)


def measure(case: Case) -> Row:
    """Serve it in both types, one after the other."""
    line = make_line(case.drafter)
    plain = _plain(case.engine)
    exact, log = _held(case, line, "float32")
    near, other_log = _held(case, line, "bfloat16")
    warnings = (_warnings(log) | _warnings(other_log)) - plain.warnings
    return Row(
        case.engine,
        case.format,
        "; ".join(sorted(warnings)) or "no warning",
        _in_fp32(*exact),
        _in_bf16(*near),
        "" if case.stand_in else _speed(near[0], plain),
    )


Held = tuple[SeenServer, list[str]]


def _held(case: Case, line: Line, dtype: str) -> tuple[Held, str]:
    with TemporaryDirectory() as folder:
        with case.served(line, True, Path(folder), dtype) as server:
            # llama.cpp's target stays in fp32: only its head and its keys and values are smaller.
            report = "float32" if case.engine == "llama.cpp" else dtype
            seen, findings = line.held_against(server, dtype=report, timeout_seconds=900)
        return (
            (seen, [each.text for each in findings if each.severity == "error"]),
            server.log.read_text(errors="replace"),
        )


@dataclass(frozen=True)
class Plain:
    """The same server without a head."""

    warnings: frozenset[str]
    tokens_per_second: float


@cache
def _plain(engine: str) -> Plain:
    case = next(each for each in CASES if each.engine == engine)
    line = make_line()
    with TemporaryDirectory() as folder:
        with case.served(line, False, Path(folder), "bfloat16") as server:
            seen, _ = line.held_against(server, dtype="bfloat16", timeout_seconds=900)
        warnings = _warnings(server.log.read_text(errors="replace"))
    return Plain(frozenset(warnings), seen.runs[0].point().throughput)


def _warnings(log: str) -> set[str]:
    """Without times, processes and line numbers."""
    lines = [line for line in log.splitlines() if _WARNING.search(line) and _OF_HEAD.search(line)]
    return {re.sub(r"[\d:.-]+|\(\w+ pid=\d+\)", "", line).strip() for line in lines}


def _in_fp32(seen: SeenServer, errors: list[str]) -> str:
    if errors:
        return "; ".join(errors)
    same = [each for each in seen.compared if each.tokens is None]
    return f"{len(same)} of {len(seen.runs[0].replies)}"


def _in_bf16(seen: SeenServer, errors: list[str]) -> str:
    shape = seen.shape
    if errors or shape is None:
        return "; ".join(errors) or "no acceptance"
    # Of a reply that parts, rounds up to there are known where the report knows every position.
    known = [
        each
        for each in seen.compared
        if each.tokens is None or shape.label in each.prompt.accepted_at
    ]
    pairs = [_rounds_of_equal_text(each, shape) for each in known]
    tokens, theirs, ours = (sum(column) for column in zip(*pairs, strict=True))
    apart = 100 * (ours / theirs - 1)
    parted = f"{len(seen.partings)} part" if seen.partings else "none parts"
    return f"{tokens / theirs:.3f}, {tokens / ours:.3f}, {apart:+.1f} %; {parted}"


def _rounds_of_equal_text(pair: ComparedRounds, shape: TreeSection) -> tuple[int, int, int]:
    """Tokens after prefill's, and the rounds of both sides that begin within them."""
    tokens = (pair.tokens or len(pair.prompt.reply_ids)) - 1
    theirs, ours = pair.theirs.rounds, pair.rounds(shape)
    accepted_at = pair.prompt.accepted_at.get(shape.label)
    if accepted_at and pair.theirs.in_order:  # which goes on after the parting
        listed = iter([accepted for _, accepted in pair.theirs.in_order])
        # A round without a draft is not listed.
        theirs = rounds_until(tokens, lambda _: next(listed, 0))
        ours = rounds_until(tokens, accepted_at.__getitem__)
    return tokens, theirs, ours


def _speed(seen: SeenServer, plain: Plain) -> str:
    rate = seen.runs[0].point().throughput
    return f"{rate:.1f} / {plain.tokens_per_second:.1f} = {rate / plain.tokens_per_second:.2f}"


def main() -> None:
    """Serve and print; rows appear as they are made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines = list(Counter(case.engine for case in CASES))
    parser.add_argument("--engines", default=",".join(engines), help=f"of {', '.join(engines)}")
    parser.add_argument("--format", default="", help="part of a format's name, e.g. 'EAGLE-3, our'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of rows")
    options = parser.parse_args()
    of_engines = [case for case in CASES if case.engine in options.engines.split(",")]
    chosen = [case for case in of_engines if options.format in case.format]
    file: Path | None = options.json
    rows = [Row(**row) for row in json.loads(file.read_text())] if file and file.exists() else []
    for case in chosen:
        if any((row.engine, row.format) == (case.engine, case.format) for row in rows):
            continue
        rows.append(measure(case))
        print(" | ".join(astuple(rows[-1])), file=sys.stderr)
        if file:
            text = json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)
            file.write_text(f"{text}\n", encoding="utf-8")
    print("| engine | format | loads | fp32: equal | bf16: τ, the decoder's | tokens/s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(astuple(row)), "|")


if __name__ == "__main__":
    main()

"""Personal data, secrets and quality: in prompts before generation, in replies after it.

A prompt can be changed, because the target has not read it yet. A reply cannot: its token ids are
those that were generated, and nothing is tokenised again. A finding there drops the sample. Labels
(ids, sources, categories, licences) reach manifest and head too and pass the same filter: one with
a finding is replaced whole by a salted digest, the same wherever it occurs, and its prompt stays.

    id anna@firm.com   →  id-5b0cf2a91d3e      findings of `metadata` in the audit
    license:+49 30 …   →  license:license-…    among the reasons of rejected prompts

The ledger counts findings by type under salted hashes of their values: a team sees that one value
occurs a hundred times, or in another run, without holding it. Phone or card numbers are few enough
to try them all, so the salt is a secret that no artefact of the run holds.

Processes screen beside generation:

    caller's thread    read ─┐         ┌─▶ requests ─▶ replies ─┐
    processes                └▶ screen ┘                        └▶ screen ─┐
    threads                                                                └▶ commit

Prompts are screened a few shards ahead; by this process while the others load their recognisers,
which takes seconds. A shard's texts are screened together, with processes or without, so that their
number changes no byte. The processes are killed at the end, and end when this one is killed.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import os
import re
import secrets
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from pipeline.config import SynthSection
from pipeline.errors import ConfigError, WorkersDied
from pipeline.records import Prompt, Sample
from pipeline.synth.filters import PromptOrSample, apply_steps, replies, reply_steps
from pipeline.synth.privacy.filter import FINDERS_VERSION, PiiFilter
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.reserved import Pseudonyms, normal_form, redacted
from pipeline.synth.privacy.secrets import SECRET_ENTITIES

#: The environment variable with the secret salt of the audit's hashes.
SALT_VARIABLE = "EAGLE3_PII_SALT"


class Screen:
    """The run's policy. Without `pii.enabled` no recogniser is loaded; quality still counts."""

    def __init__(self, section: SynthSection, *, seed: int = 0) -> None:
        self._action, self._seed = section.pii.action, seed
        self._filter = PiiFilter(section.pii, section.dlp) if section.pii.enabled else None
        self._ledger = Ledger(read_salt()) if section.pii.enabled else None
        self.metadata = Metadata(section, self._filter, self._ledger)
        self._steps = reply_steps(section.quality)

    def prompts(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], Counter[str]]:
        """Clean, redacted or pseudonymised prompts, and the dropped ones by reason."""
        if self._filter is None:
            return list(prompts), Counter()
        prompts = self.metadata.clean(prompts)
        clean: list[Prompt] = []
        dropped: Counter[str] = Counter()
        records = [(prompt, _texts(prompt)) for prompt in prompts]
        for prompt, texts, findings in self._inspect(records, "prompts"):
            # Tools are no prose: with something else in a finding's place they may be none.
            in_tools = findings[-1:] if prompt.tools else []
            if self._action != "drop" and not any(in_tools):
                clean.append(self._changed(prompt, texts, findings))
            elif reason := _reason(findings if self._action == "drop" else in_tools):
                dropped[reason] += 1
            else:
                clean.append(prompt)
        return clean, dropped

    def samples(self, samples: Sequence[Sample]) -> tuple[list[Sample], Counter[str]]:
        """Samples whose replies are good and clean, and the dropped ones by reason."""
        good, dropped = apply_steps(samples, self._steps)
        if self._filter is None:
            return good, dropped
        clean: list[Sample] = []
        records = [(sample, list(replies(sample))) for sample in good]
        for sample, _, findings in self._inspect(records, "replies"):
            if reason := _reason(findings):
                dropped[reason] += 1
            else:
                clean.append(sample)
        return clean, dropped

    def take_audit(self) -> dict[str, Any]:
        """Findings since the last call, as `Ledger.take` gives them: counts and salted hashes."""
        return self._ledger.take() if self._ledger else {}

    def _inspect(
        self, records: Sequence[tuple[PromptOrSample, list[str]]], where: str
    ) -> Iterator[tuple[PromptOrSample, list[str], list[list[Finding]]]]:
        """Each record with its texts and their findings; all texts are inspected together."""
        assert self._filter is not None and self._ledger is not None
        all_findings = iter(self._filter.find_all([text for _, texts in records for text in texts]))
        for record, texts in records:
            findings = [next(all_findings) for _ in texts]
            for text, in_text in zip(texts, findings, strict=True):
                self._ledger.note(where, text, in_text)
            yield record, texts, findings

    def _changed(
        self, prompt: Prompt, texts: Sequence[str], findings: Sequence[Sequence[Finding]]
    ) -> Prompt:
        if not any(findings):
            return prompt
        names = Pseudonyms(self._seed, (prompt.source, prompt.sample_id))
        change = redacted if self._action == "redact" else names.apply
        changed = [change(text, in_text) for text, in_text in zip(texts, findings, strict=True)]
        system = changed.pop(0) if prompt.system is not None else None
        turns = tuple(changed[: len(prompt.turns)])
        return prompt.model_copy(update={"system": system, "turns": turns})


def pii_policy(section: SynthSection) -> dict[str, Any]:
    """What manifest and audit say of the policy."""
    pii = section.pii
    if not pii.enabled:
        return {"enabled": False}
    own = (recognizer.entity for recognizer in pii.recognizers)
    return {
        "enabled": True,
        "prompts": pii.action,
        "replies": "drop",
        "entities": sorted({*pii.entities, *own, *(SECRET_ENTITIES if pii.secrets else ())}),
        "score_threshold": pii.score_threshold,
        "thresholds": dict(sorted(pii.thresholds.items())),
        "dlp": "google" if section.dlp.project else "none",
        "spacy_model": pii.spacy_model,
    }


def screened_with(section: SynthSection) -> dict[str, str]:
    """What decides which texts are found: versions of the recognisers, our patterns, the salt.

    Two processes whose answers differ would give one run two filters.
    """
    if not section.pii.enabled:
        return {}
    spacy_model = section.pii.spacy_model
    packages = ("presidio-analyzer", "detect-secrets", *([spacy_model] if spacy_model else ()))
    versions = {f"pii.{package}": _version(package) for package in packages}
    salt = fingerprint(read_salt())
    return {**versions, "pii.patterns": FINDERS_VERSION, "pii.salt": salt}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _texts(prompt: Prompt) -> list[str]:
    """What the target would read: the record's own system prompt, its turns, its tools."""
    texts = (prompt.system, *prompt.turns, prompt.tools)
    return [text for text in texts if text is not None]


def _reason(findings: Sequence[Sequence[Finding]]) -> str | None:
    """A record counts once, under the first of its types in alphabetical order."""
    types = sorted({finding.entity for in_text in findings for finding in in_text})
    return f"pii:{types[0]}" if types else None


#: Field → what its digests begin with.
_FIELDS = {"sample_id": "id", "source": "source", "category": "category", "license": "license"}
#: Digests and UUIDs, alone or after a name, say nothing of anybody, and look like numbers of all
#: kinds here and there.
_HASHED = re.compile(
    r"(?:^|.*[^0-9A-Za-z.])"
    r"([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?=[0-9]*[a-f])[0-9a-f]{8,128})",
    re.DOTALL,
)
_LONGEST_HASH = 128
_DIGITS = re.compile(r"[0-9]")
_NUMBERED = re.compile(r"(.*?[^0-9.])?([1-9][0-9]*)", re.DOTALL)
#: Digits in which no telephone, card or passport has room, and those of a record's number.
_FEW_DIGITS, _RECORD_DIGITS = 6, 9
_REMEMBERED = 100_000  # labels without a finding
_LONGEST_REASON = 200


class Metadata:
    """Labels without findings. Without a filter everything is left as it is.

    Raises ConfigError when a system prompt of the run's holds what no prompt may.
    """

    def __init__(self, section: SynthSection, pii: PiiFilter | None, ledger: Ledger | None) -> None:
        self._filter, self._ledger = pii, ledger
        self._has_own_patterns = bool(section.pii.recognizers)
        self._harmless: set[str] = set()
        if pii is not None:
            self._salt = read_salt()
            _refuse(section.system_prompt, "synth.system_prompt", pii)
            for variant in section.mix:
                _refuse(variant.system_prompt, f"synth.mix.{variant.name}.system_prompt", pii)

    def clean(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The same prompts; every finding is noted in the ledger, at each prompt that has it."""
        if self._filter is None or self._ledger is None:
            return list(prompts)
        labels = {(getattr(each, name), each.source) for each in prompts for name in _FIELDS}
        findings = self._find(labels)
        cleaned = []
        for prompt in prompts:
            changed = {}
            for field, kind in _FIELDS.items():
                label = getattr(prompt, field)
                if label in findings:
                    self._ledger.note("metadata", *findings[label])
                    changed[field] = self._digest(kind, label)
            cleaned.append(prompt.model_copy(update=changed) if changed else prompt)
        return cleaned

    def clean_reasons(self, counts: Mapping[str, int]) -> dict[str, int]:
        """What prompts were left out for; a reason may quote a record's licence."""
        quoted = {reason: reason.partition(":")[2][:_LONGEST_REASON] for reason in counts}
        findings = self._find({(label, "") for label in quoted.values()})
        cleaned: Counter[str] = Counter()
        for reason, count in counts.items():
            kind, label = reason.partition(":")[0], quoted[reason]
            label = self._digest(kind, label) if label in findings else label
            cleaned[f"{kind}:{label}" if label else kind] += count
        return dict(sorted(cleaned.items()))

    def _find(self, labels: set[tuple[str, str]]) -> dict[str, tuple[str, list[Finding]]]:
        """Those of the labels that have findings, and in which text; (label, source) is given."""
        if self._filter is None:
            return {}
        typical = {label: self._typical(label, source) for label, source in sorted(labels)}
        unknown = sorted({text for text in typical.values() if text not in self._harmless})
        findings = dict(zip(unknown, self._filter.find_all(unknown), strict=True))
        for text, in_text in findings.items():
            if not in_text and len(self._harmless) < _REMEMBERED:
                self._harmless.add(text)
        return {
            label: (text, findings[text]) for label, text in typical.items() if findings.get(text)
        }

    def _typical(self, label: str, source: str) -> str:
        """A label that stands for this one and many more: of numbered ids one is inspected.

        Where the run has patterns of its own, any number may be what they are looking for.
        """
        if self._has_own_patterns:
            return label
        if hashed := _HASHED.fullmatch(label, max(0, len(label) - _LONGEST_HASH)):
            return label[: hashed.start(1)].rstrip("-_:/#")
        numbered = _NUMBERED.fullmatch(label)
        if numbered is None:
            return label
        before, number = numbered[1] or "", numbered[2]
        is_record = before == f"{source}:" and len(number) <= _RECORD_DIGITS
        if is_record or len(_DIGITS.findall(label)) <= _FEW_DIGITS:
            return before + "123456789"[: min(len(number), _FEW_DIGITS)]
        return label

    def _digest(self, kind: str, label: str) -> str:
        digest = hmac.new(self._salt, b"label\0" + label.encode(), hashlib.sha256)
        return f"{kind}-{digest.hexdigest()[:12]}"


def _refuse(system_prompt: str | None, where: str, pii: PiiFilter) -> None:
    types = pii.check(system_prompt) if system_prompt else []
    if types:
        raise ConfigError(
            f"holds personal data or a secret ({', '.join(types)})",
            where=where,
            fix="take it out: the target reads it in every conversation, and the head's card "
            "names it; what is none can be left out of synth.pii.entities",
        )


_HEX_DIGITS = 16  # 64 bits: no two of a million values are likely to share one
_KEY_BYTES = 32


class Ledger:
    """Counts and hashes since the last `take`."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._counts: dict[str, dict[str, dict[str, int]]] = {}  # where → entity → hash → times

    def note(self, where: str, text: str, findings: Iterable[Finding]) -> None:
        """Count findings of one text of the kind `where` ("prompts" or "replies")."""
        for finding in findings:
            values = self._counts.setdefault(where, {}).setdefault(finding.entity, {})
            key = self._hash(finding.entity, text[finding.start : finding.end])
            values[key] = values.get(key, 0) + 1

    def take(self) -> dict[str, Any]:
        """{"prompts": {"EMAIL_ADDRESS": {"findings": 3, "values": {hash: times}}}, "replies": …}.

        Counting starts again from nothing.
        """
        counts, self._counts = self._counts, {}
        return {
            where: {
                entity: {"findings": sum(values.values()), "values": dict(sorted(values.items()))}
                for entity, values in sorted(entities.items())
            }
            for where, entities in sorted(counts.items())
        }

    def _hash(self, entity: str, value: str) -> str:
        message = f"{entity}\0{normal_form(value)}".encode()
        return hmac.new(self._salt, message, hashlib.sha256).hexdigest()[:_HEX_DIGITS]


def read_salt() -> bytes:
    """The salt in the environment variable, or this user's own, made at first use.

    Raises ConfigError where neither works.
    """
    if salt := os.environ.get(SALT_VARIABLE):
        return salt.encode()
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "eagle3" / "pii-salt"
    try:
        return _read_or_make(path)
    except OSError as error:
        raise ConfigError(
            f"cannot be read or made: {error.strerror}",
            where=str(path),
            fix=f"set the environment variable {SALT_VARIABLE}",
        ) from None


def fingerprint(salt: bytes) -> str:
    """Tells two salts apart and gives neither away."""
    return hmac.new(salt, b"which salt this is", hashlib.sha256).hexdigest()[:_HEX_DIGITS]


def _read_or_make(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(fresh, path)  # the first link wins; nobody reads a half-written salt
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_bytes()


Result = TypeVar("Result")
#: Kept prompts, dropped ones by reason, findings; and the same of samples.
ScreenedPrompts = tuple[list[Prompt], Counter[str], dict[str, Any]]
ScreenedSamples = tuple[list[Sample], Counter[str], dict[str, Any]]
#: Shards whose prompts are screened before generation asks for them, and processes by default.
_AHEAD, _MOST_PROCESSES = 2, 4
_ENDED_BY = (signal.SIGINT, signal.SIGTERM)


class Screening:
    """The work of `screen` in processes that each make their own; with none of them here, at once.

    Leaving it waits for the shards that are being committed, unless something went wrong.
    """

    def __init__(self, screen: Screen, section: SynthSection, *, seed: int) -> None:
        self._screen = screen
        self._make_screen = partial(Screen, section, seed=seed)
        self._count = count_processes(section)
        self._ahead, self._most_commits = min(self._count, _AHEAD), self._count + 1
        self._commits: deque[Future[None]] = deque()
        self._processes: tuple[_Process, ...] = ()
        self._idle: SimpleQueue[_Process] = SimpleQueue()

    def __enter__(self) -> Screening:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._processes:
            return
        try:
            while self._commits and not kind:
                self._commits.popleft().result()
        finally:
            for process in self._processes:
                process.kill()
            for threads in (self._here, self._asking, self._committing):
                threads.shutdown(cancel_futures=True)

    def prompts(
        self, shards: Iterable[tuple[str, Sequence[Prompt]]]
    ) -> Iterator[tuple[str, ScreenedPrompts]]:
        """Those of each named shard, in the same order."""
        started: deque[tuple[str, Callable[[], ScreenedPrompts]]] = deque()
        for name, prompts in shards:
            if self._count and not self._processes:
                self._launch()  # not before: there may be no shard left for this process
            started.append((name, self._start(_screen_prompts, prompts)))
            if len(started) > self._ahead:
                name, result = started.popleft()
                yield name, result()
        for name, result in started:
            yield name, result()

    def samples(self, samples: Sequence[Sample]) -> ScreenedSamples:
        """Those of one shard."""
        return self._start(_screen_samples, samples)()

    def commit(self, task: Callable[[], None]) -> None:
        """Have `task` done in the background. Waits while there are too many; raises what they do.

        So memory and claims do not grow where screening is slower than generation.
        """
        if not self._processes:
            task()
            return
        self._commits.append(self._committing.submit(task))
        while len(self._commits) > self._most_commits or (
            self._commits and self._commits[0].done()
        ):
            self._commits.popleft().result()

    def _launch(self) -> None:
        # Not in the caller's thread, where an interruption may be lost in a recogniser's C code;
        # one at a time, as the ledger is taken after each shard.
        self._here = ThreadPoolExecutor(1, thread_name_prefix="screen")
        self._asking = ThreadPoolExecutor(self._count, thread_name_prefix="ask")
        self._committing = ThreadPoolExecutor(self._count, thread_name_prefix="commit")
        resource_tracker.ensure_running()  # which would lift the block below
        # What is blocked here is blocked there from the first instruction on: an interruption while
        # they load is the parent's to tell.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY)
        try:
            for _ in range(self._count):
                self._processes = (*self._processes, _Process(self._make_screen))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for process in self._processes:
            self._idle.put(process)

    def _start(self, work: Callable[[Screen, Any], Result], records: Any) -> Callable[[], Result]:
        """Returns what waits for the result."""
        if not self._processes:
            screened = work(self._screen, records)
            return lambda: screened
        if self._is_loading():
            return self._here.submit(work, self._screen, records).result
        return self._asking.submit(self._screen_in_process, work, records).result

    def _screen_in_process(self, work: Callable[[Screen, Any], Result], records: Any) -> Result:
        process = self._idle.get()
        try:
            return process.do(work, records)
        finally:
            self._idle.put(process)

    def _is_loading(self) -> bool:
        return not any(process.has_loaded() for process in self._processes)


class _Process:
    """A screening process and this end of its pipe: one task at a time."""

    def __init__(self, make_screen: Callable[[], Screen]) -> None:
        context = get_context("spawn")  # a fork would copy the locks of running threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_screen))
        self._process.start()
        theirs.close()
        self._loaded = False

    def has_loaded(self) -> bool:
        """Or has died, or found an error: the next task will tell."""
        return self._loaded or self._pipe.poll()

    def do(self, work: Callable[[Screen, Any], Result], records: Any) -> Result:
        """Raises what `work` raises there, and WorkersDied."""
        try:
            if not self._loaded:
                self._take()
                self._loaded = True
            self._pipe.send((work, records))
            result: Result = self._take()
        except (EOFError, OSError):
            raise _died() from None
        return result

    def _take(self) -> Any:
        outcome = self._pipe.recv()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def kill(self) -> None:
        """It has nothing to write, and may still load."""
        self._process.kill()
        self._process.join()


def count_processes(section: SynthSection) -> int:
    """How many the section wants on this machine.

    The bundled decoder keeps every core busy itself, and without recognisers there is little to do.
    """
    if section.screening_processes is not None:
        return section.screening_processes
    if section.generator.backend == "local" or not section.pii.enabled:
        return 0
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))


def _screen_prompts(screen: Screen, prompts: Sequence[Prompt]) -> ScreenedPrompts:
    return *screen.prompts(prompts), screen.take_audit()


def _screen_samples(screen: Screen, samples: Sequence[Sample]) -> ScreenedSamples:
    return *screen.samples(samples), screen.take_audit()


def _died() -> WorkersDied:
    return WorkersDied(
        "a screening process has ended early, perhaps for want of memory",
        where="synth.screening_processes",
        fix="run the same command again, with fewer of them or 0; a script of your own that calls "
        "the stage does so under `if __name__ == '__main__':`",
    )


def _serve(pipe: Connection, make_screen: Callable[[], Screen]) -> None:
    """What a process does, until its parent ends. Signals are the parent's business."""
    for number in _ENDED_BY:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        screen = make_screen()
        pipe.send(None)
        while True:
            work, records = pipe.recv()
            pipe.send(work(screen, records))
    except EOFError:
        pass
    except Exception as error:  # crosses to the parent, who raises it
        pipe.send(error)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)

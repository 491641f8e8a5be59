"""A run's samples as a data set, and such a data set as the finished synth stage of a run.

    README.md            for people and for the Hub: which files are data, licences
    datasheet.md         sources, licences, personal data, what was left out
    audit.json           the same for programs, without the hashes of personal data
    manifest.json        the target's contract, shards with checksums, counts
    shards/*.parquet     samples, as docs/states-format.md and store/samples.py describe them

It is laid out as a stage, so what reads a run's samples reads a data set. Paths, buckets and notes
about single findings stay in the run. What the datasheet does not vouch for is not given away:
samples in which nobody looked for personal data, or whose licence is unknown or forbids it.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline import __version__
from pipeline.console import markdown_text, notice, progress_bar
from pipeline.errors import CorruptShard, DataError, MissingStage, StageConflict, StoreError
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import (
    SCHEMA_VERSION,
    Manifest,
    Sample,
    Shard,
    TargetContract,
    sealed_json,
    stored_file,
)
from pipeline.store.hub import HUB, HubAddress, commit_of, license_fields
from pipeline.store.location import Location
from pipeline.store.manifest import (
    BEGIN,
    MANIFEST,
    Begin,
    check_vouched,
    find_manifest,
    parse_manifest,
    read_manifest,
    stage_location,
)
from pipeline.store.output import Publication, output_directory
from pipeline.store.samples import decode_samples, encode_samples, read_samples
from pipeline.store.shards import ENTRY, SHARDS, read_shard, verify_sizes, write_shard
from pipeline.synth.audit import AUDIT, Audit, count_tokens
from pipeline.synth.datasheet import DATASHEET, write_datasheet

README = "README.md"
_NO_LICENSE = ("", "unknown", "none", FORBIDS_COMPETING_MODELS)
_ACTIONS = {"drop": "dropped", "redact": "redacted", "pseudonymise": "pseudonymised"}
#: Of a shard that others wrote: bytes, and bytes once it is unpacked.
_MOST, _MOST_UNPACKED = 1 << 30, 4 << 30


def export_samples(run_uri: str, out: str, publication: Publication | None = None) -> None:
    """Write the samples of a finished run to `out`; to the Hub only if `publication` says so.

    Raises MissingStage, CorruptShard for what is not as synth wrote it, and DataError where the
    datasheet does not allow it.
    """
    manifest, location = read_manifest(run_uri, "synth"), stage_location(run_uri, "synth")
    audit = _read_audit(location, manifest)
    _require_allowed(audit, where=location.where(DATASHEET))
    opened = output_directory(
        out, last=MANIFEST, kind="dataset", publication=publication, leaving=_leaving(audit)
    )
    with opened as folder:
        _write(folder, location, manifest, audit)
    if not out.startswith(HUB):
        notice("export-samples", f"{manifest.rows:,} samples: {out}")


def _read_audit(location: Location, manifest: Manifest) -> Audit:
    for name in (AUDIT, DATASHEET):
        where = location.where(name)
        if not location.exists(name):
            fix = "restore the file, or run `eagle3 synth --force`"
            raise CorruptShard("is missing, so nothing is given away", where=where, fix=fix)
        data = location.read(name)
        check_vouched(manifest, name, stored_file(data), where=where)
    fix = "restore the file, or run `eagle3 synth --force`"
    return Audit.parse(location.read(AUDIT), where=location.where(AUDIT), fix=fix)


def _require_allowed(audit: Audit, *, where: str) -> None:
    """Raise DataError for samples that the datasheet does not vouch for."""
    if not audit.personal_data["policy"].get("enabled"):
        problem = "nobody looked for personal data in these samples"
        fix = "make the run again with synth.pii.enabled=true"
        raise DataError(problem, where=f"{where}: personal data", fix=fix)
    licenses = {name: audit.licenses[name] for name in _NO_LICENSE if name in audit.licenses}
    if licenses:
        counts = ", ".join(f"{count:,} {name or 'blank'}" for name, count in licenses.items())
        problem = f"samples without a licence that lets them be given away: {counts}"
        fix = "leave such prompts out with synth.allowed_licenses, or state a source's license"
        raise DataError(problem, where=f"{where}: licences", fix=fix)


def _leaving(audit: Audit) -> list[str]:
    """What an upload gives away, in a line each."""
    policy, findings = audit.personal_data["policy"], audit.personal_data["findings"]
    counts = [
        f"{entity} {of['findings']:,} in {where}"
        for where, entities in findings.items()
        for entity, of in entities.items()
    ]
    action = _ACTIONS.get(policy["prompts"], policy["prompts"])
    source = _published(audit.target).source
    tokens, samples = int(audit.tokens["all"]), audit.prompts["samples"]
    return [
        f"text of {samples:,} conversations, {tokens:,} tokens: prompts of the sources, system "
        f"prompts, and the replies of {source}, whose terms hold for them",
        f"prompts by licence: {_counted(audit.licenses)}",
        f"prompts by source: {_counted({key: of['samples'] for key, of in audit.sources.items()})}",
        f"personal data that was found ({action} in prompts, dropped in replies): "
        f"{', '.join(counts) or 'none'}",
        "what no recogniser finds is in them: look at the samples before others do",
    ]


def _write(folder: Path, location: Location, manifest: Manifest, audit: Audit) -> None:
    contract = _published(manifest.contract)
    before, after = manifest.contract.source, contract.source
    (folder / SHARDS).mkdir(parents=True)
    licenses, shards = Counter[str](), []
    with progress_bar("export-samples", unit="samples", total=manifest.rows) as bar:
        for shard in manifest.shards:
            samples = [
                sample.model_copy(update={"generator": _renamed(sample.generator, before, after)})
                for sample in read_samples(location, shard)
            ]
            licenses.update(sample.license for sample in samples)
            data = encode_samples(samples)
            (folder / SHARDS / shard.name).write_bytes(data)
            size, sha256 = stored_file(data)
            changed = {"file": None, "bytes": size, "sha256": sha256}
            shards.append(shard.model_copy(update=changed))
            bar.advance(len(samples))
    if licenses != Counter(audit.licenses):
        problem = f"names licences {_counted(audit.licenses)}; the samples {_counted(licenses)}"
        where, fix = location.where(AUDIT), "run `eagle3 synth --force`"
        raise CorruptShard(problem, where=where, fix=fix)
    public = _public_audit(audit, contract)
    texts = {AUDIT: public.as_json(), DATASHEET: write_datasheet(public)}
    own = {f"{name}_sha256": stored_file(text.encode())[1] for name, text in texts.items()}
    made = manifest.model_copy(
        update={
            "contract": contract,
            "shards": tuple(shards),
            "details": {**_without_places(manifest.details), **own},
            "files": {name: stored_file(text.encode()) for name, text in texts.items()},
        }
    )
    texts[README] = _card(made, public)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / MANIFEST).write_bytes(sealed_json(made.model_dump(mode="json")))


def _published(contract: TargetContract) -> TargetContract:
    from pipeline.heads.checkpoint import HeadCard, published  # torch

    return published(HeadCard(contract)).contract


def _without_places(details: Mapping[str, Any]) -> dict[str, Any]:
    from pipeline.heads.checkpoint import without_places

    facts: dict[str, Any] = without_places(dict(details))
    return facts


def _renamed(generator: str, before: str, after: str) -> str:
    """What produced a reply, with the target's name in place of its path."""
    return after + generator.removeprefix(before) if generator.startswith(before) else generator


def _public_audit(audit: Audit, contract: TargetContract) -> Audit:
    """Without hashes of personal data, and without the target's path."""
    findings = {
        where: {entity: {**of, "frequent": {}} for entity, of in entities.items()}
        for where, entities in audit.personal_data["findings"].items()
    }
    generators = {
        _renamed(name, audit.target.source, contract.source): count
        for name, count in audit.generators.items()
    }
    changed = {
        "target": contract,
        "generators": generators,
        "personal_data": {**audit.personal_data, "findings": findings},
    }
    return audit.model_copy(update=changed)


def _card(manifest: Manifest, audit: Audit) -> str:
    """README.md: a dataset card as the Hub reads it."""
    source = markdown_text(manifest.contract.source)
    fields = {
        **license_fields(list(manifest.licenses)),
        "tags": ["speculative-decoding", "eagle3", "synthetic"],
        "task_categories": ["text-generation"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": "train", "path": f"{SHARDS}/*.parquet"}],
            }
        ],
    }
    metadata = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    supervised = int(audit.tokens["supervised"])
    return (
        f"---\n{metadata}---\n\n# Replies of {source}\n\n"
        f"{manifest.rows:,} conversations whose replies {source} generated, with the exact token "
        f"ids that it read and wrote: {manifest.tokens:,} tokens, {supervised:,} of them "
        "generated. They train draft heads for this target, and for no other: contract and "
        f"checksums are in {MANIFEST}.\n\n"
        f"Prompts by licence: {markdown_text(_counted(manifest.licenses))}. Sources, personal "
        f"data and what was left out are in [{DATASHEET}]({DATASHEET}).\n\n"
        "```bash\neagle3 import-samples THIS_DATASET --out RUN\n```\n\n"
        f"Written by eagle3 {__version__}.\n"
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def import_samples(source: str, run_uri: str) -> Manifest:
    """Make the data set at `source` the finished synth stage of the run at `run_uri`.

    Every byte is compared with its manifest, and the manifest with the samples. Raises MissingStage
    where there is no such data set, CorruptShard for a damaged one, and StageConflict where the run
    has other samples.
    """
    if source.startswith(HUB):
        source = str(HubAddress.parse(source, "dataset"))
    location, stage = Location(source), stage_location(run_uri, "synth")
    if not location.exists(MANIFEST):
        fix = "pass what `eagle3 export-samples` wrote; other data sets are sources of prompts"
        raise MissingStage(f"has no {MANIFEST}", where=source, fix=fix)
    manifest = parse_manifest(location, location.read(MANIFEST), "synth")
    content = manifest.content_hash
    begun = Begin(
        stage="synth",
        config_hash=manifest.config_hash,
        parent_hash=None,
        made_with={"data set": content},
    )
    if find_manifest(run_uri, "synth") is None or not stage.exists(BEGIN):
        verify_sizes(location, manifest.shards)
        _require_bounded(location, manifest.shards)
    if begun.create(stage).made_with != begun.made_with:
        problem = "has been begun with other samples"
        raise StageConflict(problem, where=stage.uri, fix="choose another run with --out")
    if (there := find_manifest(run_uri, "synth")) is not None:
        notice("import-samples", f"complete: {there.rows:,} samples at {stage.uri}")
        return there
    finished = _finished(location, stage, manifest, commit_of(source))
    data = stage.create(MANIFEST, sealed_json(finished.model_dump(mode="json")))
    finished = parse_manifest(stage, data, "synth")
    licenses = _counted(finished.licenses)
    notice("import-samples", f"{finished.rows:,} samples, prompts by licence: {licenses}")
    return finished


def _finished(location: Location, stage: Location, manifest: Manifest, origin: str) -> Manifest:
    """The manifest of the run's stage, after its shards and files were written."""
    licenses, sources, shards = Counter[str](), Counter[str](), []
    files = {}
    with progress_bar("import-samples", unit="samples", total=manifest.rows) as bar:
        for shard in manifest.shards:
            data, samples = _read(location, shard)
            licenses.update(sample.license for sample in samples)
            sources.update(sample.source for sample in samples)
            tokens, rejected = shard.tokens, dict(shard.rejected)
            entry = write_shard(
                stage,
                shard.name,
                data,
                rows=shard.rows,
                tokens=tokens,
                rejected=rejected,
                seconds=0,
            )
            if entry.shard != shard:
                where, fix = stage.child(SHARDS).where(shard.name), "choose another run with --out"
                raise StageConflict("holds other samples", where=where, fix=fix)
            shards.append(entry.shard)
            files[f"{SHARDS}/{shard.name}{ENTRY}"] = entry.file
            bar.advance(shard.rows)
    for name, counts, stated in (
        ("licenses", licenses, manifest.licenses),
        ("sources", sources, manifest.sources),
    ):
        if counts != Counter(stated):
            problem = f"names {_counted(stated)}; the samples {_counted(counts)}"
            fix = "take the data set from where it was made"
            raise CorruptShard(problem, where=f"{location.where(MANIFEST)}: {name}", fix=fix)
    for name in (AUDIT, DATASHEET):
        data = location.read(name)
        check_vouched(manifest, name, stored_file(data), where=location.where(name))
        files[name] = stored_file(stage.create(name, data))
    begun = stage.read(BEGIN)
    details = {**manifest.details, "imported from": _without_places({"source": origin})["source"]}
    return manifest.model_copy(
        update={
            "schema_version": SCHEMA_VERSION,
            "shards": tuple(shards),
            "files": {**files, BEGIN: stored_file(begun)},
            "details": details,
        }
    )


def _read(location: Location, shard: Shard) -> tuple[bytes, Sequence[Sample]]:
    """A shard's bytes and samples. Raises CorruptShard where they are not what it says."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    data, where = read_shard(location, shard), location.child(SHARDS).where(shard.path)
    fix = "take the data set from where it was made"
    try:
        footer = pq.ParquetFile(io.BytesIO(data)).metadata
        unpacked = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    except (pa.ArrowException, OSError) as error:
        problem = f"not a readable Parquet file: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=where, fix=fix) from None
    if unpacked > _MOST_UNPACKED:
        raise CorruptShard(f"unpacks to {unpacked:,} bytes", where=where, fix=fix)
    samples = decode_samples(data, where)
    if (len(samples), count_tokens(samples)[1]) != (shard.rows, shard.tokens):
        problem = f"holds other samples than the {shard.rows} that {MANIFEST} names"
        raise CorruptShard(problem, where=where, fix=fix)
    return data, samples


def _require_bounded(location: Location, shards: Sequence[Shard]) -> None:
    for shard in shards:
        if shard.bytes > _MOST:
            problem = f"has {shard.bytes:,} bytes, at most {_MOST:,} are read"
            where = location.child(SHARDS).where(shard.path)
            raise StoreError(problem, where=where, fix="check whose data set this is")

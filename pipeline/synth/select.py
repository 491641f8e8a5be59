"""The prompts of a run, after all filters that need no model, cut into shards."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import RunConfig, SynthSection
from pipeline.errors import ConfigError, DataError
from pipeline.prompts import balanced, load_prompts
from pipeline.records import Prompt, digest
from pipeline.synth.filters import Step, decontaminate, first_of_its_kind, license_gate
from pipeline.synth.quality import apply_steps, prompt_steps


@dataclass(frozen=True)
class Selection:
    """Which prompts go in. The same config and files give the same selection."""

    loaded: int  # prompts that the sources gave
    prompts: tuple[Prompt, ...]  # those that passed, in order
    rejected: dict[str, int]  # the others, by reason

    def shards(self, size: int) -> dict[str, tuple[Prompt, ...]]:
        """File name → its prompts. The name carries their digest: other prompts, another name."""
        cuts = [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]
        return {f"{index:05d}-{_digest(cut)}.parquet": cut for index, cut in enumerate(cuts)}


def synth_section(config: RunConfig) -> SynthSection:
    """The section that this stage needs; ConfigError without one."""
    if config.synth is None:
        fix = "add a synth section with `sources`"
        raise ConfigError("required but not set", where="config: synth", fix=fix)
    return config.synth


def select_prompts(config: RunConfig) -> Selection:
    """Load, filter and draw. Raises DataError when nothing is left."""
    section = synth_section(config)
    loaded = load_prompts(section.sources, seed=config.run.seed)
    passed, rejected = apply_steps(loaded, _steps(section, config.run.seed))
    drawn = balanced(passed, section.max_prompts, config.run.seed)
    if len(drawn) < len(passed):
        rejected["max_prompts"] = len(passed) - len(drawn)
    if not drawn:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
        problem = f"none of {len(loaded)} prompts is left after the filters ({reasons})"
        fix = "add sources, set their `license`, or widen synth.allowed_licenses"
        raise DataError(problem, where="synth.sources", fix=fix)
    assert len(loaded) == len(drawn) + rejected.total()
    return Selection(len(loaded), tuple(drawn), dict(rejected))


def _steps(section: SynthSection, seed: int) -> list[Step]:
    """Every filter that needs no model, in the order in which it may claim a prompt."""
    steps: list[Step] = [license_gate(section.allowed_licenses)]
    if section.quality.duplicates:
        steps.append(first_of_its_kind())
    excluded = load_prompts(section.exclude, seed=seed)
    return [*steps, *prompt_steps(section.quality), decontaminate(excluded)]


def _digest(prompts: tuple[Prompt, ...]) -> str:
    return digest([prompt.model_dump(mode="json") for prompt in prompts])[:8]

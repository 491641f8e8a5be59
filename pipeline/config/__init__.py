"""The run's configuration: one section a stage, frozen, strict, documented where declared.

    config = load("configs/demo.yaml", ["synth.max_prompts=200"])

`load` reads the YAML, applies `section.key=value` overrides, rejects unknown keys with the nearest
known one, and returns a frozen `RunConfig`. "auto" values that depend only on the machine are
resolved here; those that depend on the target by the stage, which writes them to its manifest.
Each key is documented below its declaration; `eagle3 schema` prints the same text.
"""

from __future__ import annotations

from pipeline.config.drafter import (
    DRAFTERS,
    DrafterSection,
    NgramSection,
    SelfSpecSection,
    StandaloneSection,
)
from pipeline.config.evaluation import EvalSection, LoadSection, RivalSection
from pipeline.config.jobs import JobsSection, SecretSpec, StageJobSection
from pipeline.config.plan import PlanSection
from pipeline.config.process import (
    cache_directory,
    cpu_kernels,
    is_launched,
    keep_freed_memory,
    local_rank,
    prepare_process,
    rank,
    store_retry_seconds,
    store_timeout_seconds,
    take_settings,
    world_size,
)
from pipeline.config.reading import load, overridden, parse
from pipeline.config.run import FeaturesSection, RunConfig, RunSection, TargetSection
from pipeline.config.section import BatchTrees, Section, TreeSection, tree_labels
from pipeline.config.serve import ServeSection
from pipeline.config.server import LiveServerSection
from pipeline.config.synth import (
    DlpSection,
    GeneratorSection,
    PiiSection,
    QualitySection,
    RecognizerSpec,
    SourceSpec,
    SynthSection,
)
from pipeline.config.train import DflashSection, HeadSection, TrainSection

__all__ = [
    "DRAFTERS",
    "BatchTrees",
    "DflashSection",
    "DlpSection",
    "DrafterSection",
    "EvalSection",
    "FeaturesSection",
    "GeneratorSection",
    "HeadSection",
    "JobsSection",
    "LiveServerSection",
    "LoadSection",
    "NgramSection",
    "PiiSection",
    "PlanSection",
    "QualitySection",
    "RecognizerSpec",
    "RivalSection",
    "RunConfig",
    "RunSection",
    "SecretSpec",
    "Section",
    "SelfSpecSection",
    "ServeSection",
    "SourceSpec",
    "StageJobSection",
    "StandaloneSection",
    "SynthSection",
    "TargetSection",
    "TrainSection",
    "TreeSection",
    "cache_directory",
    "cpu_kernels",
    "is_launched",
    "keep_freed_memory",
    "load",
    "local_rank",
    "overridden",
    "parse",
    "prepare_process",
    "rank",
    "store_retry_seconds",
    "store_timeout_seconds",
    "take_settings",
    "tree_labels",
    "world_size",
]

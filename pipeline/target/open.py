"""The one way to a target: resolved, its contract read and matched, its parts on demand.

target = open_target(config.target, expected=parent.contract, where="…/manifest.json")
target.contract, target.template(), target.weights, target.load()
"""

from __future__ import annotations

import importlib.util
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from pipeline.config import TargetSection
from pipeline.console import notice
from pipeline.errors import TargetError
from pipeline.records import TargetContract, match_contracts
from pipeline.target.architecture import DECODED, Architecture, read_architecture, read_config
from pipeline.target.arithmetic import resolve_dtype
from pipeline.target.contract import read_contract
from pipeline.target.files import INDEX, WHOLE
from pipeline.target.load import LoadedTarget, load_model, pick_device
from pipeline.target.resolve import ResolvedTarget, resolve, resolve_tokenizer
from pipeline.target.template import ChatTemplate, load_template
from pipeline.target.weights import TargetWeights


@dataclass(frozen=True)
class Target:
    """A target on this machine's disk. Nothing heavy is read until it is asked for."""

    section: TargetSection
    resolved: ResolvedTarget
    contract: TargetContract
    architecture: Architecture

    @property
    def directory(self) -> Path:
        """Where config, tokenizer and safetensors lie."""
        return self.resolved.directory

    @property
    def device(self) -> torch.device:
        """Where this machine computes with it. Raises TargetError."""
        return pick_device(self.section.device)

    @property
    def dtype(self) -> torch.dtype:
        """What this machine computes with, whatever the weights are stored in."""
        return resolve_dtype(self.section.dtype, self.device)

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that it was made for."""
        config = read_config(self.directory, f"target.source={self.section.source}")
        return int(getattr(config, "max_position_embeddings", 0))

    def template(self, *, system_prompt: str | None = None) -> ChatTemplate:
        """Tokenizer, chat template and stop ids. Raises TargetError, TemplateError."""
        return load_template(
            self.directory,
            source=self.section.source,
            system_prompt=system_prompt,
            kwargs=self.section.chat_template_kwargs,
            chat_template=self.section.chat_template,
        )

    @cached_property
    def weights(self) -> TargetWeights:
        """Single tensors, memory-mapped. Raises TargetError."""
        return TargetWeights(self.directory, self.architecture)

    def load(
        self,
        *,
        attention: str = "sdpa",
        dtype: str | None = None,
        device_map: str | dict[str, int | str] | None = None,
        processes: int = 1,
    ) -> LoadedTarget:
        """The whole model; see `load_model`."""
        return load_model(
            self.section,
            self.directory,
            self.contract,
            attention=attention,
            dtype=dtype,
            device_map=device_map,
            processes=processes,
        )


def open_target(
    section: TargetSection,
    *,
    expected: TargetContract | None = None,
    where: str = "",
    decoded: bool = False,
) -> Target:
    """Resolve a target and read what it is.

    Raises TargetError, UnsupportedModel for one that cannot be trained for, or that the bundled
    decoder does not run where it is to be `decoded`, and ContractMismatch when it is not the target
    that the artefact at `where` was made for, whose contract is `expected`.
    """
    resolved = resolve(section, decoded=decoded)
    source = f"target.source={resolved.source}"
    config = read_config(resolved.directory, source)
    architecture = read_architecture(config, source, decoded=decoded)
    contract = read_contract(section, resolved, architecture)
    if expected is not None:
        match_contracts(contract, expected, where=where)
        if expected.fingerprint != contract.fingerprint:
            made = f"{where} was made by a version that sampled the target's weights"
            notice("target", f"{made}: the sampled blocks are equal, other bytes were not compared")
    elif config.model_type not in DECODED:
        stages = "eval and train.evaluate_every cannot measure a head for it"
        notice("target", f"the bundled decoder does not run {config.model_type}: {stages}")
    _check_company(resolved.directory)
    target = Target(section, resolved, contract, architecture)
    target.weights.check()
    harmless = "rotary_emb.inv_freq", "lm_head.weight"  # computed again; a copy of the embedding
    surplus = [each for each in target.weights.surplus if not each.endswith(harmless)]
    if surplus:
        named = ", ".join(surplus[:3]) + (", …" if len(surplus) > 3 else "")
        left = f"{len(surplus)} stored tensors are no part of a model of its config.json"
        notice("target", f"{left} and are not read, as by transformers: {named}")
    return target


def _check_company(directory: Path) -> None:
    """Say, or refuse, what makes other tools load other weights from the same directory.

    Raises TargetError for an adapter that transformers would apply.
    """
    adapter = directory / "adapter_config.json"
    if adapter.is_file() and importlib.util.find_spec("peft") is not None:
        problem = "is applied by transformers where peft is installed, as it is here"
        fix = "merge the adapter into the weights, or move it out of the directory"
        raise TargetError(problem, where=str(adapter), fix=fix)
    index = directory / INDEX
    if (directory / WHOLE).is_file() and index.is_file():
        with suppress(OSError, ValueError, AttributeError):
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if others := sorted(n for n in names - {WHOLE} if (directory / n).is_file()):
                text = f"{WHOLE} is read, as by transformers; {INDEX} names {others[0]}, which "
                notice("target", f"{text}servers may load instead: keep one of the two")


def open_template(section: TargetSection, *, system_prompt: str | None = None) -> ChatTemplate:
    """The target's template alone: its weights need not be here, nor be anything that the decoder
    runs. Raises TargetError, TemplateError."""
    return load_template(
        resolve_tokenizer(section).directory,
        source=section.source,
        system_prompt=system_prompt,
        kwargs=section.chat_template_kwargs,
        chat_template=section.chat_template,
    )


def open_contracted_target(
    contract: TargetContract, source: str | None = None, *, where: str
) -> Target:
    """The target that the artefact at `where` was made for, by the contract it carries.

    `source` says where the target is now; the default is where it was then. Raises TargetError,
    ContractMismatch.
    """
    section = TargetSection.model_validate(
        {
            "source": source or contract.source,
            "revision": contract.revision if source is None else None,
            "capture_layers": contract.capture_layers,
            "chat_template": contract.chat_template,
            "chat_template_kwargs": contract.chat_template_kwargs,
        }
    )
    return open_target(section, expected=contract, where=where)

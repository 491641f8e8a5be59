"""Replies of another model than the teacher are refused by name, and right ones are not accused.

transformers' own `generate` writes the replies, of the target itself or of one with a planted
fault; what captures the target's states must tell them apart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import FeaturesSection, TargetSection
from pipeline.errors import DataError
from pipeline.features.capture import CapturedShard, MatchedTarget, capture_shard, check_replies
from pipeline.records import Message, Sample, SamplingParams, Span
from pipeline.target.agreement import Agreement
from pipeline.target.architecture import FAMILIES
from pipeline.target.forward import register_packed_attention
from pipeline.target.open import open_target
from tests.target.families import save_family

TRAINED_FOR = [name for name, family in FAMILIES.items() if not family.refused]
END_IDS = [1, 2]  # of the tokenizer and of the configurations
GREEDY = SamplingParams(temperature=0, top_p=1, top_k=0, max_new_tokens=48)
WARM = SamplingParams(temperature=1, top_p=1, top_k=0, max_new_tokens=48)
NUCLEUS = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=48)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"), tiny_target)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model."""
    from transformers import AutoConfig

    from pipeline.target.architecture import model_class

    loader = model_class(AutoConfig.from_pretrained(directory), str(directory))
    return loader.from_pretrained(directory, dtype=dtype).eval()


def prompts(count: int = 16, length: int = 12, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (count, length), generator=generator).tolist()


@torch.inference_mode()
def write_replies(
    model: Any,
    read: Sequence[Sequence[int]],
    sampling: SamplingParams = GREEDY,
    *,
    stored: Sequence[Sequence[int]] | None = None,
    says: SamplingParams | None = None,
    end_ids: Sequence[int] = tuple(END_IDS),
) -> list[Sample]:
    """Samples whose replies `model` writes after it has `read` the prompts.

    `stored` are the prompts, and `says` the sampling, that the samples name.
    """
    torch.manual_seed(1)
    samples = []
    for index, prompt in enumerate(read):
        ids = torch.tensor([prompt])
        drawn = (
            {"do_sample": True, "temperature": sampling.temperature}
            | {"top_p": sampling.top_p, "top_k": sampling.top_k}
            if sampling.temperature
            else {"do_sample": False}
        )
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(end_ids),
            pad_token_id=0,
            **drawn,
        )[0].tolist()
        reply, before = output[len(prompt) :], list((stored or read)[index])
        samples.append(
            Sample(
                sample_id=f"p{index}",
                source="unit",
                license="MIT",
                category="chat",
                messages=(Message(role="user", content="hi"),),
                token_ids=(*before, *reply),
                supervised=(Span(start=len(before), end=len(before) + len(reply)),),
                finish_reason="stop" if reply[-1] in end_ids else "length",
                sampling=says or sampling,
                seed=0,
                generator="transformers",
            )
        )
    return samples


def judged(directory: Path, samples: list[Sample], dtype: str = "float32") -> CapturedShard:
    """Capture by the target in `directory`, with its referee."""
    section = TargetSection.model_validate(
        {"source": str(directory), "dtype": dtype, "device": "cpu", "capture_layers": (1, 3, 4)}
    )
    target = open_target(section)
    matched = MatchedTarget(target, target.load(attention=register_packed_attention()))
    shard = capture_shard(
        *(matched.loaded, samples, 512, lambda tokens: None),
        name="a",
        tolerance=0,
        referee=matched.referee(),
    )
    check_replies(
        samples, shard.agreements, matched.most_beyond(FeaturesSection(), shard.gap_steps)
    )
    return shard


def pooled(shard: CapturedShard) -> Agreement:
    return sum(shard.agreements, Agreement())


# Right runs.


@pytest.mark.parametrize("family", TRAINED_FOR)
def test_right_replies_of_every_family(family: str, tmp_path: Path, tiny_target: Path) -> None:
    """Greedy and drawn, in fp32; and written in bf16, where experts change places."""
    directory = save_family(family, tmp_path / family, tiny_target)
    model = load(directory)
    greedy = pooled(judged(directory, write_replies(model, prompts(8))))
    assert greedy.greedy >= 40 and greedy.best >= 0.98 * greedy.greedy and not greedy.beyond
    drawn = pooled(judged(directory, write_replies(model, prompts(8), NUCLEUS)))
    assert drawn.drawn >= 40 and drawn.outside == 0
    assert abs(drawn.excess) < 4 * drawn.standard_error
    for sampling in (GREEDY, NUCLEUS):
        judged(directory, write_replies(model.bfloat16(), prompts(8), sampling))


@pytest.mark.parametrize("sampling", [GREEDY, WARM, NUCLEUS], ids=["greedy", "warm", "nucleus"])
@pytest.mark.parametrize("writes", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("teaches", ["bfloat16", "float32"])
def test_right_replies_of_every_type(
    llama: Path, sampling: SamplingParams, writes: torch.dtype, teaches: str
) -> None:
    samples = write_replies(load(llama, writes), prompts(24), sampling)
    agreement = pooled(judged(llama, samples, teaches))
    assert agreement.greedy + agreement.drawn >= 200


# Planted faults: what writes the replies differs from the target in one thing.


def _swapped(model: Any) -> Any:
    layers = model.model.layers
    layers[3].mlp, layers[4].mlp = layers[4].mlp, layers[3].mlp
    return model


def _tied(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.clone())
    return model


def _rope(model: Any) -> Any:
    model.model.rotary_emb.inv_freq *= 0.25
    return model


@torch.no_grad()
def _quantised(model: Any, bits: int = 4, group: int = 16) -> Any:
    for name, weight in model.named_parameters():
        if "proj" in name:
            groups = weight.reshape(len(weight), -1, group)
            step = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            weight.copy_(((groups / step).round() * step).reshape(weight.shape))
    return model


@torch.no_grad()
def _with_lora(model: Any) -> Any:
    for layer in model.model.layers:
        weight: Tensor = layer.self_attn.v_proj.weight
        generator = torch.Generator().manual_seed(3)
        a = torch.randn(4, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], 4, generator=generator)
        weight += 0.3 * (b @ a) * weight.norm() / (b @ a).norm()
    return model


@dataclass(frozen=True)
class Fault:
    """Writes samples wrongly, given the right model and another one."""

    write: Callable[[Any], list[Sample]]
    says: str  # in the error


def _other(model: Any) -> Any:
    torch.manual_seed(7)
    return type(model)(model.config).eval()


def _other_template(model: Any) -> list[Sample]:
    """The server puts a system prompt of its own in front."""
    return write_replies(model, [[5, 6, 7, 8, *each] for each in prompts()], stored=prompts())


def _fragment(model: Any) -> list[Sample]:
    """The samples hold a space, 50, that the server did not read."""
    return write_replies(
        model, prompts(), stored=[[*each[:-3], 50, *each[-3:]] for each in prompts()]
    )


BEST = "greedy reply tokens lie below the teacher's best"
FAULTS = {
    "other weights": Fault(lambda model: write_replies(_other(model), prompts()), BEST),
    "one layer swapped": Fault(lambda model: write_replies(_swapped(model), prompts()), BEST),
    "tied flag flipped": Fault(lambda model: write_replies(_tied(model), prompts()), BEST),
    "wrong rope": Fault(lambda model: write_replies(_rope(model), prompts()), BEST),
    "wrong template": Fault(_other_template, BEST),
    "tokenised fragment": Fault(_fragment, BEST),
    "end id missing": Fault(
        lambda model: write_replies(model, prompts(64), WARM, end_ids=[95]), "do(es)? not end where"
    ),
    "quantised server": Fault(lambda model: write_replies(_quantised(model), prompts()), BEST),
    "LoRA on the server": Fault(lambda model: write_replies(_with_lora(model), prompts()), BEST),
    "greedy said, drawn": Fault(
        lambda model: write_replies(model, prompts(), WARM, says=GREEDY), BEST
    ),
    "drawn said, greedy": Fault(
        lambda model: write_replies(model, prompts(), GREEDY, says=WARM), "colder than the sampling"
    ),
    "colder than said": Fault(
        partial(
            lambda model, cold: write_replies(model, prompts(64), cold, says=WARM),
            cold=WARM.model_copy(update={"temperature": 0.7}),
        ),
        "colder than the sampling",
    ),
    "hotter than said": Fault(
        partial(
            lambda model, cool: write_replies(model, prompts(64), WARM, says=cool),
            cool=WARM.model_copy(update={"temperature": 0.7}),
        ),
        "hotter than the sampling|nats below",
    ),
    "no top-p, no top-k": Fault(
        partial(
            lambda model, all_: write_replies(model, prompts(), all_, says=NUCLEUS),
            all_=NUCLEUS.model_copy(update={"top_p": 1.0, "top_k": 0}),
        ),
        "outside the top-p",
    ),
    "drawn by other weights": Fault(
        lambda model: write_replies(_other(model), prompts(64), WARM), "mean log-probability"
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, llama: Path, dtype: str) -> None:
    samples = FAULTS[name].write(load(llama))
    with pytest.raises(DataError, match=FAULTS[name].says) as raised:
        judged(llama, samples, dtype)
    assert "sample p" in raised.value.where and "chat template" in raised.value.fix


def test_one_bad_endpoint_among_many(llama: Path) -> None:
    """Two samples of a hundred are another model's: the one named is one of them."""
    right, other = write_replies(load(llama), prompts(98)), load(llama)
    wrong = write_replies(_tied(other), prompts(2, seed=9))
    renamed = [each.model_copy(update={"sample_id": f"w{i}"}) for i, each in enumerate(wrong)]
    with pytest.raises(DataError) as raised:
        judged(llama, [*right, *renamed])
    assert "sample w" in raised.value.where


def test_files_changed_under_a_target_are_the_contracts(llama: Path, tmp_path: Path) -> None:
    """The same directory with another rope is another target before any reply is scored."""
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 77.0
    (copy / "config.json").write_text(json.dumps(config))
    section = partial(TargetSection, capture_layers=(1, 3, 4))
    right, changed = (open_target(section(source=str(each))) for each in (llama, copy))
    assert right.contract.rope != changed.contract.rope

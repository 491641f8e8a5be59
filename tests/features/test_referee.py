"""Replies of another model than the teacher are refused by name, and right ones are not accused.

transformers' own `generate` writes the replies, of the target itself or of one with a planted
fault; what captures the target's states must tell them apart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import FeaturesSection, TargetSection
from pipeline.errors import DataError
from pipeline.features.capture import CapturedShard, MatchedTarget, capture_shard, check_replies
from pipeline.records import Sample, SamplingParams
from pipeline.target.agreement import Agreement
from pipeline.target.architecture import FAMILIES
from pipeline.target.forward import register_packed_attention
from pipeline.target.open import open_target
from tests.features.conftest import sample_of
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
    ids = torch.tensor(read)  # all of one length: none is padded
    drawn = (
        {"do_sample": True, "temperature": sampling.temperature}
        | {"top_p": sampling.top_p, "top_k": sampling.top_k}
        if sampling.temperature
        else {"do_sample": False}
    )
    outputs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(end_ids),
        pad_token_id=0,
        **drawn,
    )
    samples = []
    for index, output in enumerate(outputs[:, ids.shape[1] :].tolist()):
        # What follows the first end fills up the rows of longer replies.
        ends = [place for place, token in enumerate(output) if token in end_ids]
        reply = output[: ends[0] + 1] if ends else output
        before = list((stored or read)[index])
        samples.append(
            sample_of(
                index,
                [*before, *reply],
                [(len(before), len(before) + len(reply))],
                finish_reason="stop" if ends else "length",
                sampling=says or sampling,
            )
        )
    return samples


def judged(directory: Path, samples: list[Sample], dtype: str = "float32") -> CapturedShard:
    """Capture by the target in `directory`, with its referee."""
    section = TargetSection.model_validate(
        {"source": str(directory), "dtype": dtype, "device": "cpu", "capture_layers": (1, 3, 4)}
    )
    target = open_target(section)
    matched = MatchedTarget.loaded(target, target.load(attention=register_packed_attention()))
    shard = capture_shard(
        *(matched.source, samples, FeaturesSection(batch_tokens=512, self_check_tolerance=0)),
        lambda tokens: None,
        name="a",
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


@pytest.mark.parametrize(
    ("sampling", "writes", "teaches"),
    [
        (GREEDY, torch.bfloat16, "float32"),
        (GREEDY, torch.float32, "bfloat16"),
        (WARM, torch.bfloat16, "bfloat16"),
        (NUCLEUS, torch.bfloat16, "float32"),
        (NUCLEUS, torch.float32, "bfloat16"),
    ],
)
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
COLD = WARM.model_copy(update={"temperature": 0.7})
UNCUT = NUCLEUS.model_copy(update={"top_p": 1.0, "top_k": 0})


def _replies(
    change: Callable[[Any], Any] = lambda model: model,
    sampling: SamplingParams = GREEDY,
    says: SamplingParams | None = None,
    count: int = 16,
    end_ids: Sequence[int] = tuple(END_IDS),
) -> Callable[[Any], list[Sample]]:
    return lambda model: write_replies(
        change(model), prompts(count), sampling, says=says, end_ids=end_ids
    )


#: What writes the samples, given the right model; and what the error says.
FAULTS: dict[str, tuple[Callable[[Any], list[Sample]], str]] = {
    "other weights": (_replies(_other), BEST),
    "one layer swapped": (_replies(_swapped), BEST),
    "tied flag flipped": (_replies(_tied), BEST),
    "wrong rope": (_replies(_rope), BEST),
    "wrong template": (_other_template, BEST),
    "tokenised fragment": (_fragment, BEST),
    "end id missing": (
        _replies(sampling=WARM, count=64, end_ids=[95]),
        "do(es)? not end where",
    ),
    "quantised server": (_replies(_quantised), BEST),
    "LoRA on the server": (_replies(_with_lora), BEST),
    "greedy said, drawn": (_replies(sampling=WARM, says=GREEDY), BEST),
    "drawn said, greedy": (_replies(says=WARM), "colder than the sampling"),
    "colder than said": (_replies(sampling=COLD, says=WARM, count=64), "colder than the sampling"),
    "hotter than said": (
        _replies(sampling=WARM, says=COLD, count=64),
        "hotter than the sampling|nats below",
    ),
    "no top-p, no top-k": (_replies(sampling=UNCUT, says=NUCLEUS), "outside the top-p"),
    "drawn by other weights": (_replies(_other, WARM, count=64), "mean log-probability"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in FAULTS),
        *((name, "bfloat16") for name in ("one layer swapped", "quantised server")),
        *((name, "bfloat16") for name in ("colder than said", "no top-p, no top-k")),
    ],
)
def test_a_planted_fault_is_named(name: str, llama: Path, dtype: str) -> None:
    write, problem = FAULTS[name]
    samples = write(load(llama))
    with pytest.raises(DataError, match=problem) as raised:
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

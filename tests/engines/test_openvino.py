"""OpenVINO GenAI drafts with our heads: in fp32 every prompt takes the decoder's rounds.

optimum-intel converts target and head; models, scheduler, drafting, trees, verification and
counters are GenAI's own (tests/engines/openvino_generate.py says what is set).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config import TreeSection, load
from pipeline.reports import GoldenFigure, GoldenPrompt
from pipeline.serve_eval.servers.check import replay_rounds
from tests.engines.conftest import CopyOf
from tests.engines.lines import DEMO, EAGLE3, Line
from tests.engines.openvino_engine import Reply, converted, converted_head, generate
from tests.engines.plans import FAULTS, Plan

CHAIN = TreeSection(top_k=1, steps=3, nodes=4)


@pytest.fixture(scope="module")
def target(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(line.target, tmp_path_factory.mktemp("target") / "openvino")


@pytest.fixture(scope="module")
def head(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_head(line.head, tmp_path_factory.mktemp("head") / "openvino")


def golden_of(line: Line) -> GoldenFigure:
    golden = line.report.golden
    assert golden is not None
    return golden


def rounds_that_differ(
    replies: list[Reply], prompts: tuple[GoldenPrompt, ...], shape: TreeSection
) -> list[str]:
    """Prompts that took other rounds than the decoder; the replies must be its own."""
    other = []
    for reply, prompt in zip(replies, prompts, strict=True):
        assert reply.ids == prompt.reply_ids, prompt.id
        own = prompt.shapes[shape.label]
        if (reply.rounds, sum(reply.emitted[1:])) != (own.rounds, own.tokens):
            other.append(prompt.id)
    return other


@pytest.mark.parametrize(
    "shape",
    [CHAIN, TreeSection(top_k=1, steps=5, nodes=6), TreeSection(top_k=4, steps=5, nodes=8)],
    ids=lambda shape: str(shape.label),
)
def test_every_prompt_takes_the_decoders_rounds(
    line: Line, target: Path, head: Path, shape: TreeSection
) -> None:
    golden = golden_of(line)
    replies = generate(target, head, golden, golden.prompts, shape)
    assert len(replies) == 16
    assert rounds_that_differ(replies, golden.prompts, shape) == []
    for reply, prompt in zip(replies, golden.prompts, strict=True):
        # The last round may be cut, which the decoder's list leaves as it was.
        theirs, own = reply.accepted_lengths, prompt.shapes[shape.label].accepted_lengths
        padded = [*theirs, *[0] * (len(own) - len(theirs))]
        assert sum(abs(a - b) for a, b in zip(padded, own, strict=True)) <= 2, prompt.id


def test_without_the_list_of_layers_it_reads_each_one_later(
    line: Line, target: Path, tmp_path: Path, copy_of: CopyOf
) -> None:
    """As optimum-intel converts a head. Its rounds are the decoder's with a head that reads the
    outputs of layers 2, 15 and 27, where ours was trained with 1, 14 and 26."""
    other, layers = copy_of(line.head), (2, 15, 27)
    config = json.loads((other / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
    config["eagle_aux_hidden_state_layer_ids"] = [each + 1 for each in layers]
    (other / "config.json").write_text(json.dumps(config))
    card = json.loads((other / "eagle3.json").read_text())
    card["contract"]["capture_layers"] = layers
    (other / "eagle3.json").write_text(json.dumps(card))
    settings = [f"run.uri={tmp_path / 'run'}", f"eval.head={other}", *EAGLE3.evaluation]
    settings += [f"target.capture_layers={[*layers]}", "target.dtype=float32"]
    own = load(DEMO, settings)
    golden = golden_of(line)
    chosen = golden.model_copy(
        update={"prompts": tuple(each.model_copy(update={"shapes": {}}) for each in golden.prompts)}
    )
    replayed = replay_rounds(own, chosen, CHAIN)
    plain = converted(line.head, tmp_path / "openvino")
    replies = generate(target, plain, golden, golden.prompts, CHAIN)
    assert rounds_that_differ(replies, replayed.prompts, CHAIN) == []
    assert sum(each.rounds for each in replies) > sum(
        each.shapes[CHAIN.label].rounds for each in golden.prompts
    )


#: A fault of the drafter shows in its rounds; embeddings are the target's, whatever a head brings.
_PLANTED = {
    "all aux layers one later",
    "all aux layers one earlier",
    "fc's inputs permuted",
    "rotary base 1,000",
    "d2t shifted",
    "hidden norm twice",
}


@pytest.mark.parametrize(
    "plan", [each for each in FAULTS if each.name in _PLANTED], ids=lambda plan: str(plan.name)
)
def test_a_fault_takes_other_rounds(line: Line, target: Path, tmp_path: Path, plan: Plan) -> None:
    golden = golden_of(line)
    prompts = golden.prompts[:4]
    _, planted = plan.plant(line.target, line.head, tmp_path)
    wrong = converted_head(planted, tmp_path / "openvino")
    replies = generate(target, wrong, golden, prompts, CHAIN)
    assert rounds_that_differ(replies, prompts, CHAIN) != []
    assert sum(each.rounds for each in replies) > sum(
        each.shapes[CHAIN.label].rounds for each in prompts
    )

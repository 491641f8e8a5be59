"""What runs on a CPU, eager torch and C++, against the reference; the bits that C++ promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.decoder.model import pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.tree import SamplingTensors
from tests.decoder.ops.attention import Problem, pose
from tests.decoder.ops.backends import FP32, KERNELS, TYPES, Backend, cpu_backend, name_of
from tests.decoder.ops.conftest import attention_metadata
from tests.decoder.ops.operations import OPERATIONS

EAGER = [("eager", dtype) for dtype in TYPES]


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(*request.param)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", [*EAGER, *KERNELS], ids=name_of, indirect=True)
def test_operations(backend: Backend, operation: str) -> None:
    OPERATIONS[operation](backend)


@pytest.mark.skipif(len(KERNELS) < 4, reason="one level only")
def test_float32_has_the_same_bits_on_every_level() -> None:
    x, weight, gate_up = torch.randn(21, 91), torch.randn(50, 91), torch.randn(21, 66) * 9
    one, other = (cpu_backend(level, dtype) for level, dtype in KERNELS if dtype is FP32)
    rows = [(130, 16), (21, 16)]
    attended = [pose(one, rows, (9, 3, 64), window) for window in (None, 16)]

    def results(ops: TorchOps) -> list[Tensor]:
        products = [ops.linear(x, ops.pack(stored)) for stored in (weight, weight.bfloat16())]
        by_row = (
            *ops.add_rms_norm(x, x, x[0].float(), 1e-5),
            ops.gate_mul(gate_up),
            ops.propose(x, 5)[0],
        )
        return [*products, *by_row, *(each.solve(ops) for each in attended)]

    assert all(
        torch.equal(*pair) for pair in zip(results(one.ops), results(other.ops), strict=True)
    )


@pytest.mark.parametrize("token", [10, 1 << 40, -1])
@pytest.mark.parametrize("backend", KERNELS, ids=name_of, indirect=True)
def test_embed_concat_refuses_a_token_without_an_embedding(backend: Backend, token: int) -> None:
    embedding, hidden, norm = backend.numbers(10, 33), backend.numbers(3, 33), backend.gains(33)
    with pytest.raises(IndexError, match=f"token {token} is outside the embedding of 10 tokens"):
        backend.ops.embed_concat(torch.tensor([4, token, 9]), embedding, hidden, norm, norm, 1e-5)


@pytest.mark.parametrize("prefix", [0, 5, 16, 59, 300])
@pytest.mark.parametrize("shape", [(9, 3, 64), (8, 1, 80)])
@pytest.mark.parametrize("backend", KERNELS, ids=name_of, indirect=True)
def test_a_node_of_a_tree_gets_the_bits_of_plain_decoding(
    backend: Backend, prefix: int, shape: tuple[int, int, int]
) -> None:
    """Whatever lies between its ancestors."""
    branch, nodes = [0, 3, 4, 8, 21, 22, 30], 40
    tree = pose(backend, [(prefix, nodes)], shape)  # as a chain: every entry is written
    mask = torch.tensor([(1 << node) | 1 for node in range(nodes)])
    for step, node in enumerate(branch):
        mask[node] = sum(1 << each for each in branch[: step + 1])
    chain = pose(backend, [(prefix, len(branch))], shape)
    for step, entry in enumerate([*range(prefix), *(prefix + node for node in branch)]):
        (page, offset), (to, at) = tree.place(0, entry), chain.place(0, step)
        chain.planes[:, to, :, at] = tree.planes[:, page, :, offset]
    chain = replace(chain, query=tree.query[branch])
    verified = replace(tree, metadata=replace(tree.metadata, mask=mask)).solve(backend.ops)
    assert torch.equal(verified[branch], chain.solve(backend.ops))
    torch.set_num_threads(3)
    assert torch.equal(chain.solve(backend.ops), verified[branch])
    table, seq_lens = chain.metadata.block_table, chain.metadata.seq_lens
    for step, node in enumerate(branch):
        for alone in (None, torch.tensor([1])):
            where = attention_metadata(table, seq_lens + step, [1], alone)
            decoded = Problem(tree.query[node : node + 1], chain.planes, where)
            assert torch.equal(decoded.solve(backend.ops)[0], verified[node])


def test_an_eager_greedy_draw_makes_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ones, positions = torch.randn(3, 50), torch.ones(3), torch.arange(3)
    greedy = SamplingTensors(0 * ones, ones, ones.long(), positions)
    monkeypatch.setattr("pipeline.decoder.ops.base.perturb", None)
    assert torch.equal(EagerOps().draw(logits, greedy, positions), logits.argmax(-1))


def test_eager_is_what_a_cpu_without_kernels_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    for dtype in TYPES:
        assert type(pick_ops(torch.device("cpu"), dtype)) is EagerOps

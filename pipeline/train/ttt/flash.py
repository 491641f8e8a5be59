"""The same attention by torch's flash kernels, parts merged by their log-sum-exp.

Rows of a document come in runs of consecutive positions. A run attends to the keys before it in
full and to those at its own positions causally, so two calls of a kernel without a mask cover it:

    keys      0 1 2 3 4 5 6 7                chain
    run 3…6   ■ ■ ■ ● · · ·                  k columns      ■ full call
              ■ ■ ■ ● ● · ·                  of each        ● causal call
              ■ ■ ■ ● ● ● ·                  row's own      · never computed
              ■ ■ ■ ● ● ● ●

With l_p the log-sum-exp of part p and l that of all parts, the output is Σ_p exp(l_p - l) o_p. For
the backward pass the kernels are given the merged output and l in place of their own: exp(score -
l) are then the weights under the common softmax, and what they return are its gradients (Ring
Attention, Liu et al. 2023, arXiv:2310.01889, does the same over devices).

Used on CUDA. On CPU the blocked products of `blocked.py` take half the time of torch's flash
kernel; it is here for the tests.

Shapes: N keys of step 0, A rows, n rows of a run, k chain keys of a row, Q query heads, G key/value
heads, s = Q/G, d head size. The s query heads of a key head stand in the batch dimension, over
which keys and values are expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Below this many rows a run on average, launches cost more than the blocked path's masks.
MIN_ROWS_PER_RUN = 32


class QueryRun(NamedTuple):
    """Rows at consecutive positions of one document."""

    rows: slice
    prefix: slice  # keys of the document in front of the run; may be empty
    diagonal: slice  # keys at the run's own positions


class _KernelCall(NamedTuple):
    """One call of the kernel."""

    rows: slice
    keys: slice
    causal: bool


def has_kernel(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether torch has a flash kernel with gradients here.

    CUDA from Ampere on, 16-bit types, head sizes to 256 in eights.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if size % 8 or size > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def query_runs(
    positions: Sequence[int], bounds: Sequence[int], starts: Sequence[int]
) -> list[QueryRun]:
    """Runs of rows at `positions`.

    Document i has rows bounds[i]…bounds[i+1] and keys from starts[i].
    """
    runs = []
    for document, offset in enumerate(starts[:-1]):
        row, end = bounds[document], bounds[document + 1]
        while row < end:
            stop = row + 1
            while stop < end and positions[stop] == positions[stop - 1] + 1:
                stop += 1
            first = offset + positions[row]
            diagonal = slice(first, first + stop - row)
            runs.append(QueryRun(slice(row, stop), slice(offset, first), diagonal))
            row = stop
    return runs


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chain_keys: Tensor,
    chain_values: Tensor,
    runs: Sequence[QueryRun],
) -> Tensor:
    """`blocked.attend`, with runs instead of blocks."""
    calls = []
    for run in runs:
        if run.prefix.stop > run.prefix.start:
            calls.append(_KernelCall(run.rows, run.prefix, causal=False))
        calls.append(_KernelCall(run.rows, run.diagonal, causal=True))
    inputs = query, keys, values, chain_keys, chain_values, calls
    return torch.as_tensor(_FlashAttention.apply(*inputs))  # type: ignore[no-untyped-call]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chain_keys: Tensor,
        chain_values: Tensor,
        calls: Sequence[_KernelCall],
    ) -> Tensor:
        q, k, v, chain_k, chain_v = _arranged(query, keys, values, chain_keys, chain_values)
        exact = torch.promote_types(query.dtype, torch.float32)
        # [s, G, A, k]
        chain_scores = (q.unsqueeze(-2) @ chain_k.transpose(-1, -2)).squeeze(-2).to(exact)
        if chain_scores.shape[-1]:
            total = torch.logsumexp(chain_scores, dim=-1)  # l [s, G, A]
        else:
            total = chain_scores.new_full(q.shape[:-1], -torch.inf)
        results, extras = [], []
        for call in calls:
            shared = k[:, :, call.keys], v[:, :, call.keys]
            out, lse, extra = _forward(q[:, :, call.rows], *shared, call.causal)
            total[:, :, call.rows] = torch.logaddexp(total[:, :, call.rows], lse.to(exact))
            results.append((out, lse))
            extras.append(extra)
        chain_weights = (chain_scores - total.unsqueeze(-1)).exp()  # [s, G, A, k]
        # [s, G, A, d]
        output = (chain_weights.to(q.dtype).unsqueeze(-2) @ chain_v).squeeze(-2).to(exact)
        for call, (out, lse) in zip(calls, results, strict=True):
            output[:, :, call.rows] += (lse - total[:, :, call.rows]).exp().unsqueeze(-1) * out
        output = output.to(q.dtype)
        ctx.calls, ctx.extras = calls, extras
        saved = query, keys, values, chain_keys, chain_values, output, total, chain_weights
        ctx.save_for_backward(*saved)
        return output.permute(2, 1, 0, 3).reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The kernels' gradients under the common softmax, and the chain's by hand.

        Sums in float32 or wider.
        """
        query, keys, values, chain_keys, chain_values, output, total, chain_weights = (
            ctx.saved_tensors
        )
        q, k, v, chain_k, chain_v = _arranged(query, keys, values, chain_keys, chain_values)
        # [s, G, A, d]
        grad = grads[0].reshape(q.permute(2, 1, 0, 3).shape).permute(2, 1, 0, 3).contiguous()
        exact = chain_weights.dtype
        inner = (grad.to(exact) * output.to(exact)).sum(-1, keepdim=True)  # [s, G, A, 1]
        # [s, G, A, k], of the weights, then of the scores
        weights_grad = (grad.unsqueeze(-2) @ chain_v.transpose(-1, -2)).squeeze(-2).to(exact)
        chain_slope = (chain_weights * (weights_grad - inner)).to(q.dtype)
        # [s, G, A, d]
        query_grad = (chain_slope.unsqueeze(-2) @ chain_k).squeeze(-2).to(exact)
        chain_keys_grad = torch.einsum("sgak,sgad->agkd", chain_slope, q)
        chain_values_grad = torch.einsum("sgak,sgad->agkd", chain_weights.to(q.dtype), grad)
        keys_grad = torch.zeros(k.shape[1:], dtype=exact, device=k.device)  # [G, N, d]
        values_grad = torch.zeros_like(keys_grad)
        for call, extra in zip(ctx.calls, ctx.extras, strict=True):
            rows = [x[:, :, call.rows].contiguous() for x in (grad, q, output, total)]
            shared = [x[:, :, call.keys] for x in (k, v)]
            for_query, for_keys, for_values = _backward(rows, shared, call.causal, extra)
            query_grad[:, :, call.rows] += for_query
            keys_grad[:, call.keys] += for_keys.sum(0, dtype=exact)
            values_grad[:, call.keys] += for_values.sum(0, dtype=exact)
        return (
            query_grad.to(q.dtype).permute(2, 1, 0, 3).reshape(query.shape),
            keys_grad.transpose(0, 1).to(keys.dtype),
            values_grad.transpose(0, 1).to(keys.dtype),
            chain_keys_grad,
            chain_values_grad,
            None,
        )


def _arranged(
    query: Tensor, keys: Tensor, values: Tensor, chain_keys: Tensor, chain_values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query [s, G, A, d], keys and values [s, G, N, d], those of the chain [G, A, k, d].

    Nothing is copied.
    """
    rows, heads, size = query.shape
    groups = keys.shape[1]
    shared = heads // groups
    q = query.view(rows, groups, shared, size).permute(2, 1, 0, 3)
    k, v = (part.transpose(0, 1).expand(shared, -1, -1, -1) for part in (keys, values))
    return q, k, v, chain_keys.transpose(0, 1), chain_values.transpose(0, 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output, log-sum-exp [s, G, n] and what the backward call wants besides them."""
    aten: Any = torch.ops.aten
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, scale=1.0)
        return out, lse, ()
    kernel = aten._scaled_dot_product_flash_attention
    out, lse, *extra, _ = kernel(q, k, v, 0.0, causal, scale=1.0)
    return out, lse, tuple(extra)  # cumulative and longest lengths of q and k, seed, offset


def _backward(
    rows: Sequence[Tensor], shared: Sequence[Tensor], causal: bool, extra: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values, [s, G, .., d] each.

    rows: gradient of the output, query, merged output, log-sum-exp of all; shared: keys, values.
    """
    aten: Any = torch.ops.aten
    (grad, q, out, lse), (k, v) = rows, shared
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = kernel(grad, q, k, v, out, lse, 0.0, causal, scale=1.0)
    else:
        *lengths, seed, offset = extra
        kernel = aten._scaled_dot_product_flash_attention_backward
        grads = kernel(grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset, scale=1.0)
    return grads[0], grads[1], grads[2]

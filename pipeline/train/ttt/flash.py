"""The same attention by torch's flash kernels, parts merged by their log-sum-exp.

Rows of a document come in runs of consecutive positions. A run sees the keys before it in full and
those at its own positions causally, so two calls of a kernel without a mask cover it:

    keys      0 1 2 3 4 5 6 7                chain
    run 3…6   ■ ■ ■ ● · · ·                  k columns      ■ full call
              ■ ■ ■ ● ● · ·                  of each        ● causal call
              ■ ■ ■ ● ● ● ·                  row's own      · never computed
              ■ ■ ■ ● ● ● ●

With l_p the log-sum-exp of part p and l that of all parts, the output is Σ_p exp(l_p - l) o_p. For the
backward pass the kernels are given the merged output and l in place of their own: exp(score - l) are
then the weights under the common softmax, and what they return are its gradients (Ring Attention,
Liu et al. 2023, arXiv:2310.01889, does the same over devices).

Used on CUDA. On CPU the blocked products of `mixing.py` take half the time of torch's flash kernel;
it is here for the tests.

Shapes: N keys of step 0, A rows, n rows of a run, k own keys of a row, Q query heads, G key/value
heads, s = Q/G, d head size. The s query heads of a key head stand in the batch dimension, over
which keys and values are expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Below this many rows a run on average, launches cost more than the blocked path's masks.
WORTHWHILE_RUN = 32


class Run(NamedTuple):
    """Rows at consecutive positions of one document."""

    rows: slice
    before: slice  # keys of the document in front of the run; may be empty
    along: slice  # keys at the run's own positions


class _Part(NamedTuple):
    """One call of the kernel."""

    rows: slice
    keys: slice
    causal: bool


def serves(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether torch has a flash kernel with gradients here: CUDA from Ampere on, 16-bit types, head sizes to 256 in eights."""
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or size % 8
        or size > 256
    ):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def find_runs(places: Sequence[int], bounds: Sequence[int], starts: Sequence[int]) -> list[Run]:
    """Runs of rows at positions `places`; document i has rows bounds[i]…bounds[i+1] and keys from starts[i]."""
    made = []
    for document, offset in enumerate(starts[:-1]):
        row, end = bounds[document], bounds[document + 1]
        while row < end:
            stop = row + 1
            while stop < end and places[stop] == places[stop - 1] + 1:
                stop += 1
            first = offset + places[row]
            made.append(
                Run(slice(row, stop), slice(offset, first), slice(first, first + stop - row))
            )
            row = stop
    return made


def mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    runs: Sequence[Run],
) -> Tensor:
    """`mixing.mix`, with runs in the place of blocks."""
    parts = [
        part
        for run in runs
        for part in (_Part(run.rows, run.before, False), _Part(run.rows, run.along, True))
        if part.keys.stop > part.keys.start
    ]
    return torch.as_tensor(_FlashMix.apply(query, keys, values, own_keys, own_values, parts))  # type: ignore[no-untyped-call]


class _FlashMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        parts: Sequence[_Part],
    ) -> Tensor:
        q, k, v, own_k, own_v = _arranged(query, keys, values, own_keys, own_values)
        exact = torch.promote_types(query.dtype, torch.float32)
        own_scores = (
            (q.unsqueeze(-2) @ own_k.transpose(-1, -2)).squeeze(-2).to(exact)
        )  # [s, G, A, k]
        own_sum = (
            torch.logsumexp(own_scores, dim=-1)
            if own_scores.shape[-1]
            else own_scores.new_full(q.shape[:-1], -torch.inf)
        )
        outs, sums, extras = [], [], []
        total = own_sum.clone()  # l [s, G, A]
        for part in parts:
            out, sum_, extra = _call(
                q[:, :, part.rows], k[:, :, part.keys], v[:, :, part.keys], part.causal
            )
            total[:, :, part.rows] = torch.logaddexp(total[:, :, part.rows], sum_.to(exact))
            outs.append(out)
            sums.append(sum_)
            extras.append(extra)
        own_weights = (own_scores - total.unsqueeze(-1)).exp()  # [s, G, A, k]
        mixed = (
            (own_weights.to(q.dtype).unsqueeze(-2) @ own_v).squeeze(-2).to(exact)
        )  # [s, G, A, d]
        for part, out, sum_ in zip(parts, outs, sums, strict=True):
            mixed[:, :, part.rows] += (sum_ - total[:, :, part.rows]).exp().unsqueeze(-1) * out
        mixed = mixed.to(q.dtype)
        ctx.parts, ctx.extras = parts, extras
        ctx.save_for_backward(query, keys, values, own_keys, own_values, mixed, total, own_weights)
        return mixed.permute(2, 1, 0, 3).reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The kernels' gradients under the common softmax, and the chain's by hand; sums in float32 or wider."""
        query, keys, values, own_keys, own_values, mixed, total, own_weights = ctx.saved_tensors
        q, k, v, own_k, own_v = _arranged(query, keys, values, own_keys, own_values)
        grad = (
            grads[0].reshape(q.permute(2, 1, 0, 3).shape).permute(2, 1, 0, 3).contiguous()
        )  # [s, G, A, d]
        exact = own_weights.dtype
        inner = (grad.to(exact) * mixed.to(exact)).sum(-1, keepdim=True)  # [s, G, A, 1]
        upper = (grad.unsqueeze(-2) @ own_v.transpose(-1, -2)).squeeze(-2).to(exact)  # [s, G, A, k]
        own_slope = (own_weights * (upper - inner)).to(q.dtype)
        query_grad = (own_slope.unsqueeze(-2) @ own_k).squeeze(-2).to(exact)  # [s, G, A, d]
        own_keys_grad = torch.einsum("sgak,sgad->agkd", own_slope, q)
        own_values_grad = torch.einsum("sgak,sgad->agkd", own_weights.to(q.dtype), grad)
        keys_grad, values_grad = (
            torch.zeros(k.shape[1:], dtype=exact, device=k.device) for _ in range(2)
        )  # [G, N, d]
        for part, extra in zip(ctx.parts, ctx.extras, strict=True):
            upper, asked, out, sum_ = (
                x[:, :, part.rows].contiguous() for x in (grad, q, mixed, total)
            )
            found = _call_backward(
                upper, asked, k[:, :, part.keys], v[:, :, part.keys], out, sum_, part.causal, extra
            )
            query_grad[:, :, part.rows] += found[0]
            keys_grad[:, part.keys] += found[1].sum(0, dtype=exact)
            values_grad[:, part.keys] += found[2].sum(0, dtype=exact)
        shared = (part.transpose(0, 1).to(keys.dtype) for part in (keys_grad, values_grad))
        return (
            query_grad.to(q.dtype).permute(2, 1, 0, 3).reshape(query.shape),
            *shared,
            own_keys_grad,
            own_values_grad,
            None,
        )


def _arranged(
    query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query [s, G, A, d], keys and values [s, G, N, d], own ones [G, A, k, d]; nothing is copied."""
    rows, heads, size = query.shape
    groups = keys.shape[1]
    shared = heads // groups
    q = query.view(rows, groups, shared, size).permute(2, 1, 0, 3)
    k, v = (part.transpose(0, 1).expand(shared, -1, -1, -1) for part in (keys, values))
    return q, k, v, own_keys.transpose(0, 1), own_values.transpose(0, 1)


def _call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output, log-sum-exp [s, G, n] and what the backward call wants besides them."""
    if q.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=1.0
        )
        return out, total, ()
    out, total, cum_q, cum_k, max_q, max_k, seed, offset, _ = (
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=1.0)
    )
    return out, total, (cum_q, cum_k, max_q, max_k, seed, offset)


def _call_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    extra: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values, [s, G, .., d] each."""
    aten: Any = torch.ops.aten
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, causal, scale=1.0
        )
    else:
        *lengths, seed, offset = extra
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, total, *lengths, 0.0, causal, seed, offset, scale=1.0
        )
    return found[0], found[1], found[2]

"""What a draw takes the largest of: logits scaled, cut to top-k and top-p, and with noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.ops.philox import gumbel
from pipeline.decoder.tree import SamplingTensors


def perturb(logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
    """Logits with noise, of which the largest is a draw from their distribution: float32 [B, V].

    Gumbel-max (Maddison et al. 2014, arXiv:1411.0030, §2): scaled by the temperature, -inf outside
    top-k and top-p, plus a Gumbel number for each token. No token needs another's weight, so the
    maximum is taken in any order, and in parallel. A greedy row stays as it is.
    """
    temperature = sampling.temperature[:, None]
    kept = keep_top(logits.float() / temperature.clamp(min=1e-6), sampling)
    noisy = kept + gumbel(sampling.seeds, positions, logits.shape[-1])
    return torch.where(temperature == 0, logits.float(), noisy)


def by_node(sampling: SamplingTensors, count: int) -> SamplingTensors:
    """What each of `count` nodes a row samples with: its row's, [B · N]."""
    by_row = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seeds
    return SamplingTensors(*(part.repeat_interleave(count) for part in by_row))


def keep_top(scaled: Tensor, sampling: SamplingTensors) -> Tensor:
    """scaled [B, V] with -inf outside top-k, then outside top-p; equals of the last kept stay."""
    if ((sampling.top_k == 0) & (sampling.top_p >= 1)).all():
        return scaled
    ordered = scaled.sort(-1, descending=True).values  # [B, V]
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    limit = torch.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1])[:, None]
    last = ordered.gather(1, (limit - 1).clamp(max=scaled.shape[-1] - 1))  # [B, 1]: k-th largest
    within_k = ordered.masked_fill(ordered < last, float("-inf"))
    total = within_k.softmax(-1).double().cumsum(-1)  # [B, V]
    # A token is kept while the mass before it is below top_p; the first one always is. Over a large
    # vocabulary float32 masses sum to 1 ± 1e-5 only, hence top_p of what they do sum to.
    before, top_p = F.pad(total[:, :-1], (1, 0)), sampling.top_p[:, None]
    inside = (((before < top_p * total[:, -1:]) | (top_p >= 1)) & (ordered >= last)) | (rank == 0)
    least = ordered.gather(1, inside.sum(-1, keepdim=True) - 1)
    return scaled.masked_fill(scaled < least, float("-inf"))

"""One shard: packed forwards of its samples, and what is kept of each.

Shapes: T tokens of a sample, H the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.config import RunConfig
from pipeline.errors import DataError
from pipeline.features.packing import into_forwards
from pipeline.records import Sample, TargetContract, match_contracts
from pipeline.store.stage import stage_location
from pipeline.store.states import StatesSample, encode_states, teacher_positions
from pipeline.target.capture import capture_states, register_packed_attention
from pipeline.target.load import LoadedTarget, load_target


def load_matching_target(config: RunConfig, expected: TargetContract) -> LoadedTarget:
    """The target, ready for packed forwards. Raises ContractMismatch when it is not the one that wrote the samples."""
    torch.set_num_threads(config.run.threads)
    target = load_target(config.target, attention=register_packed_attention())
    match_contracts(target.contract, expected, where=f"{stage_location(config.run.uri, 'synth').uri}/manifest.json")
    return target


def capture_shard(target: LoadedTarget, samples: list[Sample], batch_tokens: int, advance: Callable[[int], None]) -> bytes:
    """The encoded states of `samples`. Raises DataError that names the sample for ids or states that cannot be used.

    `advance` is told how many tokens each forward took in.
    """
    states: list[StatesSample] = []
    for batch in into_forwards(samples, batch_tokens):
        for sample in batch:
            _check_ids(sample, target.contract.vocab_size)
        captured = capture_states(target, [sample.token_ids for sample in batch])
        states += [_keep(sample, aux, final) for sample, (aux, final) in zip(batch, captured, strict=True)]
        advance(sum(len(sample.token_ids) for sample in batch))
    return encode_states(states)


def supervised_mask(sample: Sample) -> Tensor:
    """uint8 [T]: 1 where the target generated the token."""
    mask = torch.zeros(len(sample.token_ids), dtype=torch.uint8)
    for span in sample.supervised:
        mask[span.start : span.end] = 1
    return mask


def _keep(sample: Sample, aux: Tensor, final: Tensor) -> StatesSample:
    """aux [T, 3H] whole, final [T, H] where it teaches; both bf16 on the CPU."""
    for name, states in (("aux states", aux), ("final states", final)):
        if not torch.isfinite(states).all():
            layer_fix = "check the target's weights, or try target.dtype=float32"
            raise DataError(f"the target's {name} hold NaN or infinity", where=f"sample {sample.prompt_id} of {sample.source}", fix=layer_fix)
    mask = supervised_mask(sample)
    positions = teacher_positions(mask)
    return StatesSample(
        sample_id=sample.prompt_id,
        source=sample.source,
        token_ids=torch.tensor(sample.token_ids, dtype=torch.int32),
        loss_mask=mask,
        aux_states=aux.to("cpu", torch.bfloat16),
        final_states=final[positions.to(final.device)].to("cpu", torch.bfloat16),
        final_positions=positions,
    )


def _check_ids(sample: Sample, vocab_size: int) -> None:
    """An id outside the embedding would be a crash without a name, or on a GPU a dead process."""
    where = f"sample {sample.prompt_id} of {sample.source}"
    fix = "make the samples again with this target: `eagle3 synth --force`"
    if not sample.token_ids or min(sample.token_ids) < 0 or max(sample.token_ids) >= vocab_size:
        raise DataError(f"needs one or more ids in [0, {vocab_size})", where=f"{where}: token_ids", fix=fix)
    if any(not 0 <= span.start < span.end <= len(sample.token_ids) for span in sample.supervised):
        raise DataError(f"has a span outside its {len(sample.token_ids)} tokens", where=f"{where}: supervised", fix=fix)

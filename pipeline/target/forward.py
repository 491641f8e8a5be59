"""The target as a Hugging Face model, and the packed forward that captures its states.

The residual stream of a target with L layers; id i is the output of decoder layer i:

    embed ─ layer 0 ─┬─ layer 1 ─ … ─┬─ layer m ─ … ─┬─ layer h ─ … ─ layer L-1 ─ norm ─┬─ lm_head
                    id 0            id 1 = low      id m = middle   id h = high     final state

    aux states   [T, L·H] = concat of the L aux layers, low to high
    final state  [T, H], after the last norm: lm_head(final) are the target's logits

Documents are packed into one row without padding; attention stays inside each document:

    tokens     a0 a1 a2 b0 b1            a attends to a only, b to b only;
    positions   0  1  2  0  1            no mask is built, each document is one causal call

Attention is torch's own where it is plain, causal or in a sliding window. What torch has no
argument for is computed from explicit scores, a block of queries at a time:

    softcap      cap · tanh(scores / cap)                       Gemma 2
    s_aux        a score per head that no key belongs to        gpt-oss' sinks

An alternative is another token in place of one of a document's. Everything before it is as it was,
so keys and values of the document's forward serve all of them, in rows of alternatives alone:

    position          0   1   2   3
    document          a0  a1  a2  a3
    alternatives      b0  b1  b2  b3    b2 attends to a0, a1 and itself
                      c0  c1  c2  c3
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TargetSection
from pipeline.errors import MissingPackage, TargetError
from pipeline.records import TargetContract
from pipeline.target.architecture import decoder_of, model_class, read_config
from pipeline.target.arithmetic import pick_device, resolve_dtype
from pipeline.target.template import read_end_ids


@dataclass(frozen=True)
class LoadedTarget:
    """A target in memory."""

    model: Any  # transformers causal LM in eval mode
    contract: TargetContract
    device: torch.device
    directory: Path

    @property
    def output_rows(self) -> Tensor | None:
        """transformers' own lm_head [V, H]; None where this process holds a slice of it."""
        rows: Tensor = self.model.get_output_embeddings().weight
        whole = tuple(rows.shape) == (self.contract.vocab_size, self.contract.hidden_size)
        return rows if whole and type(rows.data) is Tensor else None


def load_model(
    section: TargetSection,
    directory: Path,
    contract: TargetContract,
    *,
    attention: str = "sdpa",
    dtype: str | None = None,
    device_map: str | dict[str, int | str] | None = None,
    processes: int = 1,
    layers: int | None = None,
) -> LoadedTarget:
    """The model in `directory`, in eval mode; of its decoder layers the first `layers`.

    `attention` is a transformers attention implementation, `dtype` overrides the section's. With a
    `device_map`, layers lie on several devices and `LoadedTarget.device` is that of the embedding.
    With several `processes` this one holds its slice of each layer; all of them load it.
    Raises MissingPackage when that needs accelerate and it is not installed, and TargetError for a
    target that cannot be split over so many processes.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    device = pick_device(section.device)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    where = f"target.source={section.source}"
    loader = model_class(read_config(directory, where), where)
    options: dict[str, Any] = {
        "dtype": resolve_dtype(dtype or section.dtype, device),
        "attn_implementation": attention,
        # Only the target's end ids: its sampling settings may be refused.
        "generation_config": GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=sorted(read_end_ids(directory, source=section.source).ids) or None
        ),
    }
    if device_map is not None:
        _require_accelerate()
        options["device_map"] = device_map
    if layers is not None:
        options["config"] = _cut(read_config(directory, where), layers)
    if processes > 1:
        _require_slices(section, directory, device, processes)
        options["distributed_config"] = _slices(processes)
    with _errors_only() if processes > 1 else nullcontext():
        model = _whole_model(loader, directory, options, where)
    if device_map is None and processes == 1:
        model = model.to(device)
    embedding = model.get_input_embeddings().weight
    return LoadedTarget(model.eval(), contract, embedding.device, directory)


def _whole_model(loader: Any, directory: Path, options: dict[str, Any], where: str) -> Any:
    """The model, every weight of which was in the files. Raises TargetError."""
    try:
        model, info = loader.from_pretrained(directory, output_loading_info=True, **options)
    except RuntimeError as error:  # shapes; running out of memory is not of this text
        if "size mismatch" not in str(error) and "mismatched" not in str(error):
            raise
        problem = f"its weights do not fit its config.json: {str(error).splitlines()[0]}"
        raise TargetError(problem, where=where, fix="correct config.json or the weights") from error
    if missing := sorted(info["missing_keys"]):
        problem = f"has no tensor {missing[0]!r} ({len(missing)} are missing), "
        problem += "which a model of its config.json has; transformers would make up random ones"
        fix = "correct config.json, or download or convert the whole target again"
        raise TargetError(problem, where=where, fix=fix)
    return model


def _cut(config: Any, layers: int) -> Any:
    """The configuration of a model that has so many decoder layers."""
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _require_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        fix = "pip install accelerate, or leave features.device_map out"
        raise MissingPackage("a device map needs accelerate", where="features.device_map", fix=fix)


def _slices(processes: int) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_size=processes, tp_plan="auto")


def _require_slices(
    section: TargetSection, directory: Path, device: torch.device, processes: int
) -> None:
    """Raise TargetError where transformers cannot split this target over `processes`."""
    from transformers import AutoConfig

    where = f"target.source={section.source}"
    whole_layers = (
        "without a launcher, features.parallel=none and features.device_map=auto place whole layers"
    )
    config: Any = AutoConfig.from_pretrained(directory).get_text_config()
    if not config.base_model_tp_plan:
        problem = f"transformers has no plan for splitting the layers of {config.model_type}"
        raise TargetError(problem, where=where, fix=whole_layers)
    counts = {
        name: value
        for name, value in config.to_dict().items()
        if name.endswith(("attention_heads", "key_value_heads")) and isinstance(value, int)
    }
    for name, heads in counts.items():
        if heads % processes:
            shared = gcd(*counts.values())
            possible = [str(n) for n in range(2, shared + 1) if shared % n == 0]
            fix = f"start {' or '.join(possible)} processes, or " if possible else ""
            problem = f"{name}={heads} cannot be shared by {processes} processes"
            raise TargetError(problem, where=where, fix=fix + whole_layers)
    if device.type == "cpu" and torch.accelerator.is_available():
        problem = "transformers splits a target over the GPUs of a machine that has some"
        fix = "set target.device=auto, or CUDA_VISIBLE_DEVICES= to hide them"
        raise TargetError(problem, where="target.device=cpu", fix=fix)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Silence transformers, which lists the layers that every process holds whole."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


#: Name under which the packed attention is registered with transformers.
PACKED_ATTENTION = "eagle3_packed"
#: Queries whose scores are held at once, where they are.
_BLOCK = 512
_lengths: list[int] = []  # of the documents in the forward that is running


#: Keys and values [1, kv_heads, T, d] of every document, by layer, while alternatives are to come.
_past: dict[int, list[tuple[Tensor, Tensor]]] | None = None
#: (document, positions [A]) of the alternatives in the forward that is running.
_replaced: list[tuple[int, Tensor]] = []


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention per document.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] → [1, T, heads, d]. With a sliding
    window, position i attends to the last `sliding_window` positions, itself included. Llama 4's
    chunks count as documents. s_aux [heads] are sinks.
    """
    chunk = _chunk(module)
    if _replaced and _past is not None:
        special = sliding_window, chunk, softcap, s_aux
        return _attend_instead(query, key, value, scaling, _past[module.layer_idx], *special), None
    if _past is not None:
        whole = (torch.split(x, _lengths, dim=2) for x in (key, value))
        _past[module.layer_idx] = list(zip(*whole, strict=True))
    lengths = _pieces(_lengths, chunk)
    split = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    documents = zip(*split, strict=True)
    if softcap is None and s_aux is None:
        outputs = [_attend(q, k, v, scaling, sliding_window) for q, k, v in documents]
    else:
        outputs = [
            _attend_by_scores(q, k, v, scaling, sliding_window, softcap, s_aux)
            for q, k, v in documents
        ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _chunk(module: Any) -> int | None:
    """Length of the chunks that this layer's attention stays inside."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or index is None or kinds[index] != "chunked_attention":
        return None
    return int(module.config.attention_chunk_size)


def _pieces(lengths: Sequence[int], chunk: int | None) -> list[int]:
    """`lengths` with each cut after every `chunk`."""
    if chunk is None:
        return list(lengths)
    return [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """One document."""
    length, grouped = query.shape[2], key.shape[1] != query.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device)  # [query, key]
    visible = visible.tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scaling, enable_gqa=grouped
    )


def _attend_instead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    past: Sequence[tuple[Tensor, Tensor]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """A row of alternatives: each sees its document's keys before its position, and its own.

    query [1, heads, A, d] → [1, A, heads, d]. An own key's score stands where that of the token is
    that it replaces.
    """
    shared, outputs = query.shape[1] // key.shape[1], []
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    start = 0
    for document, positions in _replaced:
        keys, values = (x.repeat_interleave(shared, dim=1) for x in past[document])
        rows, at = slice(start, start + len(positions)), positions.to(query.device)[:, None]
        scores = query[:, :, rows] @ keys.transpose(2, 3) * scaling  # [1, heads, A, T]
        own = (query[:, :, rows] * key[:, :, rows]).sum(-1) * scaling  # [1, heads, A]
        column = torch.arange(keys.shape[2], device=query.device)
        scores = torch.where(column == at, own[..., None], scores)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        hidden = (column > at) | (column <= at - (window or len(column)))
        if chunk is not None:
            hidden |= column < at // chunk * chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand_as(own[..., None])
            scores = torch.cat((scores, extra), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32)[..., : len(column)].to(value.dtype)
        share = weights.gather(-1, at.expand_as(weights[..., :1]))  # of the own key
        before = weights.masked_fill(column == at, 0.0) @ values
        outputs.append(before + share * value[:, :, rows])
        start = rows.stop
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One document, with what changes scores before or in their softmax."""
    heads, length = query.shape[1:3]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    outputs = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        first = max(0, start - (window or length))
        scores = query[:, :, start:end] @ key[:, :, first:end].transpose(2, 3) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        age = torch.arange(start, end, device=query.device)[:, None]
        age = age - torch.arange(first, end, device=query.device)  # [query, key]
        hidden = (age < 0) | (age >= (window or length))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, end - start, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32)[..., : end - first].to(value.dtype)
        outputs.append(weights @ value[:, :, first:end])
    return torch.cat(outputs, dim=2)


def register_packed_attention() -> str:
    """Make `PACKED_ATTENTION` known to transformers; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface

    # No mask function goes with it: transformers then builds no mask at all.
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def capture_states(
    target: LoadedTarget, documents: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """(aux [T, L · H], final [T, H]) of each document, from one packed forward.

    Both are in the target's dtype and on its device. The target must have been loaded with
    `attention=register_packed_attention()`. Its layers may be on several devices.
    """
    config = decoder_of(target.model).config
    packed = config._attn_implementation == PACKED_ATTENTION
    assert packed, "load the target with the packed attention"
    if _counts_rows(config, sum(map(len, documents))) and len(documents) > 1:
        return [states for document in documents for states in capture_states(target, [document])]
    _lengths[:] = [len(document) for document in documents]
    flat = [token for document in documents for token in document]
    aux, final = _forward(target, flat, torch.cat([torch.arange(length) for length in _lengths]))
    return list(zip(torch.split(aux, _lengths), torch.split(final, _lengths), strict=True))


class Alternatives(NamedTuple):
    """K other tokens at each of P positions of a document, and what the target makes of each."""

    token_ids: Tensor  # int64 [K, P]
    final_states: Tensor  # [K, P, H]


#: Document and its final states [T, H] → P positions, ascending, and tokens [K, P] to stand there.
Draw = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def capture_alternatives(
    target: LoadedTarget, documents: Sequence[Sequence[int]], draw: Draw, *, together: int
) -> list[tuple[Tensor, Tensor, Alternatives]]:
    """What `capture_states` gives, and of each document the alternatives that are drawn.

    At most `together` of them are computed in one forward. Raises TargetError for a document that
    the target counts otherwise than by positions.
    """
    global _past
    _require_positions(target, max(together, *map(len, documents)))
    _past = {}
    try:
        captured = capture_states(target, documents)
        drawn = [draw(number, final) for number, (_, final) in enumerate(captured)]
        states = _states_instead(target, drawn, together)
    finally:
        _past = None
    return [
        (aux, final, Alternatives(token_ids, own.view(*token_ids.shape, -1)))
        for (aux, final), (_, token_ids), own in zip(captured, drawn, states, strict=True)
    ]


def _states_instead(
    target: LoadedTarget, drawn: Sequence[tuple[Tensor, Tensor]], together: int
) -> tuple[Tensor, ...]:
    """Final states [K · P, H] of each document's alternatives, in rows of at most `together`."""
    document = torch.cat([torch.full((ids.numel(),), n) for n, (_, ids) in enumerate(drawn)])
    position = torch.cat([each.repeat(len(ids)) for each, ids in drawn])
    token_ids = torch.cat([ids.flatten() for _, ids in drawn])
    states = []
    try:
        for start in range(0, len(document), together):
            row = slice(start, start + together)
            _replaced[:] = [
                (number, block)  # whose scores are held at once
                for number in range(int(document[row][0]), int(document[row][-1]) + 1)
                for block in torch.split(position[row][document[row] == number], _BLOCK)
            ]
            states.append(_outputs(target, token_ids[row].tolist(), position[row], ())[1])
    finally:
        _replaced.clear()
    return torch.split(torch.cat(states), [ids.numel() for _, ids in drawn])


def _require_positions(target: LoadedTarget, tokens: int) -> None:
    if _counts_rows(decoder_of(target.model).config, tokens):
        problem = f"scales attention by the place in a row, of {tokens:,} tokens too, and an "
        problem += "alternative has none"
        fix = "lower features.batch_tokens where no sample is so long, or set alternatives: 0"
        raise TargetError(problem, where=str(target.directory), fix=fix)


def _counts_rows(config: Any, tokens: int) -> bool:
    """Whether a row of so many tokens is scaled by the place in the row, as in Llama 4."""
    return bool(getattr(config, "attn_temperature_tuning", False)) and tokens >= config.floor_scale


def capture_alone(target: LoadedTarget, document: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(aux [T, L · H], final [T, H]) of one document, by transformers' own attention and masks."""
    with _own_attention(target.model):
        return _forward(target, document, torch.arange(len(document)))


def layer_outputs(target: LoadedTarget, document: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What every decoder layer puts out [layers, T, H], and final [T, H], as in `capture_alone`."""
    layers = range(len(decoder_of(target.model).layers))
    with _own_attention(target.model):
        outputs, final = _outputs(target, document, torch.arange(len(document)), layers)
    return torch.stack(outputs), final


def layers_of(aux: Tensor, final: Tensor) -> list[Tensor]:
    """The aux states from low to high and the final state, each [T, H]."""
    return [*aux.chunk(aux.shape[1] // final.shape[1], dim=1), final]


def noise_gain(target: LoadedTarget, document: Sequence[int], final: Tensor) -> float:
    """How far noise of one step of bfloat16 at every layer's output moves the final states.

    final [T, H] are those of the document without noise; the result is their relative change, of
    which nine tokens in ten have less, in such steps. It grows with the depth of a target, and with
    how chaotic it is.
    """
    step, generator = float(torch.finfo(torch.bfloat16).eps), torch.Generator().manual_seed(0)

    def disturb(_module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        noise = torch.randn(states.shape, generator=generator).to(states.device)
        noisy = (states.float() * (1 + step * noise)).to(states.dtype)
        return (noisy, *output[1:]) if isinstance(output, tuple) else noisy

    backbone = decoder_of(target.model)
    hooks = [layer.register_forward_hook(disturb) for layer in backbone.layers]
    try:
        ((_, noisy),) = capture_states(target, [document])
    finally:
        for hook in hooks:
            hook.remove()
    moved = (noisy.float() - final.float()).norm(dim=1) / final.float().norm(dim=1).clamp_min(1e-30)
    return float(moved.quantile(0.9)) / step


def _forward(
    target: LoadedTarget, token_ids: Sequence[int], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """aux [T, L · H] and final [T, H] of one row of T tokens at `positions` [T]."""
    states, final = _outputs(target, token_ids, positions, target.contract.capture_layers)
    return torch.cat(states, dim=-1), final


@torch.inference_mode()
def _outputs(
    target: LoadedTarget, token_ids: Sequence[int], positions: Tensor, layers: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """What each of `layers` puts out, and final, all [T, H], of one row of T tokens."""
    backbone = decoder_of(target.model)
    captured: dict[int, Tensor] = {}
    hooks = [
        backbone.layers[index].register_forward_hook(_capture_hook(captured, index))
        for index in layers
    ]
    try:
        output = backbone(
            input_ids=torch.tensor([token_ids], device=target.device),  # [1, T]
            position_ids=positions[None].to(target.device),  # [1, T]
            use_cache=False,
        )
    finally:
        for hook in hooks:
            hook.remove()
    states = [captured[index][0].to(target.device) for index in layers]
    return states, output.last_hidden_state[0].to(target.device)


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """transformers' own attention and masks, for the time of the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if decoder_of(model)._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _capture_hook(captured: dict[int, Tensor], index: int) -> Any:
    def capture(_module: Any, _inputs: Any, output: Any) -> None:
        captured[index] = output[0] if isinstance(output, tuple) else output

    return capture

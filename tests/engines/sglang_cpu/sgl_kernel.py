"""Plain torch in the place of `sgl_kernel`, the compiled operations that SGLang calls on a CPU.

SGLang's wheel for CPUs without AMX does not exist, and with this module on PYTHONPATH the one that
PyPI has runs there. The functions are written from what SGLang 0.5.23 passes to them and reads
back; tests/test_sgl_kernel.py holds each against an independent reference.

    B requests, N tree nodes with the root, K beams, S steps, T query tokens, H heads, D head size
    req_to_token [requests, positions]: in which slot of the cache a position's keys lie
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: The only layout of a tree's mask that SGLang asks for on a CPU: [B, N, N], without the prefix.
_QUERIES_ONLY = 1


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, _width: int
) -> None:
    """Give each request's positions start … end - 1 the next of `slots`."""
    taken = 0
    for row, first, last in _rows(requests, start, end):
        req_to_token[row, first:last] = slots[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, _width: int
) -> None:
    """The slots of each request's positions start … end - 1, one request after the other."""
    slots = [req_to_token[row, first:last] for row, first, last in _rows(requests, start, end)]
    if slots:
        joined = torch.cat(slots)
        out[: len(joined)] = joined


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    width: int,
    beams: int,
    steps: int,
) -> None:
    """The K·S slots that follow each request's text: those of a beam's steps are neighbours."""
    end = seq_lens + beams * steps
    assign_extend_cache_locs_cpu(requests, req_to_token, seq_lens, end, out, width)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, beams: int, steps: int, width: int
) -> Tensor:
    """[B·K, positions]: each beam as if it were a request, its own steps after the common text."""
    table = req_to_token[requests.long(), :width].repeat_interleave(beams, dim=0)
    for row, length in enumerate(seq_lens.tolist()):
        drafts = req_to_token[requests[row], length : length + beams * steps].view(beams, steps)
        table[row * beams : (row + 1) * beams, length : length + steps] = drafts
    return table


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    beams: int,
    _depth: int,
    nodes: int,
    mode: int,
) -> None:
    """Masks, positions and links of the trees whose nodes 1 … N - 1 are the `selected` candidates.

    Candidates are numbered in the order in which they were drafted, K of each beam: those of group
    0 are the root's children, those of group g are children of candidate `parents[g]`. A node
    whose parent was not selected is linked to nothing: it is never accepted.
    """
    assert mode == _QUERIES_ONLY, mode
    masks, places = tree_mask.view(-1, nodes, nodes), positions.view(-1, nodes)
    for row, chosen in enumerate(selected.tolist()):
        node_of = {candidate: node for node, candidate in enumerate(chosen, start=1)}
        groups = parents[row].tolist()
        mask = torch.eye(nodes, dtype=torch.bool)
        mask[0, 0] = True
        last_child: dict[int, int] = {}
        for node, candidate in enumerate(chosen, start=1):
            group = candidate // beams
            parent = 0 if group == 0 else node_of.get(groups[group])
            if parent is None:
                continue
            mask[node] |= mask[parent]
            if parent in last_child:
                next_sibling[row, last_child[parent]] = node
            else:
                first_child[row, parent] = node
            last_child[parent] = node
        masks[row] = mask
        places[row] = seq_lens[row] + mask.sum(-1) - 1
        index[row] = torch.arange(row * nodes, (row + 1) * nodes)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk from each root to the child that is the target's own token, until no child is.

    `accept_index` [B, depth + 1]: the nodes on the way, the root first, counted over all trees;
    `predicts` [B·N]: the target's token at each; `accept_token_num` [B]: how many, the root not
    counted. The rest of `accept_index` and `predicts` is left as it is.
    """
    rows = zip(
        *(each.tolist() for each in (candidates, retrive_index)),
        *(each.tolist() for each in (retrive_next_token, retrive_next_sibling, target_predict)),
        strict=True,
    )
    for row, (tokens, index, first_child, next_sibling, predicted) in enumerate(rows):
        way = [0]
        while len(way) < accept_index.shape[1]:
            child = first_child[way[-1]]
            while child >= 0 and tokens[child] != predicted[way[-1]]:
                child = next_sibling[child]
            if child < 0:
                break
            way.append(child)
        for place, node in enumerate(way):
            accept_index[row, place] = index[node]
            predicts[index[node]] = predicted[node]
        accept_token_num[row] = len(way) - 1


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, out: Tensor, width: int) -> None:
    """[B]: the last of each request's accepted tokens, which lie in rows of `width`."""
    last = lengths.long().unsqueeze(1) - 1
    out.copy_(tokens.view(-1, width).gather(1, last).squeeze(1))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of accepted nodes without gaps; `accept_index` is -1 where nothing was accepted."""
    kept = slots[accept_index[accept_index >= 0].long()]
    out[: len(kept)] = kept


def copy_all_layer_kv_cache_cpu(
    addresses: Tensor, row_bytes: Tensor, targets: Tensor, sources: Tensor
) -> None:
    """Move rows in every layer's keys and values, all of which are read before any is written."""
    to, since = targets.tolist(), sources.tolist()
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in since]
        for slot, row in zip(to, rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def decode_attention_cpu(
    query: Tensor,  # [B, H, D]
    key_cache: Tensor,  # [slots, G, D]
    value_cache: Tensor,
    _key_scale: float,
    _value_scale: float,
    out: Tensor,
    key: Tensor,  # [B, G, D]: still to be written to slots `cache_loc`
    value: Tensor,
    cache_loc: Tensor,
    _buffer: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    _encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One query a request: over all its keys, or the last `window` of them (0: all)."""
    assert not is_cross and not logit_cap and sinks is None
    key_cache[cache_loc] = key.view(-1, *key_cache.shape[1:])
    value_cache[cache_loc] = value.view(-1, *value_cache.shape[1:])
    for row, length in enumerate(seq_lens.tolist()):
        first = max(length - window, 0) if window > 0 else 0
        slots = req_to_token[requests[row], first:length].long()
        out[row] = _attention(query[row : row + 1], key_cache, value_cache, slots, None, scale)[0]


def extend_attention_cpu(
    query: Tensor,  # [T, H, D]
    _key: Tensor,  # already in the cache
    _value: Tensor,
    out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    _key_scale: float,
    _value_scale: float,
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,  # with the new tokens
    extend_lens: Tensor,
    starts: Tensor,
    _longest: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    _encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The last `extend_lens` positions of each request: over all its keys, causally or, among the
    new ones, as `tree_mask` [B, N, N] says; with a `window` over so many with its own."""
    assert not is_cross and not logit_cap and sinks is None
    lengths = zip(seq_lens.tolist(), extend_lens.tolist(), starts.tolist(), strict=True)
    for row, (length, new, start) in enumerate(lengths):
        slots = req_to_token[requests[row], :length].long()
        distance = torch.arange(length - new, length).unsqueeze(1) - torch.arange(length)
        mask = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - new :] = tree_mask.view(-1, new, new)[row]
        if window > 0:
            assert tree_mask is None, "a tree's positions are not its nodes' places"
            mask &= distance < window
        chosen = slice(start, start + new)
        out[chosen] = _attention(query[chosen], key_cache, value_cache, slots, mask, scale)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """[T, H, D], of queries over the keys in `slots`."""
    q, k, v = (each.movedim(0, 1).to(query.dtype) for each in (query, keys[slots], values[slots]))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.movedim(0, 1)


def _rows(requests: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    columns = (each.tolist() for each in (requests, start, end))
    return list(zip(*columns, strict=True))


# SGLang's attention backend reads these two from torch's registry instead of the module.
for _operation in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, _operation.__name__, _operation)

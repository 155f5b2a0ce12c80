"""Layers that are one operation: attention, encoders, recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import (
    Planes,
    TaintedCall,
    any_over,
    everywhere,
    hide,
    spread,
    visible_over,
)


def attention(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `softmax(q @ k.T * scale + mask) @ v`, one kernel; hidden keys do not count."""
    query = call.args[0]
    if call.argument("dropout_p", 0.0):
        return everywhere(call, taint)
    q = taint(query).any(-1).unsqueeze(-1)
    kv = _keys(call, taint)
    hidden_pairs = call.none
    mask = call.argument("attn_mask", call.argument("attn_bias"))
    found = q | kv
    if mask is not None:
        boolean = mask.dtype == torch.bool
        hidden = ~call.value(mask) & ~call.unknown(mask) if boolean else call.low(mask)
        if not boolean:
            hide(call, mask, hidden, _keys(call, call.padded), [-1])
        hidden_pairs = hidden_pairs | hidden
        found = found | (taint(mask) & ~hidden)
    if call.argument("is_causal", False):
        ones = torch.ones(q.shape[-2], kv.shape[-1], dtype=torch.bool, device=q.device)
        hidden_pairs = hidden_pairs | ones.triu(1)
    row = visible_over(found, hidden_pairs, [-1])
    return [row, *[row.any()] * (len(call.results) - 1)]


def _keys(call: TaintedCall, taint: Planes) -> Tensor:
    """Return the plane of keys and their values as (..., 1, keys), for each head of the queries."""
    query, key, value = call.args[:3]
    found = (taint(key).any(-1) | taint(value).any(-1)).unsqueeze(-2)
    groups = query.shape[-3] // key.shape[-3]
    return found if groups == 1 else found.repeat_interleave(groups, dim=-3)


def fused_attention(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint attention with its projections, or an encoder layer, of (batch, length, features)."""
    query = call.args[0]
    both = call.args[1:3] if call.name == "_native_multi_head_attention" else (query,)
    mask = call.argument("mask")
    rows = [query, *both] if mask is None else [query, *both, mask]
    if spread(call, taint, *rows):
        return everywhere(call, taint)
    q = taint(query).any(-1).unsqueeze(-1)
    found = call.none
    for t in both:
        found = found | taint(t).any(-1).unsqueeze(-2)
    hidden_pairs = call.none
    if mask is not None:
        hidden = (call.value(mask) != 0) & ~call.unknown(mask)
        hidden_pairs, doubt = _by_pair(call, hidden), _by_pair(call, taint(mask) & ~hidden)
        found = found | doubt
    row = q | visible_over(found, hidden_pairs, [-1])
    planes: list[Tensor] = []
    for r in call.results:  # weights are (batch, heads, length, length), or their mean over heads
        plane = row if r is call.results[0] else row | found
        if r.dim() == 4:
            plane = plane.unsqueeze(1)
        planes.append(plane.broadcast_to(r.shape) if r.numel() else torch.ones_like(r).bool())
    return planes


def _by_pair(call: TaintedCall, mask: Tensor) -> Tensor:
    """Return a mask of keys, of pairs, or of pairs for each head as (batch, length, length)."""
    if mask.dim() == 4:  # heads must agree
        same = mask.all(1) == mask.any(1)
        if not bool(same.all()):
            raise ValueError("a mask for each head")
        return mask[:, 0]
    if mask.dim() != 2:
        raise ValueError("a mask of another form")
    return mask.unsqueeze(1) if call.argument("mask_type") == 1 else mask.unsqueeze(0)


def cell(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint a step of an LSTM or GRU, one kernel, row by row."""
    rows = call.args[:3]
    found = torch.stack([taint(t).any(-1) for t in rows]).any(0) | spread(call, taint, *rows)
    return [found.unsqueeze(-1) for _ in call.results]


def recurrent(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint recurrent layers row by row of the batch; over time, all steps after a tainted one."""
    t = call.args[0]
    both_ways = call.argument("bidirectional") or call.argument("reverse", False)
    batch_first = call.argument("batch_first") and call.name.startswith("_cudnn")
    time = 1 if batch_first else 0
    found = taint(t).any(-1)
    row = found.any(time)
    states = [*filter(torch.is_tensor, map(call.argument, ("hx", "cx", "hx_", "cx_")))]
    for state in states:
        begun = any_over(taint(state), [-1, *range(state.dim() - 2)]).reshape(-1)
        row, found = row | begun, found | begun.unsqueeze(time)
    mixed = spread(call, taint, t, *states)
    mixed = mixed or (call.argument("dropout", 0) and call.argument("train"))
    if both_ways:
        steps = row.unsqueeze(time).broadcast_to(found.shape)
    else:
        steps = found.to(torch.int32).cumsum(time) > 0
    steps, row = steps | bool(mixed), row | bool(mixed)
    shapes = [r.shape for r in call.results]
    last = [row.unsqueeze(-1) for s in shapes[1:3] if s[-2:-1] == row.shape and row.dim()]
    return [steps.unsqueeze(-1), *last, *[row.any()] * len(shapes[1 + len(last) :])]

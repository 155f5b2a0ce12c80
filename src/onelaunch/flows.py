"""How what a padded row holds spreads through one ATen operation.

A *plane* is a bool tensor of the shape of a tensor: which of its elements something is true of. A
flow takes the planes of an operation's inputs to those of its outputs, and errs to the side of
spreading. An operation without a flow here spreads from any element to all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.operators import tensors

LOW = -1e4
"""A score so far below others that its softmax is exactly 0: exp(-104) underflows in float32."""

See = Callable[[Any], Tensor]
"""The plane of an input; all false for what is not a tensor of any interest."""


@dataclass(slots=True)
class Call:
    """One operation that ran, with what is known of its inputs.

    Attributes:
        name: of the overload: ``add.Tensor``.
        zero: where a tensor is 0 at every call, whatever the padding holds.
        low: where it is so low that a softmax gives 0, at every call.
        unknown: where a value may differ from call to call.
        value: a tensor's values, on the device of the planes.
        real: the shape of a tensor in the run at the real size; None if that is not known.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    zero: See
    low: See
    unknown: See
    value: See
    real: Callable[[Tensor], torch.Size | None]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if index < len(self.args):
                    return self.args[index]
                return self.kwargs.get(name, argument.default_value)
        return default


Flow = Callable[[Call, See], list[Tensor]]


def flow_of(func: Any) -> Flow | None:
    """The flow of an overload, or None for an operation that is not known."""
    name = str(func).removeprefix("aten.").removesuffix(".default")
    packet = name.partition(".")[0]
    found = FLOWS.get(name) or FLOWS.get(packet) or FLOWS.get(packet.removesuffix("_"))
    if found is None and is_pointwise(func) and not packet.startswith("_foreach"):
        return pointwise
    return found


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether each element of the result depends on the elements at its own place alone."""
    packet = str(func).removeprefix("aten.").partition(".")[0]
    return torch.Tag.pointwise in func.tags or packet.removesuffix("_") in POINTWISE


POINTWISE = frozenset(
    {
        *("_to_copy", "copy", "clone", "detach", "alias", "lift", "lift_fresh", "where"),
        *("floor_divide", "hardswish", "_prelu_kernel", "masked_fill", "log_sigmoid_forward"),
    }
)
"""Those that torch does not tag so."""


def pointwise(call: Call, see: See) -> list[Tensor]:
    """The inputs' planes, broadcast and joined."""
    shape = call.results[0].shape
    found = torch.zeros((), dtype=torch.bool)
    for t in tensors((call.args, call.kwargs)):
        found = found.to(see(t).device) | see(t)
    return [found.broadcast_to(shape)]


def _filled(call: Call, see: See) -> list[Tensor]:
    """Nothing of the input's values remains."""
    return [torch.zeros(t.shape, dtype=torch.bool) for t in call.results]


def _copied(call: Call, see: See) -> list[Tensor]:
    return [see(call.args[1]).broadcast_to(call.results[0].shape)]


def _product(call: Call, see: See) -> list[Tensor]:
    """A known 0 times anything is 0."""
    (found,) = pointwise(call, see)
    for t in tensors(call.args):
        found = found & ~call.zero(t)
    return [found]


def _chosen(call: Call, see: See) -> list[Tensor]:
    """`where`: of the two values only the one chosen counts."""
    mask, yes, no = call.args
    picked = _either(call, mask, see(yes), see(no))
    return [(see(mask) | picked).broadcast_to(call.results[0].shape)]


def _masked_fill(call: Call, see: See) -> list[Tensor]:
    t, mask, value = call.args
    picked = _either(call, mask, see(value), see(t))
    return [(see(mask) | picked).broadcast_to(call.results[0].shape)]


def _either(call: Call, mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """What a mask chooses; both where another call may choose otherwise."""
    picked = torch.where(call.value(mask).bool(), yes, no)
    return torch.where(call.unknown(mask), yes | no, picked)


def _dims(call: Call, t: Tensor) -> list[int]:
    dim = call.argument("dim")
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(t.dim()))
    listed: list[int] = [dim] if isinstance(dim, int) else list(dim)
    return [d % max(t.dim(), 1) for d in listed] if t.dim() else []


def _any(plane: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        plane = plane.any(dim, keepdim=True)
    return plane


def _reduced(call: Call, see: See) -> list[Tensor]:
    """Every element that is reduced counts."""
    t = call.args[0]
    found = _any(see(t), _dims(call, t))
    return [_fit(found, r.shape) for r in call.results]


def _summed(call: Call, see: See) -> list[Tensor]:
    """Every element that is summed counts, but for known zeros."""
    t = call.args[0]
    found = _any(see(t) & ~call.zero(t), _dims(call, t))
    return [_fit(found, r.shape) for r in call.results]


def _largest(call: Call, see: See) -> list[Tensor]:
    """The lowest do not count where there is another."""
    t = call.args[0]
    found = _above_low(call, see, _dims(call, t))
    return [_fit(found, r.shape) for r in call.results]


def _above_low(call: Call, see: See, dims: Sequence[int]) -> Tensor:
    t = call.args[0]
    low, plane = call.low(t), see(t)
    some = _any(~low, dims)
    return torch.where(some, _any(plane & ~low, dims), _any(plane, dims))


def _fit(plane: Tensor, shape: torch.Size) -> Tensor:
    """A reduced plane in the shape of a result, with or without the reduced dimensions."""
    if plane.numel() == math.prod(shape):
        return plane.reshape(shape)
    if plane.dim() == len(shape):  # topk keeps some of the dimension
        return plane.broadcast_to(shape)
    return plane.any().broadcast_to(shape)


def _softmax(call: Call, see: See) -> list[Tensor]:
    low = call.low(call.args[0])
    dims = _dims(call, call.args[0])
    found = _above_low(call, see, dims)
    gone = low & _any(~low, dims)  # 0 at every call
    return [found.broadcast_to(call.results[0].shape) & ~gone]


def _log_softmax(call: Call, see: See) -> list[Tensor]:
    found = _above_low(call, see, _dims(call, call.args[0])) | see(call.args[0])
    return [found.broadcast_to(call.results[0].shape)]


def _scanned(call: Call, see: See) -> list[Tensor]:
    """Each element depends on itself and those before it."""
    t = call.args[0]
    (dim,) = _dims(call, t)[:1] or [0]
    found = see(t) if not t.dim() else see(t).to(torch.int32).cumsum(dim) > 0
    return [found.broadcast_to(r.shape) for r in call.results]


def _contracted(call: Call, see: See, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`: a known zero on either side takes the other out of the sum."""
    live_a, live_b = ~call.zero(a), ~call.zero(b)
    from_a = (live_a & see(a)).float() @ live_b.float()
    from_b = live_a.float() @ (live_b & see(b)).float()
    return (from_a + from_b) > 0


def _matmul(call: Call, see: See) -> list[Tensor]:
    return [_contracted(call, see, call.args[0], call.args[1])]


def _matmul_added(call: Call, see: See) -> list[Tensor]:
    found = _contracted(call, see, call.args[1], call.args[2])
    return [found | see(call.args[0]).broadcast_to(found.shape)]


def _linear(call: Call, see: See) -> list[Tensor]:
    found = see(call.args[0]).any(-1, keepdim=True)
    if any(bool(see(t).any()) for t in call.args[1:] if isinstance(t, Tensor)):
        found = torch.ones_like(found)
    return [found.broadcast_to(call.results[0].shape)]


def _looked_up(call: Call, see: See) -> list[Tensor]:
    """`embedding(weight, indices)`."""
    weight, indices = call.args[0], call.args[1]
    found = see(indices).unsqueeze(-1) | see(weight).any()
    return [found.broadcast_to(call.results[0].shape)]


def _normalized_last(call: Call, see: See) -> list[Tensor]:
    """`native_layer_norm` and `rms_norm`: the last dimensions together."""
    t = call.args[0]
    kept = t.dim() - len(call.args[1])
    found = _any(see(t), range(kept, t.dim()))
    for parameter in call.args[2:4]:
        if isinstance(parameter, Tensor):
            found = found | see(parameter).any()
    return [found.broadcast_to(call.results[0].shape), *_each(found, call.results[1:])]


def _each(plane: Tensor, results: Sequence[Tensor]) -> list[Tensor]:
    return [_fit(plane, r.shape) for r in results]


def _group_norm(call: Call, see: See) -> list[Tensor]:
    t, n, groups = call.args[0], call.args[3], call.args[6]
    found = see(t).reshape(n, groups, -1).any(-1)
    found = found | any(bool(see(p).any()) for p in call.args[1:3] if isinstance(p, Tensor))
    whole = found.unsqueeze(-1).broadcast_to(n, groups, max(t.numel() // max(n * groups, 1), 1))
    out = call.results[0]
    return [whole.reshape(out.shape), *_each(found, call.results[1:])]


def _batch_norm(call: Call, see: See) -> list[Tensor]:
    """In training a row's result depends on the batch; in eval on itself."""
    t = call.args[0]
    training = call.argument("training", call.argument("train", False))
    if "no_stats" in call.name or "with_update" in call.name or training:
        found = _any(see(t), [d for d in range(t.dim()) if d != 1])
        channels = found.any().reshape(1)
        rest = [channels.broadcast_to(r.shape) for r in call.results[1:]]
        return [found.broadcast_to(t.shape), *rest]
    clean = torch.zeros((), dtype=torch.bool, device=see(t).device)
    found = see(t)
    for parameter in call.args[1:5]:
        if isinstance(parameter, Tensor):
            found = found | see(parameter).any()
    return [found, *(clean.broadcast_to(r.shape) for r in call.results[1:])]


def _convolution(call: Call, see: See) -> list[Tensor]:
    """Each place depends on its window, of all channels; padding with zeros adds nothing."""
    t, weight = call.args[0], call.args[1]
    stride, padding, dilation, transposed, extra = call.args[3:8]
    rank = t.dim() - 2
    window = torch.ones((1, 1, *weight.shape[2:]), device=see(t).device)
    plane = see(t).any(1, keepdim=True).float()
    run = (torch.conv1d, torch.conv2d, torch.conv3d)
    back = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    if transposed:
        found = back[rank - 1](plane, window, None, stride, padding, extra, 1, dilation)
    else:
        found = run[rank - 1](plane, window, None, stride, padding, dilation)
    spread = any(bool(see(p).any()) for p in call.args[1:3] if isinstance(p, Tensor))
    return [((found > 0.5) | spread).broadcast_to(call.results[0].shape)]


def _max_pooled(call: Call, see: See) -> list[Tensor]:
    found = call.func(see(call.args[0]).float(), *call.args[1:], **call.kwargs)
    first = found[0] if isinstance(found, tuple) else found
    return [first > 0 for _ in call.results]


def _averaged(call: Call, see: See) -> list[Tensor]:
    """Pooling and resampling with weights that are not negative."""
    found = call.func(see(call.args[0]).float(), *call.args[1:], **call.kwargs)
    return [found > 0]


def _moved(call: Call, see: See) -> list[Tensor]:
    """Elements change places, or come from constants: the same is done to the plane."""

    def plane(value: Any) -> Any:
        if isinstance(value, Tensor):
            return see(value).to(torch.uint8)
        if isinstance(value, (list, tuple)):
            return type(value)(plane(v) for v in value)
        return value

    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("dtype", "device", "layout")}
    found = call.func(*(plane(a) for a in call.args), **kwargs)
    return [f.bool() for f in (found if isinstance(found, (list, tuple)) else [found])]


def _padded(call: Call, see: See) -> list[Tensor]:
    """`constant_pad_nd`: what it adds is constant."""
    found = torch.constant_pad_nd(see(call.args[0]).to(torch.uint8), call.args[1], 0)
    return [found.bool()]


def _index_select(call: Call, see: See) -> list[Tensor]:
    t, dim, index = call.args
    found = _reached(call, see, t, dim, index).index_select(dim, call.value(index))
    shape = [1] * t.dim()
    if shape:
        shape[dim] = -1
    return [found | see(index).reshape(shape)]


def _gather(call: Call, see: See) -> list[Tensor]:
    t, dim, index = call.args[:3]
    return [_reached(call, see, t, dim, index).gather(dim, call.value(index)) | see(index)]


def _reached(call: Call, see: See, t: Tensor, dim: int, index: Tensor) -> Tensor:
    """What an index that is never negative picks: any real place, where calls may differ."""
    plane = see(t)
    if not t.dim() or not bool(call.unknown(index).any()):
        return plane
    real = call.real(t)
    if real is None:
        return torch.ones_like(plane)
    return plane.narrow(dim, 0, real[dim]).any(dim, keepdim=True).broadcast_to(plane.shape)


def _uncertain(call: Call, t: Tensor, indices: Sequence[Tensor | None]) -> list[int] | None:
    """The dimensions in which another call may index otherwise; None where what it means there
    depends on the size, as a negative index does."""
    real = call.real(t)
    dims: list[int] = []
    dim = 0
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        count = index.dim() if index is not None and masks else 1
        if index is not None and bool(call.unknown(index).any()):
            dims += range(dim, dim + count)
        dim += count
    if dims and (real is None or any(real[d] != t.shape[d] for d in dims)):
        return None
    return dims


def _indexed(call: Call, see: See) -> list[Tensor]:
    """`t[i, j]`: what is picked, and everything where an index is not certain."""
    t, indices = call.args[0], call.args[1]
    values = tuple(slice(None) if i is None else call.value(i) for i in indices)
    dims = _uncertain(call, t, indices)
    plane = torch.ones_like(see(t)) if dims is None else _any(see(t), dims).broadcast_to(t.shape)
    found = plane[values]
    return [found | _doubt(indices, see, found)]


def _doubt(indices: Sequence[Tensor | None], see: See, picked: Tensor) -> Tensor:
    """The planes of the indices, where what they pick lies; all of it for a mask."""
    given = [i for i in indices if i is not None]
    doubt = torch.zeros((), dtype=torch.bool, device=picked.device)
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        for i in given:
            doubt = doubt | see(i).any()
        return doubt
    for i in given:
        doubt = doubt | see(i)
    places = [n for n, i in enumerate(indices) if i is not None]
    first = places[0] if places[-1] - places[0] + 1 == len(places) else 0
    after = picked.dim() - first - doubt.dim()
    return doubt.reshape((*doubt.shape, *[1] * after))


def _index_put(call: Call, see: See) -> list[Tensor]:
    """What is put, where it is put; in all of a dimension where a place is not certain."""
    t, indices, values = call.args[:3]
    old = see(t)
    dims = _uncertain(call, t, indices)
    if dims is None:
        return [torch.ones_like(old)]
    where = tuple(slice(None) if i is None else call.value(i) for i in indices)
    picked = old[where]
    put = see(values).broadcast_to(picked.shape) | _doubt(indices, see, picked)
    if dims or call.argument("accumulate", False):
        found = torch.zeros_like(old)
        found[where] = put
        return [old | _any(found, dims)]
    found = old.clone()
    found[where] = put
    return [found]


def _scattered(call: Call, see: See) -> list[Tensor]:
    t, dim, index, source = call.args[:4]
    put = see(source)
    put = put[tuple(slice(0, n) for n in index.shape)] if put.dim() else put
    old, put = see(t).to(torch.uint8), (put | see(index)).to(torch.uint8)
    if bool(call.unknown(index).any()):  # anywhere in its line
        line = torch.zeros_like(old)
        if line.dim():
            line[tuple(slice(0, n) for n in index.shape)] = put
            return [(old | line.amax(dim, keepdim=True)).bool()]
        return [(old | put).bool()]
    index = call.value(index)
    if call.name.startswith(("scatter_add", "scatter_reduce")) or len(call.args) > 4:
        return [old.scatter_reduce(dim, index, put, "amax", include_self=True).bool()]
    return [old.scatter(dim, index, put.broadcast_to(index.shape)).bool()]


def _attention(call: Call, see: See) -> list[Tensor]:
    """`softmax(q @ k.T * scale + mask) @ v` as one kernel."""
    query, key, value = call.args[:3]
    if call.argument("dropout_p", 0.0):
        return [torch.ones(r.shape, dtype=torch.bool) for r in call.results]
    q = see(query).any(-1).unsqueeze(-1)
    kv = (see(key).any(-1) | see(value).any(-1)).unsqueeze(-2)
    if kv.shape[-3] != q.shape[-3]:  # grouped queries
        kv = kv.repeat_interleave(q.shape[-3] // kv.shape[-3], dim=-3)
    dead = torch.zeros((), dtype=torch.bool, device=q.device)
    mask = call.argument("attn_mask", call.argument("attn_bias"))
    found = q | kv
    if mask is not None:
        boolean = mask.dtype == torch.bool
        hidden = ~call.value(mask) & ~call.unknown(mask) if boolean else call.low(mask)
        dead = dead | hidden
        found = found | (see(mask) & ~hidden)
    if call.argument("is_causal", False):
        ones = torch.ones(q.shape[-2], kv.shape[-1], dtype=torch.bool, device=q.device)
        dead = dead | ones.triu(1)
    dead = dead.broadcast_to(found.shape)
    some = ~dead.all(-1)
    row = torch.where(some, (found & ~dead).any(-1), found.any(-1))
    out = row.unsqueeze(-1).broadcast_to(call.results[0].shape)
    return [out, *(row.any().broadcast_to(r.shape) for r in call.results[1:])]


def _by_row(call: Call, see: See) -> list[Tensor]:
    """A fused layer of which no more is known than that it keeps the rows of a batch apart."""
    t = call.args[0]
    row = _any(see(t), range(1, t.dim()))
    if any(bool(see(p).any()) for p in tensors((call.args[1:], call.kwargs)) if p is not t):
        row = torch.ones_like(row)
    out = call.results[0]
    return [row.reshape([-1] + [1] * (out.dim() - 1)).broadcast_to(out.shape)]


def _recurrent(call: Call, see: See) -> list[Tensor]:
    """Recurrent layers: rows of the batch by themselves; over time from the first on."""
    t = call.args[0]
    both_ways = call.argument("bidirectional") or call.argument("reverse", False)
    batch_first = call.argument("batch_first") and call.name.startswith("_cudnn")
    time = 1 if batch_first else 0
    found = see(t).any(-1)
    row = found.any(time)
    for state in map(call.argument, ("hx", "cx", "hx_", "cx_")):
        if isinstance(state, Tensor):
            begun = _any(see(state), [-1, *range(state.dim() - 2)]).reshape(-1)
            row, found = row | begun, found | begun.unsqueeze(time)
    weights = tensors(call.args[1:5])
    weights = [w for w in weights if w is not call.argument("hx")]
    spread = any(bool(see(w).any()) for w in weights)
    spread = spread or (call.argument("dropout", 0) and call.argument("train"))
    if both_ways:
        steps = row.unsqueeze(time).broadcast_to(found.shape)
    else:
        steps = found.to(torch.int32).cumsum(time) > 0
    steps, row = steps | bool(spread), row | bool(spread)
    shapes = [r.shape for r in call.results]
    states = [
        row.unsqueeze(-1).broadcast_to(s)
        for s in shapes[1:3]
        if s[-2:-1] == row.shape and row.dim()
    ]
    rest = [row.any().broadcast_to(s) for s in shapes[1 + len(states) :]]
    return [steps.unsqueeze(-1).broadcast_to(shapes[0]), *states, *rest]


def _table(*rows: tuple[str, Flow]) -> dict[str, Flow]:
    return {name: flow for names, flow in rows for name in names.split()}


FLOWS: dict[str, Flow] = _table(
    ("mul.Tensor mul_.Tensor", _product),
    ("fill fill_ zero zero_ zeros_like ones_like full_like new_zeros new_ones new_full", _filled),
    ("new_empty new_empty_strided empty_like", _filled),
    ("copy copy_ fill.Tensor fill_.Tensor", _copied),
    ("where.self", _chosen),
    ("masked_fill masked_fill_", _masked_fill),
    ("sum mean", _summed),
    ("amax max.dim max logsumexp", _largest),
    ("amin min.dim min prod any all argmax argmin var std var_mean std_mean norm", _reduced),
    ("linalg_vector_norm count_nonzero sort topk argsort kthvalue median mode", _reduced),
    ("nansum aminmax", _reduced),
    ("_softmax _safe_softmax", _softmax),
    ("_log_softmax", _log_softmax),
    ("cumsum cumprod cummax cummin logcumsumexp", _scanned),
    ("mm bmm dot mv", _matmul),
    ("addmm baddbmm addmv _addmm_activation", _matmul_added),
    ("linear", _linear),
    ("embedding", _looked_up),
    ("native_layer_norm _fused_rms_norm", _normalized_last),
    ("native_group_norm", _group_norm),
    ("native_batch_norm _native_batch_norm_legit cudnn_batch_norm", _batch_norm),
    ("_native_batch_norm_legit_no_training _batch_norm_with_update", _batch_norm),
    ("_batch_norm_no_update miopen_batch_norm", _batch_norm),
    ("convolution", _convolution),
    ("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d", _max_pooled),
    ("adaptive_max_pool3d", _max_pooled),
    ("avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d", _averaged),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", _averaged),
    ("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", _averaged),
    ("cat stack flip roll repeat tril triu select_scatter slice_scatter", _moved),
    ("diag_embed rot90 im2col pixel_shuffle pixel_unshuffle channel_shuffle", _moved),
    ("reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d", _moved),
    ("repeat_interleave.self_int _unsafe_view _reshape_alias _reshape_copy", _moved),
    ("view_copy expand_copy permute_copy slice_copy select_copy unfold_copy", _moved),
    ("constant_pad_nd", _padded),
    ("index_select", _index_select),
    ("gather", _gather),
    ("index.Tensor _unsafe_index", _indexed),
    ("index_put index_put_ _unsafe_index_put", _index_put),
    ("scatter.src scatter.value scatter_.src scatter_.value scatter_add scatter_add_", _scattered),
    ("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention", _attention),
    ("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", _attention),
    ("_scaled_dot_product_fused_attention_overrideable", _attention),
    ("_transformer_encoder_layer_fwd _native_multi_head_attention", _by_row),
    ("_cudnn_rnn mkldnn_rnn_layer", _recurrent),
)
"""Operation -> flow; by overload, by name, or by name without the underscore of in-place."""

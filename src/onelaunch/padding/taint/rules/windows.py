"""Convolution, pooling and resampling: each place from a window of the input."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import (
    See,
    TaintedCall,
    any_over,
    beyond,
    everywhere,
    same_size,
)


def convolution(call: TaintedCall, see: See) -> list[Tensor]:
    """Each place depends on its window, of all channels; zeros add nothing, as beyond the edges."""
    t, weight, bias, stride, padding, dilation, transposed, extra = call.args[:8]
    rank = t.dim() - 2
    live = ~call.zero(t)
    window = torch.ones((1, 1, *weight.shape[2:]), device=live.device)
    run = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    back = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[rank - 1]

    def reached(plane: Tensor) -> Tensor:
        plane = plane.any(1, keepdim=True).float()
        if transposed:
            return back(plane, window, None, stride, padding, extra, 1, dilation) > 0.5
        return run(plane, window, None, stride, padding, dilation) > 0.5

    found = reached((live if bool(see(weight).any()) else see(t) & live).expand(t.shape))
    if bias is not None and bool(see(bias).any()):
        found = torch.ones_like(found)
    found = found.broadcast_to(call.results[0].shape)
    if see is not call.unknown and call.real_results:  # places that are not there remain padding
        found = found | beyond(found.shape, call.real_results[0], found.device)
    return [found]


def max_pooled(call: TaintedCall, see: See) -> list[Tensor]:
    found = call.func(see(call.args[0]).float(), *call.args[1:], **call.kwargs)
    first = found[0] if isinstance(found, tuple) else found
    return [first > 0 for _ in call.results]


def adaptive_max(call: TaintedCall, see: See) -> list[Tensor]:
    return (max_pooled if same_size(call, call.args[0], 2) else everywhere)(call, see)


def adaptive_average(call: TaintedCall, see: See) -> list[Tensor]:
    return (averaged if same_size(call, call.args[0], 2) else everywhere)(call, see)


def resampled(call: TaintedCall, see: See) -> list[Tensor]:
    """Where the size changes, each place must still come from the same ones of the input."""
    t = call.args[0]
    if same_size(call, t, 2):
        return averaged(call, see)
    real = call.real(t)
    if real is None or not call.real_results or call.argument("align_corners", False):
        return everywhere(call, see)
    pairs = [*zip(call.results[0].shape, t.shape, strict=True)][2:]
    pairs += [*zip(call.real_results[0], real, strict=True)][2:]
    times = [out // max(size, 1) for out, size in pairs]
    whole = all(out == n * size and n for n, (out, size) in zip(times, pairs, strict=True))
    half = len(times) // 2
    return (averaged if whole and times[:half] == times[half:] else everywhere)(call, see)


def averaged(call: TaintedCall, see: See) -> list[Tensor]:
    """Pooling, resampling, unfolding: as far as NaN spreads, which a weight of 0 does not stop."""
    plane = see(call.args[0])
    given = torch.where(plane, torch.nan, torch.zeros((), device=plane.device))
    return [call.func(given, *call.args[1:], **call.kwargs).isnan()]


def each_image(call: TaintedCall, see: See) -> list[Tensor]:
    """Resampling with wide windows: each channel of each image by itself."""
    t = call.args[0]
    if not same_size(call, t, 2) or [s[2:] for s in call.real_results[:1]] != [
        call.results[0].shape[2:]
    ]:
        return everywhere(call, see)
    return [any_over(see(t), range(2, t.dim())).broadcast_to(call.results[0].shape)]


def sampled(call: TaintedCall, see: See) -> list[Tensor]:
    """`grid_sample`: any place of its image, as the grid says."""
    t, grid = call.args[:2]
    if not same_size(call, t, 2):
        return everywhere(call, see)
    found = any_over(see(t), range(2, t.dim())) | see(grid).any(-1).unsqueeze(1)
    return [found.broadcast_to(call.results[0].shape)]


def gridded(call: TaintedCall, see: See) -> list[Tensor]:
    """`affine_grid`: a grid for each matrix."""
    out = call.results[0]
    if not call.real_results or call.real_results[0][1:] != out.shape[1:]:
        return everywhere(call, see)
    found = see(call.args[0]).flatten(1).any(1)
    return [found.reshape(-1, *[1] * (out.dim() - 1)).broadcast_to(out.shape)]

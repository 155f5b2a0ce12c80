"""Convolution, pooling and resampling: each element from a window of the input."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import (
    Planes,
    TaintedCall,
    any_over,
    everywhere,
    rerun,
    same_image,
)


def convolution(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint each place by its window over all channels; known zeros count as the edges."""
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

    found = reached((live if bool(taint(weight).any()) else taint(t) & live).expand(t.shape))
    if bias is not None and bool(taint(bias).any()):
        found = torch.ones_like(found)
    found = found.broadcast_to(call.results[0].shape)
    if taint is not call.unknown and call.real_results:  # places beyond the real size stay padding
        found = found | call.beyond(found.shape, call.real_results[0])
    return [found]


def rerun_alike(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Run the operation on NaN if the images and those that result have an unchanged size; others
    are tainted everywhere."""
    sizes = [shape[2:] for shape in call.real_results[:1]]
    same = same_image(call, call.args[0]) and sizes == [call.results[0].shape[2:]]
    return (rerun if same else everywhere)(call, taint)


def resampled(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint by window if each place still comes from the same places of the input, else all."""
    t = call.args[0]
    if same_image(call, t):
        return rerun(call, taint)
    real = call.real(t)
    if real is None or not call.real_results or call.argument("align_corners", False):
        return everywhere(call, taint)
    pairs = [*zip(call.results[0].shape, t.shape, strict=True)][2:]
    pairs += [*zip(call.real_results[0], real, strict=True)][2:]
    times = [out // max(size, 1) for out, size in pairs]
    whole = all(out == n * size and n for n, (out, size) in zip(times, pairs, strict=True))
    half = len(times) // 2
    return (rerun if whole and times[:half] == times[half:] else everywhere)(call, taint)


def sampled(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `grid_sample` by image and by place of the grid."""
    t, grid = call.args[:2]
    if not same_image(call, t):
        return everywhere(call, taint)
    return [any_over(taint(t), range(2, t.dim())) | taint(grid).any(-1).unsqueeze(1)]


def gridded(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint `affine_grid` by matrix."""
    out = call.results[0]
    if not call.real_results or call.real_results[0][1:] != out.shape[1:]:
        return everywhere(call, taint)
    return rerun(call, taint)

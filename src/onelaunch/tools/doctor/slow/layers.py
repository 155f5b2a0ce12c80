"""Rules on the architecture: branches that could merge, channel counts, thin layers, launches."""

from __future__ import annotations

import torch

from onelaunch.finding import Finding
from onelaunch.tools.doctor.slow.machine import LAUNCH_US, LEAST_BYTES, WORTH, balance, busy_us
from onelaunch.tools.doctor.slow.products import Product, total
from onelaunch.tools.doctor.slow.record import Record, Sum, heaviest, named

_MULTIPLE = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 8, torch.int8: 32}
_IMAGE = 4
"""Channels of an image, which nobody chooses."""
_LEAST_SHARE = 0.05
_FAR_BELOW = 10
_LARGE_SHARE = 0.3
_MANY = 100


def parallel_branches(record: Record) -> list[Finding]:
    """OL610: convolutions of the same input, with added results."""
    whole = [s for s in record.sums if all(value.reads == 1 for value in s.links)]
    outermost = [s for s in whole if not any(_inside(s, other) for other in whole)]
    if not outermost:
        return []
    largest = max(outermost, key=lambda s: total(s.branches))
    names = " + ".join(f"`{p.path}`" for p in largest.branches)
    more = f", and {len(outermost) - 1} more such sums" if len(outermost) > 1 else ""
    what = f"{names} of one input are one convolution{more}"
    return [largest.spot.finding("OL610", what, None, "run")]


def odd_channels(record: Record) -> list[Finding]:
    """OL611: channel counts by which tensor cores are not filled."""
    least = max(WORTH, _LEAST_SHARE * total(record.products))
    odd: dict[tuple[str, int], list[Product]] = {}
    for product in record.products:
        if _is_odd(product):
            odd.setdefault((product.spot.file, product.spot.line), []).append(product)
    heavy = [p for products in odd.values() if total(products) >= least for p in products]
    if not heavy:
        return []
    largest = max(heavy, key=lambda p: p.flops)
    multiple = _MULTIPLE[largest.dtype]
    names = named([p.path for p in heavy], "layers")
    what = f"channels that are no multiple of {multiple}: {names}, {_widths(largest)}"
    return [heaviest(heavy).finding("OL611", what, None, "run")]


def thin_layers(record: Record) -> list[Finding]:
    """OL613: layers that move many bytes for little arithmetic, where they are much of the call."""
    thin = [p for p in record.products if _is_thin(p)]
    thin_us = sum(busy_us(p.flops, p.moved, p.dtype) for p in thin)
    if not thin or thin_us < _LARGE_SHARE * record.launches.busy_us:
        return []
    flops, moved = total(thin), sum(p.moved for p in thin)
    share = thin_us / record.launches.busy_us
    what = (
        f"{flops / moved:.2g} operations per byte in {named([p.path for p in thin], 'layers')}, "
        f"{share:.0%} of the call; an A100 could do {balance(thin[0].dtype):.0f}"
    )
    return [heaviest(thin).finding("OL613", what, None, "run")]


def many_tiny_kernels(record: Record) -> list[Finding]:
    """OL614: many operations that take less time than their launches."""
    launches = record.launches
    host_us = launches.count * LAUNCH_US
    if launches.count < _MANY or launches.busy_us >= host_us:
        return []
    spot, here = max(launches.at.values(), key=lambda place: place[1])
    what = (
        f"{launches.count} operations ({here} of them here), a launch each: about "
        f"{host_us / 1e3:.1f} ms of launches for {launches.busy_us / 1e3:.2g} ms of work on an "
        "A100; as a graph they are one launch"
    )
    return [spot.finding("OL614", what, None, "run")]


def _inside(inner: Sum, outer: Sum) -> bool:
    return inner is not outer and set(inner.branches) < set(outer.branches)


def _is_odd(product: Product) -> bool:
    multiple = _MULTIPLE.get(product.dtype)
    if multiple is None or not product.fixed:
        return False
    if product.window is not None and product.window.groups != 1:
        return False
    widths = (product.inputs, product.outputs)
    return any(width > _IMAGE and width % multiple for width in widths)


def _widths(product: Product) -> str:
    return f"{product.inputs} to {product.outputs}"


def _is_thin(product: Product) -> bool:
    return (
        product.fixed
        and product.moved >= LEAST_BYTES
        and product.weighs < product.moved / 2
        and product.intensity < balance(product.dtype) / _FAR_BELOW
    )

"""Rules on settings: one line at the start of a program changes each."""

from __future__ import annotations

import torch

from onelaunch.finding import Finding
from onelaunch.tools.doctor.slow.machine import WORTH, has_half, has_tf32
from onelaunch.tools.doctor.slow.products import Product, total
from onelaunch.tools.doctor.slow.record import Record, heaviest, named

_MOST = 0.5
_MUCH = 0.1


def float32(record: Record) -> list[Finding]:
    """OL603: most of the arithmetic is in float32."""
    wide = [p for p in record.products if p.dtype == torch.float32]
    if not has_half(record.device) or not _much(wide, record, share=_MOST):
        return []
    what = f"float32 for {_share(wide, record)} of the arithmetic ({_flops(record)} a call)"
    return [heaviest(wide).finding("OL603", what, None, "run")]


def tf32_off(record: Record) -> list[Finding]:
    """OL604: products in float32 that may not use TF32."""
    wide = [p for p in record.products if p.dtype == torch.float32 and not p.tf32]
    if not has_tf32(record.device) or not _much(wide, record):
        return []
    fixes: list[str] = []
    if _much([p for p in wide if p.kind != "convolution"], record):
        fixes.append('torch.set_float32_matmul_precision("high")')
    if _much([p for p in wide if p.kind == "convolution"], record):
        fixes.append("torch.backends.cudnn.allow_tf32 = True")
    share = _share(wide, record)
    what = f"float32 without TF32 for {share} of the arithmetic ({_flops(record)} a call)"
    return [heaviest(wide).finding("OL604", what, "; ".join(fixes) or None, "run")]


def cudnn_benchmark_off(record: Record) -> list[Finding]:
    """OL605: convolutions by the algorithm that cuDNN guesses."""
    guessed = [p for p in record.products if p.tuned is False]
    if not _much(guessed, record):
        return []
    names = named([p.path for p in guessed], "convolutions")
    what = f"`torch.backends.cudnn.benchmark` is off for {names}"
    return [heaviest(guessed).finding("OL605", what, None, "run")]


def contiguous_convolution(record: Record) -> list[Finding]:
    """OL606: convolutions whose channels are not last in memory."""
    contiguous = [p for p in record.products if p.channels_last is False]
    if not _much(contiguous, record):
        return []
    names = named([p.path for p in contiguous], "convolutions")
    what = f"contiguous layout where tensor cores want channels_last: {names}"
    return [heaviest(contiguous).finding("OL606", what, None, "run")]


def _much(products: list[Product], record: Record, share: float = _MUCH) -> bool:
    flops = total(products)
    return flops >= WORTH and flops >= share * total(record.products)


def _share(products: list[Product], record: Record) -> str:
    return f"{total(products) / total(record.products):.0%}"


def _flops(record: Record) -> str:
    return f"{total(record.products) / 1e9:.2g} GFLOP"

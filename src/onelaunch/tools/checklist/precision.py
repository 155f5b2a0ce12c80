"""Steps to fewer bits: 16-bit floats, and 8-bit ones by torchao."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import Change, NotPossible, Subject

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}
Kind = Literal["dynamic", "weight-only"]
_LEAST = 16  # smaller products have no kernel for 8 bits


def _cast(old: torch.dtype, new: torch.dtype) -> Change:
    def change(t: Tensor) -> Tensor:
        return t.to(new) if t.dtype == old else t

    return change


def _half(short: str, autocast: bool) -> Step:
    dtype = _SHORT[short]

    def take(subject: Subject) -> None:
        tensors = [t for t in subject.workload.tensors() if t.is_floating_point()]
        if not any(t.dtype == torch.float32 for t in tensors):
            raise NotPossible("nothing is in float32")
        if any(t.dtype == dtype for t in tensors):
            raise NotPossible(f"some of it is in {str(dtype).removeprefix('torch.')} already")
        subject.after.append(_cast(dtype, torch.float32))
        if autocast:
            subject.autocast = dtype
            return
        for root in subject.roots:
            root.to(dtype)
        subject.before.append(_cast(torch.float32, dtype))

    how = "autocast" if autocast else "cast"
    name = f"half:{short}" + ("-autocast" if autocast else "")
    title = f"{str(dtype).removeprefix('torch.')}, {how}"
    return Step(name, title, take, rounds=True, group="half")


def _eight_bits(prefix: Literal["int8", "fp8"], kind: Kind) -> Step:
    def take(subject: Subject) -> str:
        modules = subject.modules()
        linears = [m for m in modules if _fits(m)]
        count = sum(isinstance(m, nn.Linear) for m in modules)
        if not linears:
            raise NotPossible(f"it has no nn.Linear of {_LEAST} features or more")
        if importlib.util.find_spec("torchao") is None:
            raise NotPossible("torchao is not installed")
        if prefix == "fp8":
            _needs_fp8(subject.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about parts of torchao that are not used
            quantization: Any = importlib.import_module("torchao.quantization")
            config = getattr(quantization, _CONFIGS[prefix, kind])()
            for root in subject.roots:
                quantization.quantize_(root, config, filter_fn=_fits)
        return f"{len(linears)} of {count} linear layers"

    what = "weights and activations" if kind == "dynamic" else "weights"
    title = f"{what} in {'INT8' if prefix == 'int8' else 'FP8'}"
    return Step(f"{prefix}:{kind}", title, take, rounds=True, group="8 bits")


_CONFIGS = {
    ("int8", "dynamic"): "Int8DynamicActivationInt8WeightConfig",
    ("int8", "weight-only"): "Int8WeightOnlyConfig",
    ("fp8", "dynamic"): "Float8DynamicActivationFloat8WeightConfig",
    ("fp8", "weight-only"): "Float8WeightOnlyConfig",
}


def _fits(module: nn.Module, *_: Any) -> bool:
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
        return False
    return type(module.weight) is nn.Parameter and min(module.weight.shape) >= _LEAST


def _needs_fp8(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotPossible(f"it needs an NVIDIA GPU, and the callable is on {device.type}")
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise NotPossible("the GPU has no FP8: its compute capability is below 8.9")


HALF = tuple(_half(short, autocast) for short in _SHORT for autocast in (False, True))
INT8 = (_eight_bits("int8", "dynamic"), _eight_bits("int8", "weight-only"))
FP8 = (_eight_bits("fp8", "dynamic"), _eight_bits("fp8", "weight-only"))

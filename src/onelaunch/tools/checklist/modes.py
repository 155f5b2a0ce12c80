"""Steps that change no number of a model: its mode, its layout, the settings around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.call import tree
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import NotPossible, Setting, Subject

_C: Any = torch._C


def in_train_mode(modules: list[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if module.training]


def _eval(subject: Subject) -> str:
    modules = subject.modules()
    training = in_train_mode(modules)
    if not training:
        raise NotPossible("every module is in eval mode already")
    for root in subject.roots:
        root.eval()
    return f"{len(training)} of {len(modules)} modules were in train mode"


def _inference(subject: Subject) -> None:
    for root in () if subject.shared else subject.roots:
        root.requires_grad_(False)
    subject.inference = True


def _channels_last(subject: Subject) -> str:
    found = [m for m in subject.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    if not found:
        raise NotPossible("it has no 2-D convolution")
    inputs = tree.flatten((subject.workload.args, subject.workload.kwargs)).tensors
    for root in subject.roots:
        root.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if any(t.dim() == 4 and t.is_contiguous() for t in inputs):
        subject.before.append(_to_channels_last)
        subject.after.append(_to_contiguous)  # as the results were
    return f"{len(found)} 2-D convolution{'s' * (len(found) > 1)}"


def _to_channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _to_contiguous(t: Tensor) -> Tensor:
    return t.contiguous() if t.dim() == 4 else t


def _cudnn_benchmark(subject: Subject) -> None:
    _needs_cuda(subject)
    if torch.backends.cudnn.benchmark:
        raise NotPossible("it is on already")
    if not any(isinstance(m, nn.modules.conv._ConvNd) for m in subject.modules()):
        raise NotPossible("it has no convolution")
    setting = Setting(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark, True)
    subject.settings.append(setting)


def _tf32(subject: Subject) -> None:
    _needs_cuda(subject)
    if torch.cuda.get_device_capability(subject.device) < (8, 0):
        raise NotPossible("the GPU has no TF32: its compute capability is below 8.0")
    if not any(t.dtype == torch.float32 for t in subject.workload.tensors()):
        raise NotPossible("nothing is in float32")
    precision = torch.get_float32_matmul_precision
    if precision() != "highest" and _C._get_cudnn_allow_tf32():
        raise NotPossible("it is on already")
    if precision() == "highest":
        subject.settings.append(Setting(precision, torch.set_float32_matmul_precision, "high"))
    subject.settings.append(Setting(_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32, True))


def _needs_cuda(subject: Subject) -> None:
    if subject.device.type != "cuda":
        raise NotPossible(f"it needs an NVIDIA GPU, and the callable is on {subject.device.type}")


EVAL = Step("eval", "eval mode", _eval)
INFERENCE = Step(
    "inference-mode",
    "inference mode: no autograd",
    _inference,
    least_gain=-0.02,  # no noise may cost it: without it all others record for a backward
)
CHANNELS_LAST = Step("channels-last", "channels last in memory", _channels_last)
CUDNN_BENCHMARK = Step(
    "cudnn-benchmark", "cuDNN's fastest algorithms", _cudnn_benchmark, rounds=True
)
TF32 = Step("tf32", "TF32 for products of float32", _tf32, rounds=True)

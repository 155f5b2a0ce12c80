"""The registration of the emulated device with torch: once for the process, none at import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from onelaunch.driver.aten import operator
from onelaunch.testing import engine
from onelaunch.testing.arena import NAME, host
from onelaunch.testing.kernels import install_kernels
from onelaunch.testing.recorder import recording
from onelaunch.testing.tensors import TapeTensor, run_now
from onelaunch.testing.torch_module import Module
from onelaunch.uncompiled import once_imported

_C: Any = torch._C
_library: torch.library.Library | None = None


def register_device() -> None:
    """Register the device with torch; a second call does nothing."""
    global _library
    if _library is not None:
        return
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=Module(), device_guard=engine.Guard()
    )
    engine.install()
    # `torch.accelerator` takes what allocates a device's memory for an allocator of torch's, and
    # AOTInductor empties its cache. To say that there is none yet leaves it nothing to do.
    _C._accelerator_isAllocatorInitialized = lambda: False
    install_kernels()
    _library = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    for func in (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten._efficientzerotensor.default,
    ):
        _library.impl(func.name().removeprefix("aten::"), _factory(func), "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    _library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
    once_imported("torch._dynamo", _trace_with_dynamo)
    once_imported("torch._subclasses.fake_tensor", _fake_as_devices_are)


def _factory(func: torch._ops.OpOverload) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: run_now(
        operator(func), args, kwargs | {"device": torch.device(NAME)}
    )


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    # `torch.tensor(values, device="tape")` comes here: it hides its copy from modes and subclasses.
    recorder = recording()
    if recorder is not None and source.numel():
        raise recorder.note_refusal(
            "OL103", "A tensor was made from values of the host in a capture."
        )
    return run_now(operator(torch.ops.aten.copy_.default), (target, source), {})


def _local_scalar_dense(t: Tensor) -> Any:
    # `torch.tensor([t])` comes here: it hides its reads too.
    return host(t).item()


def _trace_with_dynamo() -> None:
    """Have Dynamo trace tensors of the device as it traces torch's own.

    Dynamo takes a tensor of a class of its own for an object that it cannot trace. To a program
    these are plain tensors of another device, as on CUDA.
    """
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    infer = builder.infer_subclass_type
    for numpy in (False, True):
        kinds = builder.VariableBuilder._type_dispatch_impl(numpy)
        kinds[TapeTensor] = builder.VariableBuilder.wrap_tensor

    for package in ("onelaunch.testing", "onelaunch.driver"):  # the device itself, in Python
        importlib.import_module("torch._dynamo.trace_rules").add(package)

    def infer_subclass_type(value: object) -> Any:
        return None if type(value) is TapeTensor else infer(value)

    builder.infer_subclass_type = infer_subclass_type


def _fake_as_devices_are() -> None:
    """Have torch's fake tensors take the device for any other."""
    # Else `torch.tensor` makes a tensor of the device in earnest, where all are fake.
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes._is_privateuse1_backend_available = lambda: False

    # Fakes ask which kernel a convolution has, for the layout of its result: the CPU's, here.
    select, kinds_of_conv = _C._select_conv_backend, _C._ConvBackend

    def select_conv_backend(*args: Any, **kwargs: Any) -> Any:
        found = select(*args, **kwargs)
        return kinds_of_conv.Mkldnn if found == kinds_of_conv.Overrideable else found

    _C._select_conv_backend = select_conv_backend

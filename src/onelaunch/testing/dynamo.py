"""The emulated device's tensors in `torch.compile`.

Dynamo takes a tensor of a class of its own for an object that it cannot trace. To a program these
are plain tensors of another device, as on CUDA.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from onelaunch.testing.device import TapeTensor

_C: Any = torch._C


def trace_with_dynamo() -> None:
    """Have Dynamo trace tensors of the device as it traces torch's own. Imports it: 1 s."""
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    infer = builder.infer_subclass_type
    if getattr(infer, "of_tape", False):
        return
    for numpy in (False, True):
        kinds = builder.VariableBuilder._type_dispatch_impl(numpy)
        kinds[TapeTensor] = builder.VariableBuilder.wrap_tensor

    for package in ("onelaunch.testing", "onelaunch.driver"):  # the device itself, in Python
        importlib.import_module("torch._dynamo.trace_rules").add(package)

    def infer_subclass_type(value: object) -> Any:
        return None if type(value) is TapeTensor else infer(value)

    # Else `torch.tensor` makes a tensor of the device in earnest, where all are fake.
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes._is_privateuse1_backend_available = lambda: False

    # Fakes ask which kernel a convolution has, for the layout of its result: the CPU's, here.
    select, kinds_of_conv = _C._select_conv_backend, _C._ConvBackend

    def select_conv_backend(*args: Any, **kwargs: Any) -> Any:
        found = select(*args, **kwargs)
        return kinds_of_conv.Mkldnn if found == kinds_of_conv.Overrideable else found

    _C._select_conv_backend = select_conv_backend

    infer_subclass_type.of_tape = True  # pyright: ignore[reportFunctionMemberAccess]
    builder.infer_subclass_type = infer_subclass_type

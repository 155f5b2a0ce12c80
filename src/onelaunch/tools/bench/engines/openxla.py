"""OpenXLA, by torchax, which runs PyTorch's operators in JAX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from onelaunch.tools.bench.engines.engine import Built, absent
from onelaunch.tools.bench.engines.flat import Exported, FlatModule
from onelaunch.tools.bench.workload import Workload


def import_torchax() -> Any:
    """Import torchax with JAX, and leave the flags and decompositions of torch as they were."""
    from torch._decomp import global_decomposition_table as tables
    from torch._ops import OpOverloadPacket

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of 75% of a GPU
    known = OpOverloadPacket.__getattr__

    def overload(packet: OpOverloadPacket, name: str) -> Any:
        # torchax 0.0.13 lists the overloads for named tensors, which torch 2.13 has no more
        # (google/torchax#101).
        try:
            return known(packet, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return object()

    fast_path = torch.backends.mha.get_fastpath_enabled()
    with (
        mock.patch.object(OpOverloadPacket, "__getattr__", overload),
        mock.patch.dict(tables["post_autograd"]),
        # torchax takes the name of torch's device for others, which torch.compile then asks for.
        mock.patch.object(torch.utils, "rename_privateuse1_backend"),
        mock.patch.object(torch, "_register_device_module"),
    ):
        torchax = importlib.import_module("torchax.export")
    torch.backends.mha.set_fastpath_enabled(fast_path)
    return torchax


def xla_program(model: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Export `model`, turn it into a program of JAX, and compile that with XLA."""
    torchax = import_torchax()
    jax: Any = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)  # 64-bit integers and floats as they are
    if not torch.backends.cuda.matmul.allow_tf32:
        jax.config.update("jax_default_matmul_precision", "highest")
    flat = FlatModule(model, args, kwargs)
    with torch.no_grad():
        exported = torch.export.export(flat, tuple(flat.take(args, kwargs)))
        state, program = torchax.exported_program_to_jax(exported)
    compiled = jax.jit(program)

    def fast(*args: Any, **kwargs: Any) -> Any:
        given = tuple(jax.dlpack.from_dlpack(t) for t in flat.take(args, kwargs))
        return flat.give([torch.from_dlpack(array) for array in compiled(state, given)])

    return fast


_SET = ("jax_enable_x64", "jax_default_matmul_precision")
"""The settings of JAX that a program of ours changes."""


class OpenXLA(Exported):
    """The exported program in JAX, whose settings are as before in the end."""

    def build(self, workload: Workload) -> Built:
        jax: Any = importlib.import_module("jax")
        before = {name: getattr(jax.config, name) for name in _SET}

        def close() -> None:
            for name, value in before.items():
                jax.config.update(name, value)

        return replace(super().build(workload), close=close)


def _lacks(device: torch.device) -> str | None:
    if why := absent("torchax jax", "torchax", "jax"):
        return why
    if device.type == "cpu":
        return None
    jax: Any = importlib.import_module("jax")
    if device.type == "cuda" and any(d.platform == "gpu" for d in jax.devices()):
        return None
    return f"this jax has no {device.type} device: pip install 'jax[cuda13]'"


_IMPORTS = "import os\nfrom unittest import mock\n"
OPENXLA = OpenXLA("openxla", "OpenXLA", xla_program, _lacks, (import_torchax,), _IMPORTS)

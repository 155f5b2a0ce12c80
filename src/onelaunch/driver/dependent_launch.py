"""Programmatic dependent launch (PDL): kernels of Inductor's that start while the last one ends.

An instruction in each kernel waits for the kernel before it. Inductor's own code first loads what
the kernel before does not write, and a kernel that only fills memory never waits. A fill may end
before its forerunner has. The next kernel waits for the fill alone, and reads what the forerunner
still writes. So here every kernel waits before all else: once it has ended, so have all before it.
The order is that of the stream, also beside kernels that are launched as usual.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_OPTION = "triton.enable_pdl"
_LEAST_CAPABILITY = 9
"""Hopper's, the first with the instruction."""
_TAG = "onelaunch waits first"


@contextmanager
def used() -> Generator[None]:
    """Have Inductor write such kernels meanwhile, where the device and torch know of it and the
    user has not set the option. Whoever turned it on, kernels wait first, and Inductor's cache
    keeps them apart from others. One thread compiles at a time, as Dynamo holds a lock."""
    config: Any = importlib.import_module("torch._inductor.config")
    if not _is_known(config):
        yield
        return
    caches: Any = importlib.import_module("torch.compiler.config")
    kernel = _kernel()
    own = kernel._filter_pdl

    def filtered(self: Any, code: Any) -> None:
        own(self, code)
        if self._enable_pdl_codegen():
            lines = (n for n in code._lines if not isinstance(n, str) or self.GDC_WAIT not in n)
            code._lines = [self.GDC_WAIT, *lines]

    # A `patch` would leave the option as if the user had set it.
    is_set = "TORCHINDUCTOR_ENABLE_PDL" in os.environ or not config._is_default(_OPTION)
    undo = config._make_closure_patcher(**({} if is_set else {_OPTION: True}))()
    kernel._filter_pdl = filtered
    try:
        with caches.patch(cache_key_tag=f"{caches.cache_key_tag} {_TAG}"):
            yield
    finally:
        kernel._filter_pdl = own
        undo()


def _is_known(config: Any) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    names = ("_filter_pdl", "_enable_pdl_codegen", "GDC_WAIT")
    known = _OPTION in config._config and all(hasattr(_kernel(), name) for name in names)
    return known and torch.cuda.get_device_capability()[0] >= _LEAST_CAPABILITY


def _kernel() -> Any:
    module: Any = importlib.import_module("torch._inductor.codegen.triton")
    return module.TritonKernel

"""Programmatic dependent launch (PDL): kernels of Inductor's that start while the last one ends.
It is off unless the user turns it on: it gains little, and takes Inductor longer.

An instruction in each kernel waits for the kernel before it. Inductor's own code first loads what
the kernel before does not write, and a kernel that only fills memory never waits. A fill may end
before its forerunner has. The next kernel waits for the fill alone, and reads what the forerunner
still writes. So here every kernel waits before all else: once it has ended, so have all before it.
The order is that of the stream, also beside kernels that are launched as usual.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from onelaunch.driver.substitutes import replaced

_OPTION = "triton.enable_pdl"
_TAG = "onelaunch waits first"


@contextmanager
def waiting_first(options: Mapping[str, Any]) -> Generator[None]:
    """Have Inductor's kernels wait first, where the user turns PDL on. Inductor's cache keeps them
    apart from others. One thread compiles at a time, as Dynamo holds a lock. `options`: of the
    compilation, in place of Inductor's configuration."""
    config: Any = importlib.import_module("torch._inductor.config")
    exists = _OPTION in config._config
    if not exists or not options.get(_OPTION, config.triton.enable_pdl) or not _is_known():
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

    tag = f"{caches.cache_key_tag} {_TAG}"
    with replaced(kernel, _filter_pdl=filtered), caches.patch(cache_key_tag=tag):
        yield


def _is_known() -> bool:
    """Return whether torch has what is replaced here."""
    names = ("_filter_pdl", "_enable_pdl_codegen", "GDC_WAIT")
    return all(hasattr(_kernel(), name) for name in names)


def _kernel() -> Any:
    module: Any = importlib.import_module("torch._inductor.codegen.triton")
    return module.TritonKernel

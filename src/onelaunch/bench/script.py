"""A script that reproduces the row of an engine, without onelaunch."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace

from onelaunch.bench.engines.engine import Engine
from onelaunch.bench.engines.flat import IMPORTS, tensors_of
from onelaunch.bench.timers import BATCH_CALLS, BATCH_US, LEAST_CALLS
from onelaunch.bench.workload import Workload
from onelaunch.targets import located

SCRIPT = '''\
"""{title}, as `onelaunch compare {target}` runs it{without}.

It prints the median time of a call, and the relative error of its result against eager's.
"""

import gc
import statistics
import sys
import time
{head}


def relative_error(found, expected):
    """Compare two results: |found - expected| / |expected| over all tensors."""
    off = size = 0.0
    for mine, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        off += float((mine.to(wide) - theirs.to(wide)).abs().square().sum())
        size += float(theirs.to(wide).abs().square().sum())
    return (off / (size or 1.0)) ** 0.5


def median_us(call, synchronize):
    """Time batches of calls for {seconds:g} s, and take the median of the time of one."""
    call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    about_us = (time.perf_counter() - start) * 1e6
    calls = max({least}, min({most}, int({batch_us:g} / max(about_us, 1e-3))))
    samples = []
    gc.disable()
    end = time.monotonic() + {seconds:g}
    while len(samples) < 5 or time.monotonic() < end:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    gc.enable()
    return statistics.median(samples)


sys.path.insert(0, {root!r})
target = importlib.import_module({module!r}).{name}
model, args, *rest = target()
kwargs = rest[0] if rest else {{}}
with torch.no_grad():
    expected = copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
used = torch.cuda.is_available() and torch.cuda.is_initialized()
synchronize = torch.cuda.synchronize if used else lambda: None

{body}
'''


def script(engine: Engine, workload: Workload, target: str, seconds: float) -> str:
    """Write a Python script that builds and times `engine` on a target as `compare` does.

    Args:
        engine: what is to run.
        workload: what the target gave.
        target: ``path.py:name`` or ``module:name``.
        seconds: how long it times.

    Raises:
        ArgumentError: OL401: there is no such file.
    """
    code = engine.code(replace(workload, starred=True))
    head = code.head
    if "def tensors_of" not in head:
        head = f"{IMPORTS}{head}\n\n\n{inspect.getsource(tensors_of)}"
    root, module = located(target)
    call = "\n".join([*code.call.splitlines(), "return y"])
    body = "\n".join(
        [
            *code.setup.splitlines(),
            "def call():",
            *textwrap.indent(call, "    ").splitlines(),
            "for _ in range(4):",
            "    found = call()",
            'print(f"relative error {relative_error(found, expected):.1e} against eager")',
            'print(f"median {median_us(call, synchronize):.2f} us per call")',
        ]
    )
    if code.mode != "grad":
        body = f"with torch.{code.mode}():\n{textwrap.indent(body, '    ')}"
    return SCRIPT.format(
        title=engine.title,
        target=target,
        without="" if "onelaunch" in code.head else ", without onelaunch",
        root=str(root),
        module=module,
        name=target.rpartition(":")[2],
        head=head.strip(),
        seconds=seconds,
        least=LEAST_CALLS,
        most=BATCH_CALLS,
        batch_us=BATCH_US,
        body=body,
    )

"""The options of `graph`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from onelaunch.errors import ArgumentError
from onelaunch.runtime.pool import Pool
from onelaunch.sizes.buckets import Buckets, positive

Outputs = Literal["fresh", "static"]
Inputs = Literal["copy", "rebind"]
Gradients = Literal["autograd", "direct"]
OnMismatch = Literal["record", "raise"]
OnRefusal = Literal["raise", "eager", "split"]
CaptureWhen = Literal["call", "background"]


class GraphOptions(TypedDict, total=False):
    """The options of `graph`, as they are given; `Options` has their defaults."""

    warmup: int
    outputs: Outputs
    inputs: Inputs
    gradients: Gradients
    capturable: bool
    compile: bool | str
    parallel: bool | Literal["auto"]
    capture: CaptureWhen
    pool: Pool | None
    max_recordings: int
    max_in_flight: int
    on_mismatch: OnMismatch
    on_refusal: OnRefusal
    buckets: Buckets | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `graph`, checked, without the pool, which is no setting."""

    warmup: int = 3
    outputs: Outputs = "fresh"
    inputs: Inputs = "copy"
    gradients: Gradients = "autograd"
    capturable: bool = False
    compile: bool | str = False
    parallel: bool | Literal["auto"] = False
    capture: CaptureWhen = "call"
    max_recordings: int = 64
    max_in_flight: int = 4
    on_mismatch: OnMismatch = "record"
    on_refusal: OnRefusal = "raise"
    buckets: Buckets | None = None

    def __post_init__(self) -> None:
        _one_of("outputs", self.outputs, ("fresh", "static"))
        _one_of("inputs", self.inputs, ("copy", "rebind"))
        _one_of("gradients", self.gradients, ("autograd", "direct"))
        _one_of("on_mismatch", self.on_mismatch, ("record", "raise"))
        _one_of("on_refusal", self.on_refusal, ("raise", "eager", "split"))
        _one_of("capturable", self.capturable, (False, True, "auto"))
        _one_of("parallel", self.parallel, (False, True, "auto"))
        _one_of("capture", self.capture, ("call", "background"))
        _one_of("compile", self.compile, (False, True, "default", "max-autotune", "later"))
        if self.compile == "later":
            for name, allowed in (("buckets", None), ("capture", "call")):
                if getattr(self, name) != allowed:
                    what = f'compile="later" with {name}={getattr(self, name)!r}'
                    raise ArgumentError("OL401", what, fix="compile=True")
        if not (self.buckets is None or isinstance(self.buckets, Buckets)):
            fix = "buckets=ol.Buckets(dim=0, sizes=(1, 4, 16))"
            raise ArgumentError("OL401", f"buckets={self.buckets!r}", fix=fix)
        if self.buckets is not None and self.outputs == "static":
            fix = 'outputs="fresh", or no buckets: the captured buffers have the bucket\'s size'
            raise ArgumentError("OL401", 'outputs="static" with buckets', fix=fix)
        if self.on_refusal == "split" and self.unsplit is not None:
            name, fix = self.unsplit
            what = f'on_refusal="split" with {name}={getattr(self, name)!r}'
            raise ArgumentError("OL401", what, fix=fix)
        for name in ("warmup", "max_recordings", "max_in_flight"):
            positive(name, getattr(self, name))

    @property
    def unsplit(self) -> tuple[str, str] | None:
        """The name of an option that ``on_refusal="split"`` does not go with, and the fix."""
        if self.compile == "later":
            return "compile", "compile=True: each piece is compiled"
        settings = ((name, fix) for name, allowed, fix in _SPLIT if getattr(self, name) != allowed)
        return next(settings, None)

    @property
    def enough_warmups(self) -> int:
        """The number of calls of a signature that warm up."""
        # With Inductor, the first call is watched in eager, and the second compiles.
        return max(self.warmup, 3 if self.compile else 1)


_SPLIT = (
    ("buckets", None, "graph the children that take a batch, each with buckets of its own"),
    ("outputs", "fresh", 'outputs="fresh": a piece may not overwrite what another returned'),
    ("capture", "call", 'capture="call": each piece is captured in the call that needs it'),
    ("on_mismatch", "record", 'on_mismatch="record": pieces get what the module makes of a call'),
)
"""(name, value, fix of another value) of the options that ``on_refusal="split"`` asks for."""


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if not any(value is a or (type(value) is str and value == a) for a in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ArgumentError("OL401", f"{name}={value!r}", fix=f"{name} is one of {choices}")

"""Optimizers that step inside a callable: making them capturable, and refusing the others."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from traceback import walk_stack
from types import CodeType
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from onelaunch.beside import listed
from onelaunch.call_events import unwatched
from onelaunch.driver.refusals import error_here
from onelaunch.errors import ArgumentError, CaptureError, describe_type
from onelaunch.source import loaded_at
from onelaunch.watch.ledger import Ledger

Stepper = TypeVar("Stepper", bound=Optimizer)

_OUTSIDE = "graph the forward and backward, and call `optimizer.step()` after it"
_NEVER: dict[str, tuple[str, str]] = {
    "LBFGS": (
        "evaluates its closure as often as a line search on the host decides",
        "graph the closure instead, once before the loop, and hand it the batch: "
        "`closure = ol.graph(closure)`, then `optimizer.step(lambda: closure(x, y))`",
    ),
    "SparseAdam": (
        "takes sparse gradients, whose sizes depend on data",
        "dense gradients (`sparse=False`) and `torch.optim.Adam(..., fused=True)`",
    ),
    "Adafactor": ("counts its steps on the host", _OUTSIDE),
}
"""Optimizers of torch that no option makes capturable -> the reason, and the code to write."""

_READS_STEPS = ("Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "Adagrad")
"""Optimizers that compute with the number of their steps, by default on the host."""

_FUSED = ("Adam", "AdamW", "Adagrad")
"""Optimizers among them with a fused step, which keeps the number on the device. Adagrad's does not
on CUDA."""


def why_not(optimizer: Optimizer) -> tuple[str, str] | None:
    """Return why an optimizer's step cannot be captured, with the line to write; or None. Knows the
    optimizers of torch. For others the capture itself shows it."""
    kind = type(optimizer).__name__
    if not is_of_torch(optimizer):
        return None
    return next(filter(None, (_why_not(kind, group) for group in optimizer.param_groups)), None)


def _why_not(kind: str, group: dict[str, Any]) -> tuple[str, str] | None:
    if kind in _NEVER:
        what, fix = _NEVER[kind]
        return f"torch.optim.{kind} {what}", fix
    host = all(p.device.type == "cpu" for p in group["params"])
    if group.get("fused") or (group.get("capturable") and not host):
        return None
    if kind == "SGD" and isinstance(group["lr"], Tensor):
        fix = "torch.optim.SGD(..., fused=True), or a number: it may change at each call"
        return "torch.optim.SGD reads a learning rate that is a tensor on the host", fix
    if kind in _READS_STEPS or ("capturable" in group and not host):
        return f"torch.optim.{kind} counts its steps on the host", _line(kind, group)
    return None


def _line(kind: str, group: dict[str, Any]) -> str:
    option = _option(kind, group)
    if option is None:
        if _is_complex(group):
            return f"with complex parameters, {_OUTSIDE}"
        place = "CUDA" if any(p.is_cuda for p in group["params"]) else "a CPU"
        return f"on {place} {_OUTSIDE}, or take torch.optim.Adam(..., fused=True)"
    return (
        f"torch.optim.{kind}(..., {option}=True), or `ol.capturable(optimizer)` before the first "
        "call, or ol.graph(..., capturable=True), which does that"
    )


def _option(kind: str, group: dict[str, Any]) -> Literal["capturable", "fused"] | None:
    """Return the option with which a group of an optimizer that counts can be captured."""
    where = {p.device.type for p in group["params"]}
    if "capturable" in group and not where <= {"cpu"}:
        return "capturable"
    fuses = kind in _FUSED and not (kind == "Adagrad" and "cuda" in where)
    return "fused" if fuses and not (_is_complex(group) or group.get("differentiable")) else None


def _is_complex(group: dict[str, Any]) -> bool:
    """Return whether a group has complex parameters, which no fused step takes."""
    return any(p.is_complex() for p in group["params"])


def refusal(optimizer: Optimizer) -> CaptureError | None:
    """Return the error for an optimizer that is about to step in a callable; None if it may."""
    reason = why_not(optimizer)
    if reason is not None:
        return error_here("OL120", reason[0], fix=reason[1])
    if _is_scaled(optimizer):
        kind = type(optimizer).__name__
        fix = f"torch.optim.{kind}(..., fused=True)"
        if "fused" not in optimizer.defaults:
            fix = "call `scaler.step(optimizer)` after the callable"
        return error_here("OL121", f"GradScaler.step with torch.optim.{kind}", fix=fix)
    return None


def _is_scaled(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler steps this optimizer, after a decision on the host."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    step = torch.amp.GradScaler._maybe_opt_step.__code__
    return any(frame.f_code is step for frame, _ in walk_stack(sys._getframe(1)))


StepHook = Callable[[Optimizer], None]


@contextmanager
def watching_steps(before: StepHook, after: StepHook | None = None) -> Generator[None]:
    """Call `before` and `after` around every optimizer step of this thread and of its backwards. A
    hook on a parameter may step an optimizer in a thread of autograd."""
    watch = object()

    def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if watch in _watches():
            before(optimizer)

    def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if after is not None and watch in _watches():
            after(optimizer)

    with unwatched():  # torch's registry is no state of the callable
        handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]
    try:
        with _among_watches(watch):
            yield
    finally:
        with unwatched():
            for handle in handles:
                handle.remove()


_outlasting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were seen to outlive a call, though the call's state does not lead to them."""


def outlasting(passing: Iterable[weakref.ref[Optimizer]]) -> list[Optimizer]:
    """Return the optimizers of `passing` that outlive a finished run, which stepped them. An
    optimizer is in a cycle with itself, so freeing a dropped one takes a collection: 0.1 s."""
    gc.collect()
    alive = [optimizer for optimizer in (ref() for ref in passing) if optimizer is not None]
    _outlasting.update(alive)
    return alive


def lasting(reached: Collection[int]) -> Callable[[Optimizer], bool]:
    """Return a function: whether an optimizer outlives the call, as far as known before. `reached`:
    ids of the optimizers that the call reaches."""
    return lambda optimizer: id(optimizer) in reached or optimizer in _outlasting


def noting_steps(ledger: Ledger) -> AbstractContextManager[None]:
    """Note in a run's ledger the steps of optimizers that outlive the run."""
    lasts = lasting(ledger.optimizers)

    def before(optimizer: Optimizer) -> None:
        ledger.origins.steps += lasts(optimizer)

    def after(optimizer: Optimizer) -> None:
        ledger.origins.steps -= lasts(optimizer)

    return watching_steps(before, after)


_WATCHES = "onelaunch.optimizers.capturable.watching_steps"


_forget: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)

_kept: list[list[object]] = []
"""The watches of every thread, each twice, where torch has no `_forget`. Some releases take no
reference to an object that they keep for a thread, and drop one as the thread ends."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.watches: list[object] = []


_of_thread = _OfThread()


def _watches() -> Sequence[object]:
    """Return the watches of this thread, or of the thread whose backward it runs. Autograd copies a
    thread's modes, and objects under such a name, into its own threads."""
    kept = torch._C._is_key_in_tls(_WATCHES)
    return torch._C._get_obj_in_tls(_WATCHES) if kept else _of_thread.watches


@contextmanager
def _among_watches(watch: object) -> Generator[None]:
    """Add a watch to those of this thread, which is not the engine's, during the context."""
    own = _of_thread.watches
    # Torch drops what it keeps for a thread after Python has ended the thread, and aborts if the
    # process ends just then. So does a backward in a thread, without us, if there is no `_forget`.
    if torch.is_grad_enabled() and not torch._C._is_key_in_tls(_WATCHES):
        if _forget is None:
            _kept.extend((own, own))
        torch._C._stash_obj_in_tls(_WATCHES, own)
    try:
        with listed(own, watch):
            yield
    finally:
        if not own and _forget is not None:
            _forget(_WATCHES)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, of Python or NumPy, and no flag."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def settle(optimizer: Optimizer) -> None:
    """Silence torch's warning that a capturable optimizer steps uncaptured, as in a warm-up."""
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True


class StepOptions:
    """The options of optimizers that are constants of a recording, watched for changes. `patched`:
    (id of a group, key) of numbers that each call reads."""

    def __init__(
        self, optimizers: Sequence[Optimizer], patched: Collection[tuple[int, object]]
    ) -> None:
        self._groups = [(type(o).__name__, group) for o in optimizers for group in o.param_groups]
        self._patched = patched
        self._values = self._read()
        self._changes = 0

    def _read(self) -> dict[tuple[int, str, str], object]:
        return {
            (id(group), key, kind): value.item() if isinstance(value, Tensor) else value
            for kind, group in self._groups
            for key, value in group.items()
            if (id(group), key) not in self._patched and _is_option(value, group)
        }

    def restless(self, codes: Iterable[CodeType]) -> CaptureError | None:
        """Return the refusal of an option that changed in two calls in a row, or None. Call it at
        each call that no recording fits. `codes`, the callable's, may read the option itself."""
        now = self._read()
        changed = [place for place, value in now.items() if self._values.get(place) != value]
        self._values = now
        self._changes = self._changes + 1 if changed else 0
        if self._changes < 2:
            return None
        at, key, kind = changed[0]
        value = next(group.get(key) for _, group in self._groups if id(group) == at)
        if isinstance(value, Tensor):
            what = f"`{key}` of {kind} is a tensor on the host that changes"
            return CaptureError("OL123", what, fix=_ON_THE_DEVICE)
        read = loaded_at(codes, key, item=True)
        fix = None if read is None else _READ_OUTSIDE.format(key=key)
        return CaptureError("OL123", f"`{key}` of {kind} changes", where=read, fix=fix)


_ON_THE_DEVICE = (
    "keep it on the device, where each call reads it: `ol.capturable(optimizer)` before the first "
    "call moves it there; or make it a number, `lr=0.1`"
)

_READ_OUTSIDE = (
    "read it after the call, `optimizer.param_groups[0]['{key}']`: a number that only the step "
    "reads may change"
)


def _is_option(value: object, group: dict[str, Any]) -> bool:
    """Return whether a recording holds the value of an option. The value is a number, or a number's
    tensor on the host, where the parameters are not."""
    if isinstance(value, Tensor):
        on_host = value.device.type == "cpu" and value.numel() == 1
        return on_host and any(p.device.type != "cpu" for p in group["params"])
    return is_real(value) or type(value) is tuple


def capturable(optimizer: Stepper) -> Stepper:
    """Make an optimizer of torch capturable, in place: its options, and its present state.

    On an accelerator every group gets `capturable=True` if it has the option (Adagrad has not, and
    is refused on CUDA). The state and a tensor learning rate move from the host to the parameters'
    device. On a CPU groups get `fused=True`. SGD, Muon, and optimizers that can be captured already
    stay as they are. The values of the state do not change. Later steps use the new options, whose
    results may differ in the last bits.

    Args:
        optimizer: with or without state.

    Returns:
        `optimizer` itself.

    Raises:
        CaptureError: OL120, no option makes this optimizer capturable.
        ArgumentError: OL401, not an optimizer.

    Example:
        >>> import torch, onelaunch as ol
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = ol.capturable(torch.optim.Adam(layer.parameters()))
        >>> optimizer.param_groups[0]["fused"]  # on a CPU
        True
    """
    if not isinstance(optimizer, Optimizer):
        what = f"expected an optimizer, got {describe_type(optimizer)}"
        raise ArgumentError("OL401", what, fix="ol.capturable(torch.optim.Adam(...))")
    kind = type(optimizer).__name__
    listed = is_of_torch(optimizer) or kind in _NEVER
    for group in optimizer.param_groups:  # first all of them: an error leaves it as it was
        refused = _why_not(kind, group) if listed else None
        if refused is not None and _option(kind, group) is None:
            raise CaptureError("OL120", refused[0], fix=refused[1])
    for group in optimizer.param_groups:
        _convert(optimizer, kind, group)
    settle(optimizer)
    return optimizer


def _convert(optimizer: Optimizer, kind: str, group: dict[str, Any]) -> None:
    option = _option(kind, group)
    if option == "fused" and not group.get("fused"):
        group["fused"], group["foreach"] = True, None
        optimizer.defaults.update(fused=True, foreach=None)
        vars(optimizer)["_step_supports_amp_scaling"] = kind != "Adagrad"
    elif option == "capturable":
        group["capturable"] = optimizer.defaults["capturable"] = True
    lr = group.get("lr")
    for p in group["params"]:
        if isinstance(lr, Tensor) and lr.device != p.device:
            group["lr"] = lr = lr.to(p.device)
        state = optimizer.state.get(p, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != p.device:
                state[key] = value.to(p.device)

"""The call path of a bucket whose proof rests on values, which each call checks.

The values are masks that the callable keeps, or numbers that hide padding. The recording has one
result more, which says whether the numbers suffice; see `taint/hidden.py`. The host waits for it,
and runs the call eagerly otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.errors import CaptureError
from onelaunch.padding.pad import Proof
from onelaunch.padding.taint.hidden import Hiding, HidingChecks
from onelaunch.replay.call_path import MISS, CallPath

SCORES = (
    "a score of `{}` is not far above the number that hides padding",
    'mask with float("-inf"); such calls run eagerly',
)
MASKS = (
    "a mask that `{}` keeps was changed in place since its bucket was recorded",
    "`reset()` after such a change, or pass the mask; such calls run eagerly",
)
"""The event, with a place for the name of the callable, and the code to write instead."""
_FIX = 'mask with float("-inf"), which needs no check'


def refuse_unchecked(proof: Proof, compiled: bool) -> None:
    """Refuse a proof that rests on numbers that hide padding, where no call can check them.

    Raises:
        CaptureError: OL140.
    """
    assert proof.hiding is not None
    if not (compiled or proof.lasting):
        return
    what = f"a number, {proof.hiding.shown}, hides padding, as far as scores are above it"
    why = f"a call where they are not would run again, and it {proof.lasting}"
    why = "no operation of compiled code can be checked" if compiled else why
    raise CaptureError("OL140", what, why=why, fix=_FIX)


class CheckedRun:
    """A callable for a capture: it returns its result and a 0-dim bool, whether the numbers
    suffice."""

    def __init__(self, fn: Callable[..., Any], hiding: Hiding, device: torch.device) -> None:
        self._fn, self._hiding, self._device = fn, hiding, device

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        with HidingChecks(self._hiding) as checks:
            result = self._fn(*args, **kwargs)
            holds = checks.outcome(self._device)
        if not checks.complete:
            what = f"a number, {self._hiding.shown}, hides padding by other operations than in the"
            raise CaptureError("OL140", f"{what} runs of the proof", fix=_FIX)
        return result, holds


class SteadyCall:
    """The call path where a proof took masks of the callable for constants. A call runs eagerly
    after a mask was changed in place.

    Args:
        call: the path of other calls.
        eager: the callable.
        note: called before an eager run.
    """

    def __init__(
        self,
        call: CallPath,
        masks: Sequence[Tensor],
        eager: Callable[..., Any],
        note: Callable[[], None],
    ) -> None:
        self._call, self._eager, self._note = call, eager, note
        normal = [t for t in masks if not t.is_inference()]  # others have no version
        self._masks = [(t, t._version, t.detach().clone()) for t in normal]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for number, (t, version, values) in enumerate(self._masks):
            if t._version != version:
                if not torch.equal(t, values):
                    self._note()
                    return self._eager(*args, **kwargs)
                self._masks[number] = (t, t._version, values)
        return self._call(args, kwargs)


@dataclass(slots=True, eq=False)
class CheckedCall:
    """The call path: it replays, waits for the check, and runs eagerly where that fails.

    Args:
        call: returns the result and the check.
        eager: the callable.
        note: called before an eager run.
    """

    call: CallPath
    eager: Callable[..., Any]
    note: Callable[[], None]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self.call(args, kwargs)
        if found is MISS:
            return MISS
        result, holds = found
        if bool(holds):
            return result
        self.note()
        return self.eager(*args, **kwargs)

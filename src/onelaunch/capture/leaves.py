"""Leaves of autograd graphs in a capture: what a callable may not do with them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from onelaunch.capture.io_plan import Inputs
from onelaunch.driver.protocol import Travel
from onelaunch.errors import CaptureError
from onelaunch.source import user_frame


class BackwardInside(Exception):
    """The callable ran a backward itself, or made a leaf for one."""


@contextmanager
def leaves_refused() -> Generator[None]:
    """Refuse an in-place operation that autograd forbids in a capture alone, on a stand-in.
    Stand-ins for arguments and parameters are leaves, where eager may have none.

    Raises:
        CaptureError: OL113.
    """
    try:
        yield
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        place = user_frame(error.__traceback__)
        what = "a tensor that requires grad is changed in place"
        raise CaptureError("OL113", what, where=place) from error


def refuse_leaves_of_host(plan: Inputs) -> None:
    """Refuse arguments that require grad and are copied to the device.

    Raises:
        CaptureError: OL103.
    """
    for t, spec, how in zip(plan.tensors, plan.specs, plan.travels, strict=True):
        if how == Travel.FILL and t.requires_grad:
            fix = "keep it on the device, `torch.tensor(0.5, device=x.device, requires_grad=True)`"
            what = f"an argument, {spec}, is copied to the device, and its gradient back"
            raise CaptureError("OL103", what, fix=fix)

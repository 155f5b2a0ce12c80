"""The refusals to graph the gradients of a signature (OL303), each with a fix."""

from __future__ import annotations

from onelaunch.errors import CaptureError
from onelaunch.source import user_line


def backward_inside() -> CaptureError:
    """Return the refusal of a callable that runs a backward and has results that require grad."""
    return CaptureError(
        "OL303",
        "a backward runs inside, or a leaf is made for one, and the results require grad",
        where=user_line(),
        why="a callable that runs its own backward is captured as one step, whose results have no "
        "backward left for the caller",
        fix="where the caller runs no backward over a result, return it as `y.detach()`; where it "
        "does, graph two callables: the step, and the forward that gives the result",
    )


def grad_in_no_grad() -> CaptureError:
    """Return the refusal of a callable that enables grad mode for itself."""
    return CaptureError(
        "OL303",
        "results require grad in no_grad mode",
        where=user_line(),
        why="the callable turns grad mode on for itself, where its caller has it off",
        fix="call it outside of torch.no_grad(), or return `y.detach()` where no backward follows",
    )

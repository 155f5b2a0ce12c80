"""Refusals: of gradients (OL303), of a pool that is too small (OL304), and an advice for any."""

from __future__ import annotations

from torch import nn

from onelaunch.errors import CaptureError
from onelaunch.runtime.attempt import Attempt
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager
from onelaunch.source import user_line


def backward_inside(kept: tuple[str, str | None] | None = None) -> CaptureError:
    """Return the refusal of a callable with a backward inside and results that require grad.

    Args:
        kept: (slot with a tensor that requires grad, line that made the tensor), unless it is a
            result.
    """
    if kept is not None:
        name, line = kept
        return CaptureError(
            "OL303",
            f"a backward runs inside, and `{name}` keeps a tensor with its graph",
            where=line or user_line(),
            why="a callable that runs its own backward is captured as one step, which leaves no "
            "graph for a backward of a later call",
            fix=f"keep it without its graph: `{name.rpartition('.')[2]} = value.detach()`",
        )
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


def no_room(name: str, attempt: Attempt, pool: PoolManager) -> CaptureError:
    """Return the refusal of a recording that does not fit into the pool."""
    need = attempt.signature.need_bytes
    foreseen = f"{need} bytes are foreseen" if need else "what it needs was not foreseen"
    what = f"`{name}`, called with {attempt.spec}: {foreseen}"
    return CaptureError("OL304", f"{what}, and the pool has max_bytes={pool.max_bytes}")


def offer_split(error: CaptureError, root: object, options: Options) -> None:
    """Add to the refusal of a module the way to run it in pieces.

    Args:
        root: the module, if the callable is one.
    """
    if not isinstance(root, nn.Module) or next(root.children(), None) is None:
        return
    if options.on_refusal == "split":
        error.fix += "; or call the module, whose pieces are captured as it runs"
    elif error.code in _OF_ONE_MODULE and options.fit_split:
        error.fix += (
            '; or `ol.graph(..., on_refusal="split")`: the module that holds this line runs as it '
            "is, and the modules that it calls are graphed"
        )


_OF_ONE_MODULE = frozenset({"OL101", "OL102", "OL103", "OL104", "OL105", "OL108", "OL109"})
"""Refusals of a single module: its children can be captured without it."""

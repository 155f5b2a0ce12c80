"""One recorded call: its step, and what becomes of its fresh results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, Step, copy_bits, leaves, mapped, tensors

Take = Callable[[Tensor], object]
"""What becomes of a result."""

_ASK_GRAD_MODE = frozenset({"aten::mkldnn_rnn_layer"})
"""Operators whose kernel gives a workspace for the backward in grad mode alone. A checkpoint runs
its forward in grad mode inside of a backward, which is not."""


class Call:
    """A call of a recording, at fixed addresses.

    Args:
        op, args, kwargs: what is called, with tensors that nobody else has.
        targets: the memory of each fresh result, by its number among the results; only of those
            that are copied there, later.

    Attributes:
        position: of its step among those of the recording.
        takes: what becomes of each fresh result.
        copies: whether its step hands them to those, and does not write them where they belong.
    """

    def __init__(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: dict[int, Tensor],
    ) -> None:
        self.position = 0
        self.targets = targets
        self.takes: dict[int, Take] = {
            i: functools.partial(copy_bits, target) for i, target in targets.items()
        }
        self.copies = bool(targets)
        self._op = op
        self._mode = torch.is_grad_enabled() if op.func._schema.name in _ASK_GRAD_MODE else None
        self._call = self._in_mode(op.bound)
        self._recorded = args, kwargs
        self._now = args, kwargs
        self._alone = False
        self._first: list[Step] = []

    def first_step(self, result: Any) -> Step:
        """The step, as quick as a trial allows, which is to give the bits of `result`."""
        results = tensors(result)
        self._alone = isinstance(result, Tensor)
        if self.targets and len(self.targets) == len(results):
            step = self._op.into(*self._recorded, list(self.targets.values()), results)
            if step is not None:
                self.copies = False
                return step
        return self.step()

    def step(self) -> Step:
        """The step that hands each fresh result to what takes it."""
        args, kwargs = self._now
        if not self.takes:
            return self._op.in_place(args, kwargs)
        self.copies = True
        call = functools.partial(self._call, *args, **kwargs)
        if self._alone and not self._first:
            return _taken_alone(call, self.takes[0])
        return functools.partial(_taken, self._first, call, list(self.takes.items()))

    def hand(self, takes: dict[int, Take], first: Sequence[Step]) -> Step:
        """The step in which these take what they are told to, instead of a copy of it, after the
        steps `first`."""
        self.takes |= takes
        self._first = list(first)
        self.targets = {i: t for i, t in self.targets.items() if i not in takes}
        self._call = self._in_mode(self._op.quickest(*self._recorded))
        return self.step()

    def _in_mode(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, in the grad mode of the capture if its kernel asks for it."""
        return call if self._mode is None else functools.partial(_called, self._mode, call)

    def numbers(self) -> list[float]:
        """The numbers among the arguments."""
        return [v for v in leaves(self._recorded) if type(v) is float]

    def turn(self, change: Callable[[Any], Any]) -> Step:
        """The step with each of its arguments changed, from what was recorded."""
        args, kwargs = self._recorded
        self._now = mapped(args, change), mapped(kwargs, change)
        return self.step()


def _called(mode: bool, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(mode):
        return call(*args, **kwargs)


def _taken_alone(call: Callable[[], Any], take: Take) -> Step:
    def step() -> None:
        take(call())

    return step


def _taken(
    first: Sequence[Step], call: Callable[[], Any], takes: Sequence[tuple[int, Take]]
) -> None:
    for step in first:
        step()
    results = tensors(call())
    for i, take in takes:
        take(results[i])


def adopting(target: Tensor, others: Sequence[Tensor]) -> Take:
    """Has tensors of a recording move to the memory of a result, at no copy.

    Args:
        target: what the result was in the capture.
        others: further tensors in its memory.
    """
    stride = target.stride()
    views = [(t, t.storage_offset(), tuple(t.shape), t.stride()) for t in others]

    def adopt(result: Tensor) -> None:
        if result.stride() != stride:
            result = _laid_out(result, stride)
        target.data = result
        if views:
            storage: Any = result.untyped_storage()
            for view, start, shape, strides in views:
                view.set_(storage, start, shape, strides)  # pyright: ignore

    return adopt


def giving(target: Tensor, given: dict[int, Tensor], number: int) -> Take:
    """Keeps results, laid out as `target` was in the capture, as number so and so of `given`."""
    stride = target.stride()

    def give(result: Tensor) -> None:
        given[number] = result if result.stride() == stride else _laid_out(result, stride)

    return give


def giving_too(target: Tensor, given: dict[int, Tensor], number: int) -> Take:
    """The same where later calls of the recording use the result: `target` moves there too."""
    stride = target.stride()

    def give(result: Tensor) -> None:
        if result.stride() != stride:
            result = _laid_out(result, stride)
        given[number] = target.data = result

    return give


def _laid_out(result: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`result` with other strides: a kernel that is chosen by address might give others."""
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device="cpu").copy_(result)

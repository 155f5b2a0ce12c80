"""Reads of a tensor by the host that no dispatcher sees: `tolist`, `numpy`, printing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from onelaunch.driver.refusals import BY_LIST, CHECKED, READS
from onelaunch.unwinding import FunctionMode


class UnnoticedMode(FunctionMode):
    """A function mode that `torch.overrides.has_torch_function` does not notice."""

    def __enter__(self) -> Self:
        _unnoticed.begin()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _unnoticed.end()


class HostReads(UnnoticedMode):
    """A mode that hands every such read to `refuse`; so too an index that is a list, of which torch
    makes a tensor on the device behind the dispatcher.

    Args:
        owns: tells whether a tensor's memory is the device's.
        refuse: raises; called with a code, the event, the tensor and the code to write instead.
        note: called with any other tensor that is read.
    """

    def __init__(
        self,
        owns: Callable[[Tensor], bool],
        refuse: Callable[[str, str, Tensor, str | None], object],
        note: Callable[[Tensor], object] = lambda t: None,
    ) -> None:
        super().__init__()
        self._owns = owns
        self._refuse = refuse
        self._note = note
        self.assigning = 0
        """Number of ``x[i] = number`` under way; torch makes a host tensor of the number."""
        self.calling: Any = None
        """The function of torch's that is under way, if it reads an argument inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = READS.get(func)
        if read is not None and isinstance(args[0], Tensor):
            if self._owns(args[0]):
                what = f"the host reads a tensor in a capture: {read}"
                self._refuse("OL101", what, args[0], None)
            self._note(args[0])
        if func in CHECKED:
            self.calling = func
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.calling = None
        indexes = func in (Tensor.__getitem__, Tensor.__setitem__) and is_by_list(args[1])
        if indexes and args[0].device.type != "cpu" and self._owns(args[0]):
            what = "an index that is a list is copied to the device"
            self._refuse("OL103", what, args[0], BY_LIST)
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            self.assigning += 1
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.assigning -= 1
        return func(*args, **(kwargs or {}))


def is_by_list(index: Any) -> bool:
    """Tell whether an index has a list of numbers in it; other lists stand for tuples."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list) and part and all(isinstance(i, int) for i in part) for part in parts
    )


class _Unnoticed:
    """A substitute for `torch.overrides.has_torch_function` that does not count `HostReads`.

    `nn.TransformerEncoder` and `nn.MultiheadAttention` ask it whether to take their fused
    operations, whose results are others, and to pack sequences, which zeroes what is masked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._asked = torch.overrides.has_torch_function

    def begin(self) -> None:
        with self._lock:
            self._active += 1
            if self._active == 1:
                self._asked = torch.overrides.has_torch_function
                torch.overrides.has_torch_function = self._answer

    def end(self) -> None:
        with self._lock:
            self._active -= 1
            if not self._active:
                torch.overrides.has_torch_function = self._asked

    def _answer(self, relevant_args: Any) -> bool:
        count = torch._C._len_torch_function_stack()
        if any(not _is_ours(torch._C._get_function_stack_at(i)) for i in range(count)):
            return self._asked(relevant_args)  # the callable has a mode of its own
        with _without_modes(count):
            return self._asked(relevant_args)


def _is_ours(mode: object) -> bool:
    return isinstance(mode, UnnoticedMode)


@contextmanager
def _without_modes(count: int) -> Generator[None]:
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


_unnoticed = _Unnoticed()

"""The rules on which operations a recording can hold.

Each operation is checked before it runs, at the user's line. Host values that every call brings to
the device alike are given a copy there; what a replay would freeze is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.call.spec import has_strides
from onelaunch.driver.aten import Operator
from onelaunch.driver.host_reads import HostReads
from onelaunch.driver.protocol import Driver
from onelaunch.driver.refusals import CHECKED, DRAWN, error_here, refusal
from onelaunch.watch.host_memory import HostMemory, named
from onelaunch.watch.lifted import Lifted, brought

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::copy")


class Admission:
    """The checks of one run's operations.

    Args:
        driver: the driver of `device`.
        device: the device of the recording.
        host: the host tensors of the run.
        reads: the host's reads of device memory.
        inputs: storage -> the end of the inputs in it.
        displaced: storages of inputs that stand for memory in the middle of one.
        lifted: the recording's copies of host values, if it may have any.
        read_on_host: notes that the host uses the values of a host tensor.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        host: HostMemory,
        reads: HostReads,
        *,
        inputs: Mapping[int, int],
        displaced: Collection[int],
        lifted: Lifted | None,
        read_on_host: Callable[[Tensor], None],
    ) -> None:
        self._storage = driver.storage
        self._kind = device.type
        self._host = host
        self._reads = reads
        self._inputs = inputs
        self._displaced = displaced
        self._lifted = lifted
        self._read_on_host = read_on_host
        self.wanted: set[int] = set()
        """Storages on the device whose values the host wanted."""
        self.draws: list[Callable[[], object]] = []
        """Draws from the host's default generator, which each call advances."""
        self.stepping: Optimizer | None = None
        """The optimizer that steps with stand-ins for its numbers."""
        self.unfollowed: list[Optimizer] = []
        """Optimizers that bring such a number to the device."""

    def check(
        self, op: Operator, tensors: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """Refuse what cannot be captured. Return the host tensors that are to be lifted."""
        func, name = op.func, op.base
        if name == "aten::as_strided":
            self._refuse_absolute(*args, **kwargs)
        device: list[Tensor] = []
        host: list[Tensor] = []
        for t in tensors:
            if not has_strides(t):
                kind = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"
                raise error_here("OL109", f"{readable(name)} on {kind}")
            there = self._on_device(t) or self._host.is_given_there(t)
            (device if there else host).append(t)
        if device or not tensors:
            found = refusal(func, args, kwargs)
            if found is not None:
                self.wanted.update(map(self._storage, device[:1]))
                what = found.what or f"{readable(name)} needs the value of {named(device[0])}"
                what, fix = CHECKED.get(self._reads.calling, (what, found.fix))
                raise error_here(found.code, what, fix=fix)
        target = kwargs.get("device")
        if device and not host and target is None:
            return []  # nearly all operations: nothing of them is on the host
        moves = (
            name in _COPIES
            and not self.is_number(args)
            and bool(
                (device and host)
                or (device and target is not None and self._holds_elsewhere(target))
                or (host and self._is_ours(target))
            )
        )
        lifted = self._liftable(name, args, kwargs)
        if moves and not lifted:
            what = f"{readable(name)} copies {named(tensors[-1])} across"
            raise error_here("OL103", what, fix=self._fix_of(tensors[-1]))
        if self._kind != "cpu" and not (device or self._is_ours(target)) and op.random:
            if kwargs.get("generator") is not None:
                raise error_here("OL104", f"{readable(name)} draws from a generator of the host's")
            self.draws.append(partial(func, *args, **kwargs))
        uses = bool(device) or (self._is_ours(target) and not _is_like(name))
        for t in host:
            if any(t is other for other in lifted):
                continue
            if uses and not t.dim() and self._is_fixed(t):
                continue  # kernels hold its value
            varying = self._host.varies(t)
            if uses and (varying or t.dim()):
                what = f"{readable(name)} uses a host tensor, {named(t)}, with device tensors"
                raise error_here("OL104", what, fix=self._fix_of(t))
            if varying and refusal(func, args, kwargs) is not None:
                self._read_on_host(t)
        return lifted

    def _fix_of(self, t: Tensor) -> str | None:
        """Return what to write for a host tensor, where more is known than that it is one."""
        return DRAWN if self._host.is_drawn(t) else None

    def _liftable(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the host tensors that an operation brings to the device, if each call brings the
        same values; these are part of what a call must match."""
        if self._lifted is None or (name == "aten::copy_" and self.is_number(args)):
            return []
        found = brought(name, args, kwargs, self._kind)
        return found if all(map(self._is_fixed, found)) else []

    def is_number(self, args: Sequence[Any]) -> bool:
        """Return whether a copy is ``x[0] = 5``: a 0-dim host constant, which a fill writes too."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return False
        target, source = args[:2]
        return (
            self._on_device(target)
            and not self._on_device(source)
            and source.dim() == 0
            and (self._host.is_constant(source) or self._reads.assigning > 0)
        )

    def _is_fixed(self, t: Tensor) -> bool:
        """Return whether each call has these values of a host tensor; they are compared from now
        on. Not the numbers of optimizers that step, which each call reads."""
        if self._lifted is None or (t.requires_grad and torch.is_grad_enabled()):
            return False
        if self.stepping is not None and t.is_floating_point():
            self.unfollowed.append(self.stepping)
            return False
        return self._host.fixes(t)

    def _refuse_absolute(
        self,
        t: Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int | None = None,
    ) -> None:
        """Refuse `as_strided` beyond the argument: a recording does not have the whole storage."""
        if not self._on_device(t) or self._storage(t) not in self._inputs:
            return
        if self._storage(t) in self._displaced:
            raise error_here("OL109", "as_strided on an argument that does not begin its storage")
        first = t.storage_offset() if storage_offset is None else storage_offset
        last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        stop = t.data_ptr() + (last + 1 - t.storage_offset()) * t.element_size()
        if 0 not in size and stop > self._inputs[self._storage(t)]:
            raise error_here("OL109", "as_strided reaches beyond the argument")

    def _is_ours(self, device: torch.device | str | None) -> bool:
        return device is not None and torch.device(device).type == self._kind

    def _holds_elsewhere(self, device: torch.device | str) -> bool:
        """Return whether tensors there have values, in other memory; `meta` holds none, and
        forward-mode gradients ask it for sizes."""
        return torch.device(device).type not in (self._kind, "meta")

    def _on_device(self, t: Tensor) -> bool:
        return t.device.type == self._kind


def _is_like(name: str) -> bool:
    """Return whether an operation makes a tensor of which an argument gives the layout alone."""
    return name.endswith("_like") or name.startswith("aten::new_")


def readable(name: str) -> str:
    """Return an operator's name as messages have it."""
    return f"`{name.removeprefix('aten::')}`"

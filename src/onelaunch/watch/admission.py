"""The rules on which operations a recording can hold.

Each operation is checked before it runs, at the user's line. Host values that are the same at each
call get a copy on the device; an operation that a replay would freeze is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.spec import has_strides, layout_of
from onelaunch.driver.host_reads import HostReads
from onelaunch.driver.protocol import Driver
from onelaunch.driver.refusals import CHECKED, DRAWN, drawn_after_all, error_here, refusal
from onelaunch.source import user_frame
from onelaunch.watch.device_constants import DeviceConstants, copied_to_device
from onelaunch.watch.device_memory import DeviceMemory
from onelaunch.watch.host_memory import HostTensors, named
from onelaunch.watch.operations import OpCall

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::copy")


@dataclass(slots=True, eq=False)
class Admission:
    """The checks of one run's operations.

    Args:
        driver: the driver of the recording's device.
        memory: the device memory of the run.
        host: the host tensors of the run.
        reads: the host's reads of device memory.
        displaced: storages of inputs that stand for memory in the middle of a storage.
        constants: the device's copies of host values, if the recording may have any.
        read_on_host: notes that the host uses the values of a host tensor.
    """

    _driver: Driver
    _memory: DeviceMemory
    _host: HostTensors
    _reads: HostReads
    _displaced: Collection[int]
    _constants: DeviceConstants | None
    _read_on_host: Callable[[Tensor], None]
    read_by_host: set[int] = field(default_factory=set[int])
    """Storages on the device whose values the host asked for."""
    draws: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """Draws from the host's default generator, which each call advances."""
    host_state: Tensor | None = None
    """The state of that generator before the first of them."""
    may_draw: bool = True
    """False if the device's default generator is left to others; see `Driver.capture`."""
    has_drawn: bool = False
    """True once an operation has drawn from a generator of the device's."""
    stepping: bool = False
    """True while an optimizer steps with stand-ins for its numbers."""

    def check(self, call: OpCall) -> list[Tensor]:
        """Refuse an operation that cannot be recorded. Return the host tensors to be copied."""
        op, args, kwargs, tensors = call.op, call.args, call.kwargs, call.tensors
        if op.base == "aten::as_strided":
            self._refuse_absolute(*args, **kwargs)
        if len(call.on_device) + len(call.on_host) < len(tensors):
            _refuse_layouts(call)
        device, host = call.on_device, call.on_host
        if host:
            held = [t for t in host if self._host.is_held_on_device(t)]
            device = [*device, *held]
            host = [t for t in host if not any(t is other for other in held)]
        if device or not tensors:
            refused = refusal(op, args, kwargs)
            if refused is not None:
                self.read_by_host.update(map(self._driver.storage, device[:1]))
                what = refused.what or f"{readable(op.base)} needs the value of {named(device[0])}"
                what, fix = CHECKED.get(self._reads.calling, (what, refused.fix))
                raise error_here(refused.code, what, fix=fix)
        target = kwargs.get("device")
        if op.random and (device or self._is_ours(target)) and op.draws(args, kwargs):
            self.has_drawn = True
            if not self.may_draw:
                raise drawn_after_all(user_frame())
        if device and not host and target is None:
            return []  # nearly all operations: on the device alone
        to_copy = self._copies(call, device, host)
        if op.random and not device and self._memory.here.kind != "cpu":
            self._note_host_draw(call)
        rest = [t for t in host if not any(t is other for other in to_copy)]
        self._check_host_operands(call, device, rest)
        return to_copy

    def _copies(
        self, call: OpCall, device: Sequence[Tensor], host: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the host tensors that an operation copies to the device alike in each call. Refuse
        other copies between host and device."""
        name, target = call.op.base, call.kwargs.get("device")
        to_copy = self._constant_copies(name, call.args, call.kwargs)
        if to_copy or name not in _COPIES or self.is_number(call.args):
            return to_copy
        kind = None if target is None else torch.device(target).type
        to_host = device and kind not in (None, self._memory.here.kind, "meta")
        if (device and host) or to_host or (host and self._is_ours(target)):
            source = call.tensors[-1]
            what = f"{readable(name)} copies {named(source)} across"
            raise error_here("OL103", what, fix=self._fix_of(source))
        return []

    def _note_host_draw(self, call: OpCall) -> None:
        """Note a draw from the host's default generator. Refuse one from another generator."""
        op, args, kwargs = call.op, call.args, call.kwargs
        if self._is_ours(kwargs.get("device")):
            return
        if kwargs.get("generator") is not None:
            raise error_here("OL104", f"{readable(op.base)} draws from a generator of the host's")
        if self.host_state is None:
            self.host_state = torch.default_generator.get_state()
        self.draws.append(partial(op.func, *args, **kwargs))

    def _check_host_operands(
        self, call: OpCall, device: Sequence[Tensor], host: Sequence[Tensor]
    ) -> None:
        """Refuse host tensors beside those on the device, unless kernels hold their values."""
        name = call.op.base
        is_like = name.endswith("_like") or name.startswith("aten::new_")  # its layout alone
        uses = bool(device) or (self._is_ours(call.kwargs.get("device")) and not is_like)
        for t in host:
            if uses and not t.dim() and self._is_fixed(t):
                continue  # kernels hold its value
            varying = self._host.varies(t)
            if uses and (varying or t.dim()):
                what = f"{readable(name)} uses a host tensor, {named(t)}, with device tensors"
                raise error_here("OL104", what, fix=self._fix_of(t))
            if varying and refusal(call.op, call.args, call.kwargs) is not None:
                self._read_on_host(t)

    def _fix_of(self, t: Tensor) -> str | None:
        return DRAWN if self._host.is_drawn(t) else None

    def _constant_copies(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """Return the host tensors that an operation copies to the device, if each call copies the
        same values. A call must match the values from now on."""
        if self._constants is None or (name == "aten::copy_" and self.is_number(args)):
            return []
        copied = copied_to_device(name, args, kwargs, self._memory.here.kind)
        copies = [t for t in copied if not self._host.is_held_on_device(t)]
        return copies if all(map(self._is_fixed, copies)) else []

    def is_number(self, args: Sequence[Any]) -> bool:
        """Return whether a copy is ``x[0] = 5``: a 0-dim host constant, which a fill writes too."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return False
        target, source = args[:2]
        return (
            self._memory.on_device(target)
            and not self._memory.on_device(source)
            and source.dim() == 0
            and (self._host.is_constant(source) or self._reads.assigning > 0)
        )

    def _is_fixed(self, t: Tensor) -> bool:
        """Return whether a host tensor has the same values in each call: see `HostTensors`."""
        if self._constants is None or (t.requires_grad and torch.is_grad_enabled()):
            return False
        # An optimizer may make it of numbers that each call reads.
        if self.stepping and t.is_floating_point() and self._host.made_here(t):
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
        if not self._memory.on_device(t) or self._driver.storage(t) not in self._memory.inputs:
            return
        if self._driver.storage(t) in self._displaced:
            raise error_here("OL109", "as_strided on an argument that does not begin its storage")
        first = t.storage_offset() if storage_offset is None else storage_offset
        last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        stop = t.data_ptr() + (last + 1 - t.storage_offset()) * t.element_size()
        if 0 not in size and stop > self._memory.inputs[self._driver.storage(t)]:
            raise error_here("OL109", "as_strided reaches beyond the argument")

    def _is_ours(self, device: torch.device | str | None) -> bool:
        return device is not None and torch.device(device).type == self._memory.here.kind


def _refuse_layouts(call: OpCall) -> None:
    for t in call.tensors:
        if not has_strides(t):
            raise error_here("OL109", f"{readable(call.op.base)} on {layout_of(t)}")


def readable(name: str) -> str:
    """Return an operator's name as messages have it."""
    return f"`{name.removeprefix('aten::')}`"

"""A ledger: the operations of a run, without values of tensors, compared with another run's.

Each capture is compared with the run before it, the last warm-up. A replay repeats one run: if two
runs of the same call differ in an operation, a number or memory, then something changes in Python
that a replay would freeze.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.call.tree import Constant, Tree, constants, is_plain
from onelaunch.driver.aten import OfKind, Operator, leaves
from onelaunch.driver.protocol import Capture, Driver, Provenance
from onelaunch.driver.refusals import refusal
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.state.hooks import read_hooks, read_last_hooks
from onelaunch.state.host_values import values_of
from onelaunch.state.walk import StateWalk
from onelaunch.watch.contents_before import COMPARED_BY_VALUE, ContentsBefore
from onelaunch.watch.device_constants import copied_to_device
from onelaunch.watch.difference import (
    RunDifference,
    of_handed_on,
    of_handed_on_value,
    of_memory,
    of_operations,
)
from onelaunch.watch.operations import OpCall, has_memory
from onelaunch.watch.origins import Origins, UnseenMemory


class _FollowedNumber:
    """A number that may differ from call to call. It is equal to every noted number."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FollowedNumber) or (
            type(other) is tuple and other[:1] in ((float,), (int,))  # pyright: ignore
        )

    __hash__ = None  # pyright: ignore


class Ledger:
    """A list of the operations of one run, in order. Keeps nothing alive; 10 us for each operation.

    Args:
        inputs: (tensor of the call, tensor that the run gets in its place).
        walked: the state that the callable reaches, before the run.
        stand_ins: storage -> slot, for memory that replaces a slot's own in the run.
        earlier: the run to compare with.
        capture: the capture that the run is in.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        inputs: Sequence[tuple[Tensor, Tensor]],
        walked: StateWalk,
        stand_ins: Mapping[int, str] | None = None,
        earlier: Ledger | None = None,
        capture: Capture | None = None,
    ) -> None:
        on_host = device.type == "cpu"
        self._storage = driver.storage
        self._here = OfKind(device.type)
        self.copied_to_device: list[Tensor] = []
        """Copies of the host tensors that the run copied to the device."""
        self.drawn: set[str] = set()
        """Types of the devices from whose default generators the run drew."""
        self.refused = False
        """True if a capture would refuse an operation. Unknown if the run is compared."""
        self.writes = False
        """True if an operation wrote memory from before the run. Unknown if the run is compared."""
        self.origins = Origins(driver, on_host, inputs, walked, stand_ins or {}, capture)
        self.values = values_of(t for t, _ in inputs) if not on_host else {}
        """Bytes of the host arguments, by number."""
        leaves = [t for _, t in walked.tensors() if t.requires_grad]
        self._hooks = [
            tuple(hooks or ()) for t in leaves for hooks in (read_hooks(t), read_last_hooks(t))
        ]
        self.contents = ContentsBefore(walked, values=not on_host)
        self.entries: list[tuple[Any, ...]] = []
        """The operations, each with its noted arguments."""
        if walked.reads is None:
            self._stored = [slot for slot, value in walked.all_slots.values() if is_plain(value)]
        else:
            unused = [key for key, use in walked.used.items() if use is Use.NONE]
            self._stored = [walked.slots[key][0] for key in unused if key in walked.slots]
        """The slots that the callable only stores to; before it has run, all with plain values."""
        self.handed_on_values: dict[object, tuple[str, Constant]] = {}
        """path in the result, or id of a slot -> (name, plain value that the run left there)."""
        # Only calls with the same sizes, shared memory of arguments and hooks on leaves are
        # compared. A bucket's capture has other sizes than the run before it.
        mine = self.origins.layouts, self._hooks
        alike = earlier is not None and (earlier.origins.layouts, earlier._hooks) == mine
        self._earlier = earlier if alike else None
        self.difference: RunDifference | None = None
        self.optimizers = optimizers_in(walked)
        """ids of the optimizers that the callable reaches."""

    @property
    def compares(self) -> bool:
        """True if the run is compared with one before it."""
        return self._earlier is not None

    def shows_whole_run(self) -> bool:
        """Return whether the operations and their arguments show the whole run. They do not show
        random numbers, memory of unknown origin, and host values that it used on the device."""
        return not (self.drawn or self.origins.unseen or self.copied_to_device or self.values)

    def call(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
        """Take a call of an operation apart."""
        return OpCall(op, args, kwargs, self._storage, self._here)

    def note(self, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operation before it runs, with these arguments in place of the call's."""
        op, number = call.op, len(self.entries)
        if op.lifts:
            for t in call.tensors:
                self.origins.note_constant(t, number)
        if op.random and op.draws(call.args, call.kwargs):
            devices = [t.device for t in call.tensors] or [call.kwargs.get("device") or "cpu"]
            self.drawn.update(torch.device(device).type for device in devices)
        if self._earlier is None:
            of_device = bool(call.on_device) or not call.tensors
            self.refused |= of_device and refusal(op, call.args, call.kwargs) is not None
            for t in op.written(args, kwargs) if op.writes else ():
                self.writes |= self.origins.is_older(call.storage(t))
        if call.on_host:
            host = copied_to_device(op.base, args, kwargs, self._here.kind)
            self.copied_to_device += [t.detach().clone() for t in host]
        named = zip(kwargs, self._noted(kwargs.values(), call), strict=True) if kwargs else ()
        entry = (op.text, self._noted(args, call), list(named))
        self.entries.append(entry)
        if self._earlier is not None and self.difference is None:
            others = self._earlier.entries
            other = others[number] if number < len(others) else None
            if other != entry:
                stand_ins = [v for v in leaves((args, kwargs)) if isinstance(v, torch.SymFloat)]
                terms = tuple(v.node.term for v in stand_ins if hasattr(v.node, "term"))
                self.difference = of_operations(number, other, entry)._replace(terms=terms)

    def note_made(self, call: OpCall) -> None:
        """Note the results of the last operation."""
        self.origins.note_made(call, len(self.entries) - 1)

    def handed_on(self, tensors: Iterable[Tensor], tree: Tree | None = None) -> list[Tensor]:
        """Note what the run returned and stored, before `finish`: perhaps no operation has read it,
        as in `return answers.get(), time.time()`.

        Args:
            tensors: of both.
            tree: the tree of the result, objects that the run made included.

        Returns:
            The tensors that were there before the run, and are neither the call's nor its state's.
        """
        plain = [] if tree is None else [(p, p, c) for p, c in constants(tree, "result")]
        plain += [(slot.id, slot.name, Constant(slot.read())) for slot in self._stored]
        self.handed_on_values = {key: (name, value) for key, name, value in plain if value.is_plain}
        earlier: list[Tensor] = []
        for t in (t for t in tensors if has_memory(t) and t.numel()):
            met = self.origins.of_result(t, len(self.entries))
            earlier += [t] if met is not None and met.provenance is Provenance.BEFORE else []
        return earlier

    def finish(self) -> None:
        """Finish the comparison after the run.

        Raises:
            CaptureError: OL117, another thread has made memory that the capture read. Its values
                come from stand-ins, and are wrong even for the call under capture.
        """
        for met in self.origins.unseen:
            if met.provenance is Provenance.MEANWHILE:
                raise self._of_unknown(met).refusal()
        if self._earlier is not None and self.difference is None:
            others = self._earlier.entries
            if len(others) > len(self.entries):
                number = len(self.entries)
                self.difference = of_operations(number, others[number], None)
            for was, now in zip_longest(self._earlier.origins.unseen, self.origins.unseen):
                if now is None or now.provenance is not Provenance.BEFORE:
                    continue
                if was is None or was.storage != now.storage or was.reference.expired():
                    self.difference = self.difference or self._of_unknown(now)
            for key, now in self.handed_on_values.items():
                was = self._earlier.handed_on_values.get(key, now)
                if was != now:
                    difference = of_handed_on_value(now[0], was[1], now[1])
                    self.difference = self.difference or difference
        self._earlier = None
        self.contents.finish()
        self.origins.finish()
        self._stored.clear()

    def _noted(self, values: Iterable[Any], call: OpCall) -> list[Any]:
        noted: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in COMPARED_BY_VALUE:
                noted.append((kind, value))
            elif isinstance(value, Tensor):
                noted.append(self.origins.operand(value, call, len(self.entries)))
            elif isinstance(value, (list, tuple)):
                kinds = list(map(type, value))  # pyright: ignore
                plain = COMPARED_BY_VALUE.issuperset(kinds)
                noted.append(
                    list(zip(kinds, value, strict=True)) if plain else self._noted(value, call)  # pyright: ignore
                )
            elif kind is float:
                noted.append((kind, None if self.origins.steps else value.hex()))
            elif isinstance(value, torch.SymFloat):
                noted.append(_FollowedNumber())
            elif isinstance(value, dict):
                parts = self._noted(value.values(), call)  # pyright: ignore
                noted.append(list(zip(value, parts, strict=True)))  # pyright: ignore
            else:
                noted.append((kind, repr(value) if kind is complex else None))
        return noted

    def _of_unknown(self, met: UnseenMemory) -> RunDifference:
        if met.at == len(self.entries):
            return of_handed_on()
        return of_memory(met.at, self.entries[met.at], met.place)


def optimizers_in(walked: StateWalk) -> set[int]:
    """Return the ids of the optimizers among the state that a callable reaches."""
    return {id(o) for _, o in walked.holding(lambda kind: issubclass(kind, Optimizer))}

"""An observer of the memory that a run reads and writes, operation by operation.

The observer runs around the callable while it is captured. It notes the run's tensors on the device
and on the host, and refuses, at the user's line, what a replay would freeze.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import Tensor

from onelaunch.call_events import pauses
from onelaunch.driver.aten import Operator
from onelaunch.driver.attention_seeds import seeds_of
from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.host_reads import HostReads
from onelaunch.driver.protocol import Driver, Lanes
from onelaunch.driver.refusals import DRAWN, error_here
from onelaunch.errors import CaptureError, let_go
from onelaunch.identity import id
from onelaunch.watch.admission import Admission, readable
from onelaunch.watch.device_constants import (
    FILLS,
    DeviceConstants,
    copied_to_device,
    fill_on_device,
)
from onelaunch.watch.device_memory import DeviceMemory
from onelaunch.watch.host_memory import HostTensors, named
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.operations import OpCall, Watching

T = TypeVar("T")

_TAKEN_BEFORE = "take it before the call, and pass it as an argument, `y = fast(x, left.pop())`"

_AS_COMPILED = frozenset({"OL101", "OL102", "OL103", "OL104"})
"""Codes of refusals that hold for compiled code as for eager code."""


class OnRefusal(Enum):
    """The reactions to what cannot be captured."""

    RAISE = auto()
    KEEP = auto()  # the refusals that no other check finds in compiled code
    IGNORE = auto()


class Observer(Watching):
    """A mode that watches one run of a callable.

    Args:
        driver: the driver of `device`.
        device: the device of the recording; tensors elsewhere are host tensors.
        inputs, held, save: see `DeviceMemory`.
        displaced: inputs that stand for memory in the middle of a storage.
        on_refusal: the reaction to what cannot be captured.
        constants: the device's copies of host values; with `KEEP`, the missing ones are noted.
        numbers: host tensors that the recording gets on the device.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        inputs: Iterable[Tensor] = (),
        *,
        displaced: Iterable[Tensor] = (),
        held: Mapping[int, Sequence[Tensor]] | None = None,
        save: bool = False,
        on_refusal: OnRefusal = OnRefusal.RAISE,
        constants: DeviceConstants | None = None,
        numbers: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self._storage = driver.storage
        self._pause = pauses()
        self._device = device
        self._refuses = on_refusal is OnRefusal.RAISE
        self._keeps = on_refusal is OnRefusal.KEEP
        self._constants = constants
        self.memory = DeviceMemory(driver, device, inputs, held or {}, save)
        """The device memory of the run."""
        self._on_device = self.memory.on_device
        self.host = HostTensors()
        """The host tensors of the run."""
        self.host.hold_on_device(numbers)
        self.host_reads = HostReads(self._on_device, self._refuse_read, self._read_on_host)
        """A mode that refuses the host's reads of device memory."""
        self.admission = Admission(
            *(driver, self.memory, self.host, self.host_reads),
            {driver.storage(t) for t in displaced},
            constants,
            self._read_on_host,
        )
        self.seeds: set[int] = set()
        """Storages of seeds for a backward, which are on the host in eager."""
        self.host_scalars: dict[int, frozenset[int]] = {}
        """storage of a result that eager computes on the host, from host numbers alone -> storages
        of the numbers."""
        self.refused: CaptureError | None = None
        """The first refusal, which the callable may have caught."""
        self.tentative_refusal: CaptureError | None = None
        """The first refusal that may not hold for compiled code."""
        self.placed: Callable[[Any, Any, Any], tuple[Any, Any] | None] | None = None
        """Returns the arguments with plain numbers for stand-ins; None if there are none."""
        self.ledger: Ledger | None = None
        """The ledger that notes the operations."""
        self.random: list[object] = []
        """The random operations, with the sizes and dtypes of their results."""
        self.lanes: Lanes | None = None
        """See `Capture.lanes`."""
        self.filled_sets: Mapping[int, str] = {}
        """id -> name of sets of the state, as `StateWalk.filled_sets`. It keeps none alive."""

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note what it does; see `Watching`."""
        pause = self._pause
        paused = pause(True)
        try:
            with no_functions():
                plain = self.placed and self.placed(op.func, args, kwargs)
                call = self._noted(op, *(plain or (args, kwargs)))
                if self.ledger is not None:
                    self.ledger.note(call, args, kwargs)
                recorded, given = self._recorded_form(call)
            pause(paused)
            if self.lanes is None:
                result = recorded(*given, **call.kwargs)
            else:
                result = self.lanes.run(call, recorded, given)
            pause(True)
            with no_functions():
                call.returned(result)
                if self.lanes is not None:
                    self.lanes.note(call)
                self._note_results(call)
                if self.ledger is not None:
                    self.ledger.note_made(call)
                self._note_seeds(call, result)
                if self.host_scalars:
                    self._note_host_scalars(call)
        except CaptureError as error:
            self.note_refusal(error)
            raise
        finally:
            pause(paused)
        return result

    def _noted(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
        """Note the reads and writes of an operation before it runs."""
        call = OpCall(op, args, kwargs, self._storage, self.memory.here)
        if op.lifts:
            self._note_literals(call.tensors)
        if self._refuses:
            call.to_copy = self.admission.check(call)
            if op.reshapes:
                self.memory.note_reshaped(call.tensors[0])
        elif self._keeps:
            self._defer(call)
        self.memory.note_reads(call)
        for t in call.on_host:
            self.host.note_argument(t)
        if op.writes:
            for t in op.written(args, kwargs):
                if self._on_device(t):
                    self.memory.note_written(t)
                else:
                    self._write_on_host(t, call.on_host, op.random)
            declared = filter(self._on_device, op.declared(args, kwargs))
            self.memory.version_bumped.update(map(self._storage, declared))
        return call

    def _recorded_form(self, call: OpCall) -> tuple[Callable[..., Any], Sequence[Any]]:
        """Return a function that does an operation without the host, where a recording can, and its
        arguments."""
        name, args = call.op.base, call.args
        if name == "aten::copy_" and self.admission.is_number(args):
            return torch.ops.aten.fill_.Scalar, (args[0], args[1].item())
        if call.to_copy and self._constants is not None:
            args = self._constants.swapped(name, args, call.to_copy)
        elif (
            self._refuses
            and name in FILLS
            and (fill := fill_on_device(name, args, self._on_device))
        ):
            return fill, args
        return call.op.func, args

    def outcome(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `fn` inside the context of this observer, and return its result.

        Raises:
            CaptureError: the first refusal, even if the callable caught it or TorchScript's
                interpreter raised another error in its place.
        """
        result: Any = None
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            if self.refused is None:
                raise
            let_go(error)
        if self.refused is not None:  # outside of the handler: neither error refers to the other
            raise copy.copy(self.refused)
        return result

    def note_refusal(self, error: CaptureError) -> CaptureError:
        """Return a refusal after noting it, as the callable may catch it. A copy is noted: an error
        that is raised holds frames, whose objects may hold this observer."""
        self.refused = self.refused or copy.copy(error)
        return error

    def _defer(self, call: OpCall) -> None:
        """Keep the refusal and the copied host values of an operation, for compiled code."""
        op, args, kwargs = call.op, call.args, call.kwargs
        try:
            copied = self.admission.check(call)
            if op.base == "aten::copy_" and self.admission.is_number(args):
                copied = [args[1]]  # compiled code has no `fill_` in its place
            if copied and self._constants is not None:
                self.tentative_refusal = self.tentative_refusal or _copies(op, copied)
                for t in copied:
                    self._constants.of(t)
        except CaptureError as error:  # its frames would hold all that the run made
            host: Sequence[Tensor] = ()
            if error.code == "OL103":
                host = copied_to_device(op.base, args, kwargs, self._device.type)
            constant = bool(host) and all(map(self.host.is_constant, host))
            self._keep_refusal(
                error.with_traceback(None), error.code in _AS_COMPILED and not constant
            )

    def _keep_refusal(self, error: CaptureError, sure: bool) -> None:
        """Keep a refusal. It is a suspicion unless `sure`: compiled code may make constants on the
        device, for example."""
        if sure:
            self.note_refusal(error)
        else:
            self.tentative_refusal = self.tentative_refusal or error

    def note_seeding(self, method: str) -> CaptureError:
        """Return the error for a run that seeds a generator, or sets or reads its state. Torch's
        functions for the default generator are no error, see `Driver.rewind`."""
        fix = None
        if method.endswith("get_state"):
            fix = "get_rng_state and set_rng_state of torch or torch.cuda, which a replay repeats"
        what = f"`{method}` of a random generator in a capture"
        return self.note_refusal(error_here("OL106", what, fix=fix))

    def refuse_draw(self, method: str) -> CaptureError:
        """Return the error for a number drawn from Python's generator in the run."""
        what = f"`random.{method}` draws a number in a capture"
        return self.note_refusal(error_here("OL117", what, fix=DRAWN))

    def refuse_taken(self, taken: set[Any]) -> CaptureError | None:
        """Return the error for an element taken from a set of the state in the run, or None."""
        name = self.filled_sets.get(id(taken))
        if name is None or len(taken) == 1:  # the run put all there, or there is no choice
            return None
        what = f"an element is taken from the set `{name}` in a capture"
        return self.note_refusal(error_here("OL117", what, fix=_TAKEN_BEFORE))

    def _refuse_read(self, code: str, what: str, t: Tensor, fix: str | None) -> None:
        self.admission.read_by_host.add(self._storage(t))
        refusals = [self.note_refusal(error_here(code, what, fix=fix))]
        if not self._keeps:
            raise refusals.pop()  # no frame may hold what it raises: see `note_refusal`

    def _note_literals(self, literals: Sequence[Tensor]) -> None:
        """Note `torch.tensor(...)`: new memory, filled from Python without the dispatcher."""
        for t in literals:
            if not self._on_device(t):
                self.host.note_constant(t)
            elif self._device.type == "cpu":
                self.memory.note_filled(t)
            elif self._refuses and t.numel():
                raise _copies_numbers()
            elif self._keeps and t.numel():
                self.tentative_refusal = self.tentative_refusal or _copies_numbers()

    def _read_on_host(self, t: Tensor) -> None:
        try:
            if self._refuses or (self._keeps and not self.host.is_held_on_device(t)):
                self.host.read(t)
        except CaptureError as error:
            self.note_refusal(error)
            if self._refuses:
                raise

    def _write_on_host(self, t: Tensor, sources: Sequence[Tensor], random: bool) -> None:
        own = self.host.written(t, sources, random)
        if (self._refuses or self._keeps) and not own:
            what = f"a host tensor, {named(t)}, is written"
            refusals = [self.note_refusal(error_here("OL104", what))]
            if self._refuses:
                raise refusals.pop()

    def _note_results(self, call: OpCall) -> None:
        op = call.op
        whole = len(call.with_memory) == len(call.results)
        if not whole and self._refuses and any(t.is_nested for t in call.results):
            raise error_here("OL109", f"{readable(op.name)} makes a nested tensor")
        if op.random:
            self.random.append((op.func, [(t.shape, t.dtype) for t in call.results]))
        arguments = call.storages.values()
        for t, storage in call.with_memory:
            if self._on_device(t):
                self.memory.note_made(t, storage, arguments, locate=self._refuses)
            else:
                host = [i.untyped_storage()._cdata for i in call.tensors if not self._on_device(i)]
                from_device = self._keeps and bool(call.on_device)
                self.host.note_result(t, host, op.random or from_device, op.idle)

    def _note_seeds(self, call: OpCall, result: Any) -> None:
        if self.seeds:  # a new tensor may have the memory of a seed that was freed
            self.seeds -= {storage for _, storage in call.with_memory} - {*call.storages.values()}
        places = seeds_of(call.op).results
        if places:
            seeds = [result[place] for place in places]
            self.seeds.update(map(self._storage, seeds))
            self.host.hold_on_device(t for t in seeds if not self._on_device(t))

    def _note_host_scalars(self, call: OpCall) -> None:
        """Note the results of an operation on host numbers alone, unless it moves them."""
        inputs = call.read
        roots = [self.host_scalars[s] for s in inputs if s in self.host_scalars]
        stays = call.kwargs.get("device") is None
        for storage in (storage for t, storage in call.with_memory if self._on_device(t)):
            if stays and roots and len(roots) == len(inputs):
                self.host_scalars[storage] = frozenset().union(*roots)
            elif storage not in inputs:  # it may have the memory of a scalar that was freed
                self.host_scalars.pop(storage, None)

    @property
    def copied_to_device(self) -> list[Tensor]:
        """Copies of the host tensors whose constants on the device a run would need."""
        return [] if self._constants is None else list(self._constants.missing.values())

    def release(self) -> None:
        self.memory.release()
        self.host.release()

    def forget(self) -> None:
        """Release every tensor. The reads and writes of the run are unknown from then on. A run
        that did not end lets go of its capture, too, which holds tensors of its call."""
        self.release()
        self.ledger = self.lanes = self.placed = None
        self.memory.external, self.memory.written = {}, {}  # others may use these dicts


def _copies(op: Operator, host: Sequence[Tensor]) -> CaptureError:
    return error_here("OL103", f"{readable(op.base)} copies {named(host[0])} across")


def _copies_numbers() -> CaptureError:
    what = "torch.tensor(...) copies numbers to the device"
    fix = "torch.full((), value, device=...), or make the tensor before the call"
    return error_here("OL103", what, fix=fix)

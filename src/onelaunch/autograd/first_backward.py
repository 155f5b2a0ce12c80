"""A run of a backward, operation by operation, before its capture.

Python runs in a backward too: an `autograd.Function`'s, and a checkpoint's forward once more. Its
reads are guarded, and the capture must do the same operations.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, nullcontext
from types import CodeType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from onelaunch.autograd.graph_walk import CapturedGraph
from onelaunch.call.tree import flatten, is_unchanging
from onelaunch.call_events import is_profiled
from onelaunch.driver.protocol import Capture, Driver
from onelaunch.driver.seeding import HostGenerators
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.frames.watch import FrameWatch
from onelaunch.source import changed_at
from onelaunch.state.dependencies import dependencies, laid_out
from onelaunch.state.guard import StateGuard
from onelaunch.state.host_values import slots_of
from onelaunch.state.iterators import advanced, iterators_of
from onelaunch.state.rollback import Rollback
from onelaunch.state.slots import Slot
from onelaunch.state.walk import StateWalk, changes, walk
from onelaunch.watch.difference import RunDifference
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.observer import Observer

_MOST_CHARACTERS = 200  # the most characters of a message's first line


class FirstBackward:
    """The operations and the reads of a backward. `outputs`: the results of the forward, with its
    graph. `reads`: the reads of the forward."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        reads: Reads | None,
    ) -> None:
        self.driver, self.device, self._forward_reads = driver, device, reads
        saved = CapturedGraph(outputs).saved() if device.type == "cpu" else None
        self._numbers = [(t, t) for t in saved or () if not t.dim()]
        """Numbers that the forward computed. On a CPU only this list tells them from the host's."""
        given = [*((g, g) for g in grads), *self._numbers]
        self.ledger = Ledger(driver, device, given, walk((), reads))
        self._watch = None if is_profiled() else FrameWatch(Reads(), device)
        self._advanced: CaptureError | None = None
        self._roots: list[tuple[str, object]] = []
        for node in CapturedGraph(outputs).nodes:
            if isinstance(node, BackwardCFunction):
                function: type[torch.autograd.Function] = cast(Any, type(node))._forward_cls
                self._roots.append((function.__qualname__, function.backward))
                self._roots.append((f"a `{type(node).__name__}`", node))

    @contextmanager
    def watching(self) -> Generator[None]:
        iterators = iterators_of(walk(self._roots)) if self._roots else []
        with nullcontext() if self._watch is None else self._watch.watching():
            yield
        if iterators:
            read = {slot.id for slot, *_ in iterators_of(self.state())}
            iterators = [entry for entry in iterators if entry[0].id in read]
            self._advanced = advanced(iterators, self._codes)

    def state(self) -> StateWalk:
        """Return the present state that the backward reads. Without a watch, everything that its
        functions reach counts as read."""
        return walk(self._roots, None if self._watch is None else self._watch.seen)

    def finish(self) -> None:
        """Finish the ledger after the run, and note there the state that was read."""
        self.ledger.contents.add(self.state())
        self.ledger.finish()

    @property
    def _codes(self) -> Collection[CodeType]:
        return () if self._watch is None else self._watch.reads.codes

    def refuse_advanced(self) -> None:
        """Refuse (OL117) a run that advanced an iterator."""
        if self._advanced is not None:
            raise self._advanced

    def refuse_effects(self, before: StateWalk, generators: HostGenerators) -> None:
        """Refuse a backward that draws from Python's or NumPy's generators (OL117), changes state
        or stores a tensor (OL118): no replay does."""
        reads = None if self._watch is None else self._watch.seen
        fn = self._roots[0][1] if self._roots else None
        generators.refuse_drawn(fn, reads, lambda _: ())
        if before.is_current() and Use.NONE not in before.used.values():
            return
        after = self.state()
        for change in changes(before, after):
            use, was, now = before.use(change.slot), change.before, change.after
            if use is not None:
                what = f"`{change.slot.name}` and moves it on"
                if is_unchanging(was) and is_unchanging(now):
                    what += f", from {was!r} to {now!r}"
                self._refuse(change.slot, use, what)
        for key, (slot, value) in after.slots.items():
            if after.used.get(key) is Use.NONE and flatten(value, objects=True).tensors:
                self._refuse(slot, Use.NONE, f"a tensor, `{slot.name}`")

    def _refuse(self, slot: Slot, use: Use, what: str) -> NoReturn:
        what = f"a backward {'stores' if use is Use.NONE else 'reads'} {what}"
        where = changed_at(self._codes, slot.word, slot.is_item)
        fix = "store it after the backward, outside of it" if use is Use.NONE else None
        raise CaptureError("OL118", what[:_MOST_CHARACTERS], where=where, fix=fix)

    def compared(self, grads: Sequence[tuple[Tensor, Tensor]], capture: Capture) -> Ledger:
        """Return a ledger for a capture, to compare it with the run."""
        state = walk((), self._forward_reads)
        given = [*grads, *self._numbers]
        return Ledger(self.driver, self.device, given, state, earlier=self.ledger, capture=capture)


class StateBefore:
    """The state before the capture of a backward, to be put back. Refuses (OL117) a first run that
    advanced an iterator."""

    def __init__(self, first_run: FirstBackward) -> None:
        first_run.refuse_advanced()
        self.first_run, self.walk = first_run, first_run.state()
        self.restore = Rollback(self.walk).restore
        slots = self.walk.slots.values()
        self._generators = HostGenerators((slot.name, value) for slot, value in slots)

    def refuse_effects(self) -> None:
        self.first_run.refuse_effects(self.walk, self._generators)


class BackwardComparison:
    """The comparison of a captured backward with the run before it. `guard`: the check that the
    state it read is unchanged. `changed`: the name of state that it read and that the run before
    found otherwise, or None."""

    def __init__(self, observer: Observer, state: StateBefore) -> None:
        assert observer.ledger is not None
        first_run, before = state.first_run, state.walk
        driver, device = first_run.driver, first_run.device
        observer.ledger.finish()
        self.difference: RunDifference | None = observer.ledger.difference
        before.expand()
        slots = dependencies(before, (), set(), set(), observer.memory.external, driver, device)
        slots += slots_of(observer.host.read_state(), before.tensors())
        # A replay repeats no plain store, so the slot must hold the stored value already.
        slots += [
            (slot, value)
            for key, (slot, value) in before.slots.items()
            if before.used.get(key) is Use.NONE and is_unchanging(value)
        ]
        tensors = laid_out((t for _, t in slots if isinstance(t, Tensor)), device)
        sized = {id(container): (container, names) for container, names in before.sized()}
        self.guard = StateGuard(slots, tensors, list(sized.values()))
        self.changed = None if self.difference is None else self._changed_since(first_run.ledger)

    def _changed_since(self, earlier: Ledger) -> str | None:
        for slot, value in self.guard.held():
            if earlier.contents.differ([(slot.id, value)]):
                return slot.name
        for container, length in self.guard.lengths():
            if earlier.contents.differ([((id(container), len), length)]):
                return f"the length of {self.guard.container_name(container)}"
        return None

"""Snapshots of the state that a callable reaches, and the rollback to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onelaunch.beside import is_beside
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import Same, Tree, call_constants, constants, flatten
from onelaunch.call.wrappers import local
from onelaunch.driver.protocol import Driver
from onelaunch.frames.reads import Reads, StandIn
from onelaunch.gc_pause import no_collection
from onelaunch.identity import id
from onelaunch.state.contents import LEAVES
from onelaunch.state.dependencies import ordered
from onelaunch.state.expected import Layout
from onelaunch.state.rollback import RunRollback
from onelaunch.state.slots import Slot, gradient_of
from onelaunch.state.walk import Change, StateWalk, changes, restore, walk


class LastWalk:
    """The last walk of a callable's state, kept through a run and until its next call.

    The tensors are held weakly: when the run replaces a tensor, its memory must be free at once.
    Gradients come and go between calls, and are read anew. A walk is not kept if it found a tensor
    outside of modules, as a list may hold it too; nor if it visited an object that only the user
    keeps.
    """

    def __init__(self) -> None:
        self._kept: tuple[StateWalk, bool] | None = None

    @no_collection()
    def keep(self, walked: StateWalk) -> None:
        """Keep a walk, which the caller must not use any longer."""
        self._kept = None
        if walked.reads is None or walked.strays:
            return
        slots = (slot for slot, _ in walked.tensors() if slot.key is not gradient_of)
        fits = walked.weak is not None or all(isinstance(slot.owner, nn.Module) for slot in slots)
        if fits and walked.let_go():
            self._kept = walked, torch.is_grad_enabled()

    @no_collection()
    def take(self, reads: Reads | None) -> StateWalk | None:
        """Return the walk, if a new walk would find the same. It is not kept any longer."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0].reads is not reads or kept[1] != torch.is_grad_enabled():
            return None
        return kept[0] if kept[0].hold() and kept[0].is_current() else None


class ReachableState:
    """The state that a callable reaches, walked again only after a change.

    It serves one capture and the runs that come before it, all under `Driver.exclusive`.

    Args:
        roots: the named objects where the walk begins.
        reads: the reads of the callable, or None before it has run.
        last: the last walk from the same roots, where each call has these roots.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, object]],
        reads: Reads | None = None,
        last: LastWalk | None = None,
    ) -> None:
        self.roots = roots
        self.reads = reads
        self._last = last
        self._now: StateWalk | None = None

    def walk(self) -> StateWalk:
        if self._now is None:
            self._now = self._last and self._last.take(self.reads)
        if self._now is None:
            self._now = walk(self.roots, self.reads)
        return self._now

    def drop_tensors(self) -> None:
        """Hold no tensor during a run, which may replace it."""
        if self._now is not None and self._last is not None:
            self._last.keep(self._now)
        self._now = None

    def values(self) -> list[object]:
        """Return the contents of the slots, except plain values of modules."""
        return [value for _, value in self.walk().slots.values()]

    def changed(self, before: StateWalk) -> tuple[StateWalk, list[Change]]:
        """Return the state after a run, and the run's changes to the state `before` it."""
        if before.reads is self.reads and before.is_current():
            self._now = before
            return before, []
        after = walk(self.roots, self.reads)
        changed = changes(before, after)
        self._now = None if changed else after  # changes will be undone
        return after, changed

    def restored(self, before: StateWalk) -> None:
        """Keep the walk `before` as the present one, if the state is again as it was then."""
        self._now = before if before.reads is self.reads and before.is_current() else None

    def know(
        self, reads: Reads | None, last: LastWalk | None = None, walked: StateWalk | None = None
    ) -> None:
        """Take the reads of the callable. If they are new, the next use walks again.

        Args:
            last: the last walk, if it is another now.
            walked: a walk by the new reads, of the present state.
        """
        if self.reads is not reads:
            self.reads, self._now = reads, walked
        if last is not None and self._last is not None and self._last is not last:
            self._last, self._now = last, None

    def forget(self) -> None:
        """Walk again at the next use: something else changed the state."""
        self._now = None


def tensors_by_storage(
    driver: Driver, device: torch.device, walked: StateWalk
) -> dict[int, list[Tensor]]:
    """Return the reached tensors on the device, by storage."""
    held: dict[int, list[Tensor]] = {}
    for _, t in walked.tensors():
        if lies_on(t, device):
            held.setdefault(driver.storage(t), []).append(t)
    return held


@dataclass(slots=True, eq=False)
class StateSnapshot:
    """A snapshot of the state that a callable reaches, taken before a capture."""

    reached: ReachableState
    walk: StateWalk
    tensors_by_storage: dict[int, list[Tensor]]
    """storage -> tensors that the callable reaches by address. The capture adds to it."""
    orders: dict[int, tuple[object, ...]]
    """id of a dict that is read as a whole -> its keys, in order."""
    rollback: RunRollback
    _kept: list[tuple[Tensor, Tensor, Layout]]
    """(tensor, alias of its memory, its layout) before the capture."""

    @staticmethod
    def of(driver: Driver, device: torch.device, reached: ReachableState) -> StateSnapshot:
        walked = reached.walk()
        held = tensors_by_storage(driver, device, walked)
        tensors = [local(t) for tensors in held.values() for t in tensors]
        kept = [(t, t.detach(), Layout.of(t, grads_matter=False)) for t in tensors]
        orders = {id(value): tuple(value) for _, value in ordered(walked, ())}
        return StateSnapshot(reached, walked, held, orders, RunRollback(walked), kept)

    def values(self, tree: Tree) -> list[tuple[str, object]]:
        """Return (name, value) for the objects that a call reaches; `tree` holds its arguments."""
        values: list[tuple[str, object]] = [(at, c.value) for at, c in call_constants(tree)]
        return values + [(slot.name, value) for slot, value in self._objects()]

    def words(self, value: object) -> Iterator[object]:
        """Return the names and keys by which code comes to a reached object, the last first."""
        at = next((slot for slot, held in self._objects() if held is value), None)
        while at is not None:
            yield at.word
            at = at.via

    def generators(self, tree: Tree) -> list[torch.Generator]:
        """Return torch's generators that a call reaches, without repeats."""
        values = self.values(tree)
        return list({id(g): g for _, g in values if isinstance(g, torch.Generator)}.values())

    def objects(self) -> dict[int, Same]:
        """Return id -> reached object that a call may return as it is: its own list, a cache."""
        held = [value for _, value in self._objects()]
        objects = [v for v in (*self.walk.owners, *held) if not isinstance(v, (Tensor, tuple))]
        objects += self.walk.hooks
        return {id(value): tuple.__new__(Same, (value, None)) for value in objects}

    def _objects(self) -> list[tuple[Slot, object]]:
        """Return the slots that hold neither tensors nor numbers and the like, nor empty hooks."""
        return self.walk.holding(lambda kind: kind not in LEAVES and not issubclass(kind, Tensor))

    def relocated(self) -> tuple[Tensor, bool] | None:
        """Return (tensor, whether its sizes or strides changed) of a moved tensor, or None."""
        for t, _, layout in self._kept:
            if layout.moved(t):
                return t, layout.reshaped(t)
        return None

    def restorer(self, reads: Reads | None) -> Callable[[], None]:
        """Return a function that restores the Python state that a run with `reads` changed.
        It keeps no memory alive but that of tensors in the state."""
        rollback, reached = self.rollback, self.reached

        def restore() -> None:
            rollback.restore(reached.roots, reads)
            reached.forget()

        return restore

    def undo(self, changes: Sequence[Change], reads: Reads | None, again: bool) -> None:
        """Roll back the changes of a failed capture to the callable's state.

        Args:
            changes: the changes; if empty, they are looked for.
            reads: the reads of the capture's run.
            again: True if the callable runs again in place of this run. Else the run stands, and
                only changes that involve tensors or stand-ins are undone.
        """
        if is_beside():  # other threads made the changes
            self.reached.forget()
            return
        if again:
            self.rollback.restore(self.reached.roots, reads)
        else:
            every = changes or self.reached.changed(self.walk)[1]
            restore(c for c in every if isinstance(c.before, Tensor) or _is_of_capture(c.after))
        for t, alias, layout in self._kept:
            if layout.moved(t):
                t.data = alias
        self.reached.restored(self.walk)


def _is_of_capture(value: object) -> bool:
    """Return whether a value holds tensors or stand-ins."""
    flat = flatten(value)
    return bool(flat.tensors) or any(isinstance(c.value, StandIn) for _, c in constants(flat.tree))

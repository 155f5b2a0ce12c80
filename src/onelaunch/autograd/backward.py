"""One captured backward: from gradients of a recording's results to gradients of its inputs."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from onelaunch.autograd.accumulate import laid_out
from onelaunch.autograd.engine import gradients
from onelaunch.autograd.first_backward import BackwardComparison, FirstBackward
from onelaunch.autograd.graph_walk import MODIFIED, CapturedGraph
from onelaunch.autograd.overwritten import Overwritten, hand_over, set_versions
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import flatten
from onelaunch.call.wrappers import is_wrapped
from onelaunch.driver.attention_seeds import SeedsOfCapture
from onelaunch.driver.capture_query import CaptureAnswer
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.protocol import Driver, Graph, Rewind
from onelaunch.driver.schedule import Parallel
from onelaunch.frames.reads import Reads
from onelaunch.state.slots import Slot
from onelaunch.trace_names import annotated, profiler, sizes
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.observer import Observer, OnRefusal

Gradients = Sequence[Tensor | None]
Moved = Sequence[tuple[Tensor, Tensor]]
"""(tensor that the captured graph saved, the caller's tensor). Eager saves the tensor object, and
its backward reads the present memory of this object."""

_use_count: Callable[[int], int] = cast(Any, torch._C)._storage_Use_Count


class ForwardRun(NamedTuple):
    """The run of a forward under capture, as its backward has to know it. `compiled`: True for
    compiled code. Its operations are hidden, and its backward runs no Python."""

    where: str | None  # the line where the callable begins
    asking: CaptureAnswer  # its answers about capturing, for its recomputation
    reads: Reads | None  # its reads
    compiled: bool
    copied_to_device: Sequence[Tensor]  # the host values that it copied to the device
    rebound: Sequence[Slot]  # slots in which each forward stores a tensor
    parallel: Parallel  # see `Driver.capture`


@dataclass(slots=True, eq=False)
class StaticGraph:
    """The autograd graph of a captured forward; each replay fills its saved tensors anew."""

    driver: Driver
    device: torch.device
    stream: object
    outputs: list[Tensor]
    inputs: list[Tensor]
    direct: int
    """The number of leaves at the end of `inputs` whose `.grad` the backward adds to directly."""
    rewind: Rewind | None  # the random state of the forward capture
    forward: ForwardRun
    preexisting: list[Tensor] = field(default_factory=list)
    """Tensors from before the call that the call returns or stores, as they are or as views."""
    kept: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Tensors that `run` made and did not return."""
    stream_lock: AbstractContextManager[object] = field(default_factory=nullcontext[None])
    """The lock of a shared stream, held during runs and captures on it."""
    overwritten: Overwritten = field(init=False)

    def __post_init__(self) -> None:
        self.overwritten = Overwritten(self.outputs, self.driver.storage)

    def gradients(
        self, grads: Gradients, needed: Sequence[bool] | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of all inputs, or of the `needed` ones, by eager's operations."""
        chosen = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        places = [i for i in range(len(self.inputs)) if needed is None or needed[i]]
        by_input: list[Tensor | None] = [None] * len(self.inputs)
        if not places:
            return by_input
        # A checkpoint runs the forward once more, and asks again.
        with self.overwritten.counters_kept(), self.forward.asking.in_force():
            given = gradients(
                [t for t, _ in chosen],
                [self.inputs[i] for i in places],
                [g for _, g in chosen],
                keep_graph=True,
            )
        for place, g in zip(places, given, strict=True):
            by_input[place] = g
        return by_input

    def edited(
        self, changed: Collection[int], moved: Moved, grads: Gradients, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the wanted inputs as eager gives them, after edits. Raises
        torch's `RuntimeError` if they depend on a tensor with its storage in `changed`. `moved`: of
        tensors that got other memory, or that the recording does not copy."""
        saved = CapturedGraph(self.outputs).saved()
        if saved is None and changed:  # a node does not list its tensors: assume all
            raise RuntimeError(MODIFIED)
        read = [t for t in saved or () if self._storage(t) in changed]
        before = [(t, t._version) for t in read]
        try:
            for t in read:
                torch.autograd.graph.increment_version(t)
            return self.run(grads, moved, needed)
        finally:
            set_versions(before)

    def run_watched(
        self, grads: Gradients, moved: Moved
    ) -> tuple[list[Tensor | None], FirstBackward | None]:
        """Do `run`, and also return what a capture is compared with."""
        if self.forward.compiled:
            return self.run(grads, moved), None
        given = [*(g for g in grads if g is not None), *(t for _, t in moved)]
        first_run = FirstBackward(self.driver, self.device, self.outputs, given, self.forward.reads)
        with HostFactories(self.device), first_run.watching():
            gradients = self.run(grads, moved, ledger=first_run.ledger)
        first_run.finish()
        return gradients, first_run

    def run(
        self,
        grads: Gradients,
        moved: Moved = (),
        needed: Sequence[bool] | None = None,
        ledger: Ledger | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients, in memory of their own, computed operation by operation."""
        observer = Observer(self.driver, self.device, on_refusal=OnRefusal.IGNORE)
        observer.ledger = ledger
        seeds = SeedsOfCapture(self.device, self.driver.capturing)
        written: set[int] = set()

        def backward() -> list[Tensor | None]:
            taken: set[int] = set()
            try:
                with seeds, observer:
                    gradients = self.gradients(grads, needed)
                    if ledger is not None:
                        ledger.handed_on(flatten(gradients).tensors)
                    observer.ledger = None  # the copies are no part of the callable
                    made = [
                        None if g is None else own_memory(g, observer, self.driver, taken)
                        for g in gradients
                    ]
                    return self.laid_out(made)
            finally:
                self.kept = list(observer.memory.made_tensors)
                written.update(observer.memory.written)
                observer.release()

        with self.stream_lock, reading(moved):
            gradients = self.driver.run_on_capture_stream(backward, self.device, self.stream)
        self.overwritten.note(written)
        for _, t in moved:
            if self._storage(t) in written:
                torch.autograd.graph.increment_version(t)
        given = {self._storage(g) for g in gradients}
        self.kept = [made for made in self.kept if self._storage(made()) not in given]
        return gradients

    def _storage(self, t: Tensor | None) -> int | None:
        if t is None or t.layout is not torch.strided or is_wrapped(t):
            return None
        return self.driver.storage(t)

    def stored(self) -> set[int | None]:
        """Return the storages of tensors that calls make and store. The next forward or backward
        replaces these tensors in their slots."""
        values = [t for slot in self.forward.rebound for t in flatten(slot.read()).tensors]
        values += [t for made in self.kept if (t := made()) is not None]
        storages = {self._storage(t) for t in values if lies_on(t, self.device)}
        return storages - set(map(self._storage, self.preexisting))

    def laid_out(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, those of direct leaves in the layout of `.grad`."""
        first = len(gradients) - self.direct
        pairs = zip(gradients[first:], self.inputs[first:], strict=True)
        return gradients[:first] + [laid_out(g, leaf) for g, leaf in pairs]


@contextlib.contextmanager
def reading(moved: Moved) -> Generator[None]:
    """Surround a backward that reads tensors where the caller has them."""
    before = [static.data for static, _ in moved]
    try:
        for static, t in moved:
            static.data = t.data
        yield
    finally:
        for (static, _), data in zip(moved, before, strict=True):
            static.data = data


def backward_title(grads: Gradients) -> str:
    return f"backward {sizes([g.shape for g in grads if g is not None])}"


@dataclass(eq=False)
class Backward:
    """A backward as one launch, for gradients of one layout. Made by `capture_backward`."""

    graph: Graph
    title: str
    written: list[Tensor]  # tensors of the caller that it writes, and whose versions eager advances
    verdict: BackwardComparison | None
    _handed: list[tuple[int, Tensor]]
    """(index among its inputs, the copy) of gradients and forward inputs that it writes."""
    _constants: list[Tensor]  # the device's copies of host values, which the graph reads
    _kept: list[Tensor | None] | None  # the gradients in its own memory, or None
    _targets: list[Callable[[], tuple[Tensor, Tensor]] | None]
    """Makers of memory for gradients that it does not keep."""

    def __post_init__(self) -> None:
        self._storages = [g.untyped_storage()._cdata for g in self._kept or () if g is not None]
        self._unused = self._counts()
        if any(count > 1 for count in self._unused):
            # A later collection of a cycle would change the counts. All of the capture is young.
            gc.collect(0)
            self._unused = self._counts()

    def _counts(self) -> list[int]:
        """Return the number of tensors over each gradient's memory."""
        return list(map(_use_count, self._storages))

    @property
    def fits(self) -> bool:
        """True if the state that the capture read is unchanged."""
        return self.verdict is None or self.verdict.guard.check()

    def available(self) -> bool:
        """Return whether nobody holds the gradients of the previous launch."""
        return self._kept is None or self._counts() == self._unused

    def launched(self, grads: Gradients) -> list[Tensor | None] | None:
        """Run, or return None while somebody holds the gradients that it would overwrite."""
        return self.run(grads) if self.available() else None

    def run(self, grads: Gradients) -> list[Tensor | None]:
        """Launch. Raises `Released` if the recording was reset."""
        sources = [g for g in grads if g is not None]
        launch = self.graph.launch
        if profiler._is_profiler_enabled:
            launch = annotated(launch, f"onelaunch replay: {self.title}")
        if self._kept is not None:
            launch(sources, ())
            gradients = [None if g is None else g.detach() for g in self._kept]
        else:
            made = [None if make is None else make() for make in self._targets]
            launch(sources, [base for pair in made if pair for base in pair[:1]])
            gradients = [None if pair is None else pair[1] for pair in made]
        for t in self.written:
            if not t.is_inference():
                torch.autograd.graph.increment_version(t)
        for place, port in self._handed:
            hand_over(port, sources[place])
        return gradients


@functools.cache
def _one_owner() -> int:
    """Return the use count of a storage with one tensor."""
    return _use_count(torch.empty(1, device="cpu").untyped_storage()._cdata)


def own_memory(t: Tensor, observer: Observer, driver: Driver, taken: set[int]) -> Tensor:
    """Return `t`, or a copy if its memory is shared: a gradient passed on, or returned twice.
    Memory that compiled code allocates is not observed, and counts as unshared."""
    if t.layout is not torch.strided or is_wrapped(t):
        return t.clone()
    storage = driver.storage(t)
    own = observer.memory.is_new(t) or _use_count(t.untyped_storage()._cdata) == _one_owner()
    if t.numel() and (not own or storage in taken):
        t = t.clone()
        storage = driver.storage(t)
    taken.add(storage)
    return t

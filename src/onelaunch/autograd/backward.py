"""One captured backward: from gradients of a recording's results to gradients of its inputs.

`AutogradPair.backward` decides when one is captured.
"""

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
from onelaunch.autograd.graph_walk import DENSE, MODIFIED, CapturedGraph
from onelaunch.autograd.rehearsal import Finding, Rehearsal
from onelaunch.call.spec import TensorSpec, lies_on
from onelaunch.call.tree import flatten
from onelaunch.call.wrappers import is_wrapped
from onelaunch.driver.attention_seeds import SeedsOfCapture
from onelaunch.driver.capture_query import Asking
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.protocol import (
    Capture,
    DevicePool,
    Driver,
    Graph,
    InPlace,
    Rewind,
    Travel,
)
from onelaunch.driver.seeding import watching_seeds
from onelaunch.errors import CaptureError, let_go
from onelaunch.frames.reads import Reads
from onelaunch.gc_pause import no_collection
from onelaunch.state.rollback import Rollback
from onelaunch.state.slots import Slot, read_gradient
from onelaunch.state.walk import StateWalk
from onelaunch.trace_names import annotated, profiler, sizes
from onelaunch.unwinding import unwound
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.lifted import Lifted
from onelaunch.watch.observer import Observer

Gradients = Sequence[Tensor | None]
Moved = Sequence[tuple[Tensor, Tensor]]
"""(tensor that the captured graph saved, the caller's tensor): eager saves the tensor object, and
its backward reads the memory that this has now."""

_HANDED = "hand it to `checkpoint` as an argument, or to a backward by `ctx.save_for_backward`"
_use_count: Callable[[int], int] = cast(Any, torch._C)._storage_Use_Count
_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = cast(
    Any, torch._C
)._autograd._unsafe_set_version_counter


class Edits(NamedTuple):
    """Changes to a caller's tensors between a forward and its backward."""

    changed: Collection[int]
    """Storages, in the recording, of tensors changed in place."""
    moved: Moved
    """Pairs for the caller's tensors that got other memory since, or of which there is no copy."""


@dataclass(slots=True)
class StaticGraph:
    """The autograd graph of a captured forward; each replay fills its saved tensors anew."""

    driver: Driver
    device: torch.device
    stream: object
    outputs: list[Tensor]
    inputs: list[Tensor]
    direct: int
    """Number of inputs, at the end, that are leaves to whose `.grad` the backward adds directly."""
    rewind: Rewind | None
    """Random state of the forward capture."""
    where: str | None = None
    """The line where the callable begins."""
    asking: Asking = field(default_factory=Asking)
    """Answers that the forward got about capturing; its recomputation gets the same."""
    reads: Reads | None = None
    """The reads of the forward."""
    compiled: bool = False
    """True for compiled code, which hides its operations, and whose backward runs no Python."""
    brought: Sequence[Tensor] = ()
    """The host values that the forward brought to the device."""
    rebound: list[Slot] = field(default_factory=list)
    """Slots in which each forward stores a tensor."""
    outlasting: list[Tensor] = field(default_factory=list)
    """Parameters, buffers and other tensors from before that it returns or stores, or views of
    which."""
    kept: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Tensors that `run` made and did not return."""
    stream_lock: AbstractContextManager[object] = field(default_factory=nullcontext[None])
    """Lock of a shared stream, held while anything runs or is captured on it."""

    def gradients(
        self, grads: Gradients, wanted: Sequence[bool] | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of all inputs, or of the `wanted` ones, by eager's operations."""
        chosen = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        places = [i for i in range(len(self.inputs)) if wanted is None or wanted[i]]
        found: list[Tensor | None] = [None] * len(self.inputs)
        if not places:
            return found
        with self.asking.answering():  # a checkpoint runs the forward once more
            given = torch.autograd.grad(
                [t for t, _ in chosen],
                [self.inputs[i] for i in places],
                [g for _, g in chosen],
                retain_graph=True,
                allow_unused=True,
            )
        for place, g in zip(places, given, strict=True):
            found[place] = g
        return found

    def edited(self, edits: Edits, grads: Gradients, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the wanted inputs as eager gives them, after edits.

        Raises:
            RuntimeError: torch's, if they depend on a tensor changed in place.
        """
        saved = CapturedGraph(self.outputs).saved()
        if saved is None and edits.changed:  # a node does not list its tensors: assume all
            raise RuntimeError(MODIFIED)
        read = [t for t in saved or () if self._storage(t) in edits.changed]
        before = [t._version for t in read]
        try:
            for t in read:
                torch.autograd.graph.increment_version(t)
            return self.run(grads, edits.moved, wanted)
        finally:
            _set_versions(tuple(read), tuple(before))
            for t in read:
                _ = t.grad_fn  # a view's is made anew after a change of version: here, in no run

    def rehearse(
        self, grads: Gradients, moved: Moved
    ) -> tuple[list[Tensor | None], Rehearsal | None]:
        """Do `run`, and return what a capture takes from it too."""
        if self.compiled:
            return self.run(grads, moved), None
        given = [*(g for g in grads if g is not None), *(t for _, t in moved)]
        rehearsal = Rehearsal(self.driver, self.device, self.outputs, given, self.reads)
        with HostFactories(self.device), rehearsal.watching():
            found = self.run(grads, moved, ledger=rehearsal.ledger)
        rehearsal.ledger.finish()
        return found, rehearsal

    def run(
        self,
        grads: Gradients,
        moved: Moved = (),
        wanted: Sequence[bool] | None = None,
        ledger: Ledger | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients, in memory of their own, computed operation by operation."""
        observer = Observer(self.driver, self.device, refuse=False)
        observer.ledger = ledger
        seeds = SeedsOfCapture(self.device, self.driver.capturing)

        def backward() -> list[Tensor | None]:
            taken: set[int] = set()
            try:
                with seeds, observer:
                    found = self.gradients(grads, wanted)
                    observer.ledger = None  # the copies are no part of the callable
                    made = [
                        None if g is None else _own_memory(g, observer, self.driver, taken)
                        for g in found
                    ]
                    return self.laid_out(made)
            finally:
                self.kept = list(observer.made_tensors)
                observer.release()

        with self.stream_lock, reading(moved):
            found = self.driver.warmup(backward, self.device, self.stream)
        given = {self._storage(g) for g in found}
        self.kept = [made for made in self.kept if self._storage(made()) not in given]
        return found

    def _storage(self, t: Tensor | None) -> int | None:
        if t is None or t.layout is not torch.strided or is_wrapped(t):
            return None
        return self.driver.storage(t)

    def stored(self) -> set[int | None]:
        """Return the storages that the next forward, or backward, stores other ones in place of:
        of tensors that a call made and stored."""
        values = [t for slot in self.rebound for t in flatten(slot.read()).tensors]
        values += [t for made in self.kept if (t := made()) is not None]
        found = {self._storage(t) for t in values if lies_on(t, self.device)}
        return found - set(map(self._storage, self.outlasting))

    def laid_out(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, with those of direct leaves in the layout of `.grad`."""
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
    """Name a backward in a trace."""
    return f"backward {sizes([g.shape for g in grads if g is not None])}"


class Backward:
    """A backward as one launch, for gradients of one layout.

    Under `kept` its gradients lie in its own memory, which nothing else writes: no copy, as long as
    nobody holds the gradients of its previous launch.

    Args:
        grads: the gradients of the call under capture; later ones have the same layout.
        moved: inputs of the forward that it reads where the caller has them. They come after the
            gradients at each launch.
        pool: under `kept` its own pool, or the pool of a chain's backwards.
        rehearsal: the same backward, before; without one no host values are lifted that the
            forward has not brought to the device.
        in_place: what kernels are to reach in the caller's memory, where that is proven.
    """

    def __init__(
        self,
        static: StaticGraph,
        grads: Gradients,
        moved: Moved,
        pool: DevicePool,
        *,
        kept: bool,
        rehearsal: Rehearsal | None = None,
        in_place: InPlace | None = None,
    ) -> None:
        driver = static.driver
        self._driver, self._device = driver, static.device
        self._kept = kept
        self.title = backward_title(grads)
        self.written: list[Tensor] = []
        self.finding: Finding | None = None
        lifted = None
        if static.device.type != "cpu" and (rehearsal is not None or static.compiled):
            # Compiled code brings what its forward has brought, or nothing.
            foreseen = static.brought if rehearsal is None else rehearsal.ledger.brought
            lifted = Lifted(static.device, foreseen)
        before = None if rehearsal is None else rehearsal.state()
        rollback = None if before is None else Rollback(before)

        def body(capture: Capture) -> list[Tensor | None]:
            statics = [None if g is None else _port(driver, capture, g) for g in grads]
            there = [(saved, _port(driver, capture, t)) for saved, t in moved]
            capture.staged()
            own = [*(t for t in statics if t is not None), *(t for _, t in there)]
            observer = Observer(driver, static.device, own, lifted=lifted)
            if rehearsal is not None:
                pairs = zip(grads, statics, strict=True)
                given = [(g, t) for g, t in pairs if g is not None and t is not None]
                given += [(t, port) for (_, t), (_, port) in zip(moved, there, strict=True)]
                observer.ledger = rehearsal.compared(given, pool)
            seeds = watching_seeds(observer.note_seeding)
            taken: set[int] = set()
            factories = HostFactories(static.device)
            reads = observer.host_reads()
            with reading(there), unwound(), seeds, reads, factories, observer:
                found = observer.outcome(static.gradients, statics)
                _refuse_sparse(found)
                compared, observer.ledger = observer.ledger, None
                made = static.laid_out(
                    [None if g is None else _own_memory(g, observer, driver, taken) for g in found]
                )
            observer.ledger = compared
            if before is not None:
                self.finding = Finding(observer, before, driver, static.device)
            _refuse_accumulated(observer, driver)
            for storage in observer.external.keys() & static.stored():
                spec = TensorSpec.of(observer.external[storage][0])
                what = f"a backward reads a tensor that the call has stored, {spec}"
                raise CaptureError("OL105", what, where=static.where, fix=_HANDED)
            self.written = [
                t
                for storage, t in observer.written.items()
                if storage in observer.version_bumped and not observer.known(t)
            ]
            if not kept:
                for g in made:
                    if g is not None:
                        size = (driver.region(g).nbytes,)
                        capture.output(driver.alias(g, torch.uint8, size, (1,), 0))
            return made if kept else [None if g is None else g.detach() for g in made]

        self.graph: Graph
        rewind = driver.rewind(static.device, after=static.rewind)
        with static.stream_lock, no_collection():
            while True:
                if lifted is not None:
                    lifted.make()
                try:
                    self.graph, made = driver.capture(
                        body, pool, stream=static.stream, bundled=True, rewind=rewind
                    )
                    if rehearsal is not None and before is not None:
                        self._settle(rehearsal, before)
                except CaptureError as error:
                    if rollback is not None:
                        rollback.restore()
                    if lifted is None or rehearsal is None or not lifted.misses():
                        raise
                    let_go(error)
                    continue
                if rewind.done:
                    break
                self.graph.reset()
            if in_place is not None and not rewind.used:
                self._reach(body, in_place, made if kept else (), static.stream)
            self._lifted = [] if lifted is None else list(lifted.used.values())
            self._made = made if kept else []
            self._targets = [] if kept else [None if g is None else _maker(driver, g) for g in made]
            self._storages = [g.untyped_storage()._cdata for g in self._made if g is not None]
            self._unused = self._counts()
            if any(count > 1 for count in self._unused):
                # A later collection of a cycle would change the counts. All of the capture is
                # young.
                gc.collect(0)
                self._unused = self._counts()

    def _settle(self, rehearsal: Rehearsal, before: StateWalk) -> None:
        """Free the recording and raise, if its run moved on the state that it read."""
        try:
            rehearsal.refuse_moved(before)
        except CaptureError:
            self.graph.reset()
            raise

    def _reach(
        self,
        body: Callable[[Capture], object],
        in_place: InPlace,
        made: Gradients,
        stream: object,
    ) -> None:
        """Let kernels read large inputs where the caller has them, as far as that is proven."""
        written, finding = self.written, self.finding
        filled = [g for g in made if g is not None]
        inputs = InPlace(in_place.inputs)
        with contextlib.suppress(CaptureError):  # it works with copies
            self.graph = self._driver.rebind(self.graph, body, written, (), inputs, filled, stream)
        self.written, self.finding = written, finding

    def _counts(self) -> list[int]:
        """Return the number of tensors over each gradient's memory."""
        return list(map(_use_count, self._storages))

    @property
    def fits(self) -> bool:
        """True if the state that the capture read is unchanged."""
        return self.finding is None or self.finding.guard.check()

    def available(self) -> bool:
        """Return whether nobody holds the gradients of the previous launch."""
        return not self._kept or self._counts() == self._unused

    def launched(self, grads: Gradients) -> list[Tensor | None] | None:
        """Run, or return None while somebody holds the gradients that it would overwrite."""
        return self.run(grads) if self.available() else None

    def run(self, grads: Gradients) -> list[Tensor | None]:
        """Launch. Raises `Released` if the recording was reset."""
        sources = [g for g in grads if g is not None]
        launch = self.graph.launch
        if profiler._is_profiler_enabled:
            launch = annotated(launch, f"onelaunch replay: {self.title}")
        if self._kept:
            launch(sources, ())
            found = [None if g is None else g.detach() for g in self._made]
        else:
            made = [None if make is None else make() for make in self._targets]
            launch(sources, [base for pair in made if pair for base in pair[:1]])
            found = [None if pair is None else pair[1] for pair in made]
        for t in self.written:
            if not t.is_inference():
                torch.autograd.graph.increment_version(t)
        return found


def _refuse_accumulated(observer: Observer, driver: Driver) -> None:
    """Refuse a backward that ran another inside, which gave a leaf its gradient."""
    given: list[Tensor] = []
    for t in [t for ts in observer.external.values() for t in ts if t.requires_grad and t.is_leaf]:
        g = read_gradient(t)
        if g is not None and (observer.made(g) or driver.storage(g) in observer.written):
            given.append(t)
            if observer.made(g):  # it had no gradient before
                t.grad = None
    if given:
        what = f"a backward inside gives a leaf of shape {list(given[0].shape)} its gradient"
        raise CaptureError("OL116", what)


def _refuse_sparse(gradients: Gradients) -> None:
    for g in gradients:
        if g is not None and g.layout is not torch.strided:
            raise CaptureError("OL109", f"a gradient of layout {g.layout}", fix=DENSE)


def _port(driver: Driver, capture: Capture, g: Tensor) -> Tensor:
    """Make an input port for a gradient; return the tensor over it."""
    region = driver.region(g)
    buffer = driver.empty(region.nbytes, g.device)
    static = driver.alias(buffer, g.dtype, g.shape, g.stride(), 0)  # kernels are chosen by strides
    if region.is_sparse(g):
        capture.input(g, static, Travel.COPY)
    else:
        capture.input(g, buffer, Travel.NODE)
    return static


def _maker(driver: Driver, g: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that makes memory for a gradient like `g`: (memory, the gradient over
    it)."""
    spec = TensorSpec.of(g)
    if spec.dense:
        allocate = driver.allocator(spec)

        def whole() -> tuple[Tensor, Tensor]:
            made = allocate()
            return made, made

        return whole
    nbytes, device = driver.region(g).nbytes, g.device

    def strided() -> tuple[Tensor, Tensor]:
        base = driver.empty(nbytes, device)
        return base, driver.alias(base, spec.dtype, spec.shape, spec.stride, 0)

    return strided


@functools.cache
def _one_owner() -> int:
    """Return the count of a storage that one tensor has, as torch counts its uses from Python."""
    return _use_count(torch.empty(1, device="cpu").untyped_storage()._cdata)


def _own_memory(t: Tensor, observer: Observer, driver: Driver, taken: set[int]) -> Tensor:
    """Return `t`, or a copy if it shares its memory: a gradient passed on, or returned twice.
    Memory that compiled code allocates is not observed, and counts as unshared."""
    if t.layout is not torch.strided or is_wrapped(t):
        return t.clone()
    storage = driver.storage(t)
    own = observer.made(t) or _use_count(t.untyped_storage()._cdata) == _one_owner()
    if t.numel() and (not own or storage in taken):
        t = t.clone()
        storage = driver.storage(t)
    taken.add(storage)
    return t

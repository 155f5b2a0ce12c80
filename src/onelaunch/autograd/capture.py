"""The capture of a backward; `AutogradPair.backward` decides when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onelaunch.autograd.backward import (
    Backward,
    Gradients,
    Moved,
    StaticGraph,
    backward_title,
    own_memory,
    reading,
)
from onelaunch.autograd.first_backward import BackwardComparison, FirstBackward, StateBefore
from onelaunch.autograd.graph_walk import DENSE
from onelaunch.call.spec import TensorSpec
from onelaunch.call.tree import flatten
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.protocol import Capture, DevicePool, Driver, Graph, InPlace, Rewind, Travel
from onelaunch.driver.refusals import DrawsAfterAll
from onelaunch.driver.schedule import Parallel
from onelaunch.driver.seeding import watching_seeds
from onelaunch.errors import CaptureError, let_go
from onelaunch.gc_pause import no_collection, out_of_reach
from onelaunch.state.slots import read_gradient
from onelaunch.unwinding import unwound
from onelaunch.watch.device_constants import DeviceConstants
from onelaunch.watch.observer import Observer

_HANDED = "hand it to `checkpoint` as an argument, or to a backward by `ctx.save_for_backward`"


@dataclass(eq=False)
class _Capturing:
    """A backward under capture, in one attempt or several; see `capture_backward`."""

    static: StaticGraph
    grads: Gradients
    caller_memory: Moved
    pool: DevicePool
    kept: bool
    before: StateBefore | None  # if a first run is known, with which this one is compared
    constants: DeviceConstants | None
    parallel: Parallel
    draws: bool  # True if a run drew from the device's default generator
    written: list[Tensor] = field(init=False)  # the effects of the last run; see `Backward`
    handed: list[tuple[int, Tensor]] = field(init=False)
    verdict: BackwardComparison | None = field(init=False)

    def body(self, capture: Capture) -> list[Tensor | None]:
        static, grads, driver = self.static, self.grads, self.static.driver
        statics = [None if g is None else _port(driver, capture, g) for g in grads]
        there = [(saved, _port(driver, capture, t)) for saved, t in self.caller_memory]
        capture.staged()
        own = [*(t for t in statics if t is not None), *(t for _, t in there)]
        observer = Observer(driver, static.device, own, constants=self.constants)
        observer.lanes, observer.admission.may_draw = capture.lanes, self.draws
        if self.before is not None:
            pairs = zip(grads, statics, strict=True)
            given = [(g, t) for g, t in pairs if g is not None and t is not None]
            given += [
                (t, port) for (_, t), (_, port) in zip(self.caller_memory, there, strict=True)
            ]
            observer.ledger = self.before.first_run.compared(given, capture)
        seeds = watching_seeds(observer.note_seeding)
        taken: set[int] = set()
        reads, factories = observer.host_reads, HostFactories(static.device)
        with reading(there), unwound(), seeds, reads, factories, observer, out_of_reach():
            gradients = observer.outcome(static.gradients, statics)
            for g in gradients:
                if g is not None and g.layout is not torch.strided:
                    raise CaptureError("OL109", f"a gradient of layout {g.layout}", fix=DENSE)
            compared, observer.ledger = observer.ledger, None
            if compared is not None:
                compared.handed_on(flatten(gradients).tensors)
            results = static.laid_out(
                [None if g is None else own_memory(g, observer, driver, taken) for g in gradients]
            )
        observer.ledger = compared
        self.verdict = self.before and BackwardComparison(observer, self.before)
        _refuse_accumulated(observer, driver)
        _refuse_stored(observer, static)
        static.overwritten.note(observer.memory.written)
        memory = observer.memory
        self.handed = [(i, t) for i, t in enumerate(own) if driver.storage(t) in memory.written]
        counted = memory.version_bumped - static.overwritten.saved
        self.written = [
            t for s, t in memory.written.items() if s in counted and not memory.is_own(t)
        ]
        if self.kept:
            return results
        for g in results:
            if g is not None:
                size = (driver.region(g).nbytes,)
                capture.output(driver.alias(g, torch.uint8, size, (1,), 0))
        return [None if g is None else g.detach() for g in results]

    def recorded(self, rewind: Rewind) -> tuple[Graph, list[Tensor | None]]:
        """Return the graph and its gradients, once an attempt needs no other."""
        driver, before = self.static.driver, self.before
        while True:
            if self.constants is not None:
                self.constants.make()
            try:
                graph, gradients = driver.capture(
                    self.body,
                    self.pool,
                    stream=self.static.stream,
                    bundled=True,
                    rewind=rewind,
                    parallel=self.parallel,
                    draws=self.draws,
                )
                try:
                    if before is not None:
                        before.refuse_effects()
                except CaptureError:
                    graph.reset()
                    raise
            except CaptureError as error:
                if before is not None:
                    before.restore()
                if isinstance(error, DrawsAfterAll) and not self.draws:
                    self.draws = True
                elif before is None or not (self.constants and self.constants.misses()):
                    raise
                let_go(error)
                continue
            if before and self.verdict and self.verdict.difference is not None:
                before.restore()  # it serves no call: eager runs
            if rewind.done:
                return graph, gradients
            graph.reset()


def capture_backward(
    static: StaticGraph,
    grads: Gradients,
    moved: Moved,
    pool: DevicePool,
    *,
    kept: bool,
    first_run: FirstBackward | None = None,
    in_place: InPlace | None = None,
    ahead: bool = False,
) -> Backward:
    """Capture a backward as one launch. Under `kept` its gradients lie in its own memory, which
    nothing else writes. They need no copy while nobody holds the gradients of its previous launch.

    Args:
        grads: the gradients of the call under capture; later ones have the same layout.
        moved: inputs of the forward that it reads where the caller has them. They come after the
            gradients at each launch.
        pool: under `kept` its own pool, or the pool of a chain's backwards.
        first_run: the same backward, before. Without it no host values are kept on the device,
            except those that the forward has copied there.
        in_place: the memory of the caller that kernels are to reach, where that is proven.
        ahead: true if no forward has filled the saved tensors yet, so that nothing may run.
    """
    driver, constants = static.driver, None
    if static.device.type != "cpu" and (first_run is not None or static.forward.compiled):
        # Compiled code brings the host values of its forward, or none.
        run = static.forward if first_run is None else first_run.ledger
        constants = DeviceConstants(static.device, run.copied_to_device)
    draws = first_run is not None and static.device.type in first_run.ledger.drawn
    parallel = static.forward.parallel
    capturing = _Capturing(
        *(static, grads, moved, pool, kept, first_run and StateBefore(first_run), constants),
        parallel="ahead" if ahead and parallel else parallel,
        draws=draws,
    )
    rewind = driver.rewind(static.device, after=static.rewind)
    with static.stream_lock, no_collection():
        graph, gradients = capturing.recorded(rewind)
        written, handed, verdict = capturing.written, capturing.handed, capturing.verdict
        if in_place is not None and not rewind.used and not handed:
            filled = [g for g in gradients if g is not None] if kept else []
            inputs = InPlace(in_place.inputs)
            with contextlib.suppress(CaptureError):  # it works with copies
                graph = driver.rebind(
                    graph, capturing.body, written, (), inputs, filled, static.stream
                )
        return Backward(
            graph,
            backward_title(grads),
            written,
            verdict,
            handed,
            _constants=[] if constants is None else list(constants.used.values()),
            _kept=gradients if kept else None,
            _targets=[] if kept else [None if g is None else _maker(driver, g) for g in gradients],
        )


def _refuse_stored(observer: Observer, static: StaticGraph) -> None:
    """Refuse a backward that reads a tensor which calls make and store."""
    for storage in observer.memory.external.keys() & static.stored():
        spec = TensorSpec.of(observer.memory.external[storage][0])
        what = f"a backward reads a tensor that the call has stored, {spec}"
        raise CaptureError("OL105", what, where=static.forward.where, fix=_HANDED)


def _refuse_accumulated(observer: Observer, driver: Driver) -> None:
    """Refuse a backward with another backward inside, which gave a leaf its gradient."""
    given: list[Tensor] = []
    memory = observer.memory
    for t in [t for ts in memory.external.values() for t in ts if t.requires_grad and t.is_leaf]:
        g = read_gradient(t)
        if g is not None and (memory.is_new(g) or driver.storage(g) in memory.written):
            given.append(t)
            if memory.is_new(g):  # it had no gradient before
                t.grad = None
    if given:
        what = f"a backward inside gives a leaf of shape {list(given[0].shape)} its gradient"
        raise CaptureError("OL116", what)


def _port(driver: Driver, capture: Capture, g: Tensor) -> Tensor:
    region = driver.region(g)
    buffer = driver.empty(region.nbytes, g.device)
    static = driver.alias(buffer, g.dtype, g.shape, g.stride(), 0)  # kernels are chosen by strides
    if region.is_sparse(g):
        capture.input(g, static, Travel.COPY)
    else:
        capture.input(g, buffer, Travel.NODE)
    return static


def _maker(driver: Driver, g: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that makes (memory, a gradient over it) for a gradient like `g`."""
    spec = TensorSpec.of(g)
    if spec.dense:
        allocate = driver.allocator(spec)

        def whole() -> tuple[Tensor, Tensor]:
            memory = allocate(spec.shape, spec.stride)
            return memory, memory

        return whole
    nbytes, device = driver.region(g).nbytes, g.device

    def strided() -> tuple[Tensor, Tensor]:
        base = driver.empty(nbytes, device)
        return base, driver.alias(base, spec.dtype, spec.shape, spec.stride, 0)

    return strided

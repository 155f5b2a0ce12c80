"""The runs of a callable before it is captured, and the facts that they show.

Libraries make their handles and choose their kernels, and the pool's allocator gets its memory. The
runs show whether the results require grad, and how much memory the capture will need.
`phase.Phases` decides how many there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.autograd.graph_walk import is_freed, is_pure_view
from onelaunch.autograd.proxies import NoHooks
from onelaunch.beside import begin_run, is_beside
from onelaunch.call.ambient import inlining, noted_modes
from onelaunch.call.containers import is_ordinary
from onelaunch.call.identity import exchanged
from onelaunch.call.kinds import kinds_in
from onelaunch.call.spec import has_strides, overlaps_itself
from onelaunch.call.tree import Flat, Same, constants, flatten, flatten_call, unflatten
from onelaunch.capture.callee import Callee
from onelaunch.capture.io_plan import is_filled
from onelaunch.capture.rolled_back import rolled_back
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError, let_go
from onelaunch.gc_pause import no_collection
from onelaunch.optimizers.capturable import (
    capturable,
    is_of_torch,
    noting_steps,
    refusal,
    settle,
    watching_steps,
)
from onelaunch.runtime.candidate import Candidate, OneWarmup, SignatureStatus
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager
from onelaunch.source import user_line
from onelaunch.state.iterators import advanced, iterators_of
from onelaunch.state.slots import MISSING, gradient_of, is_leaf, node_of
from onelaunch.state.snapshot import ReachableState, tensors_by_storage
from onelaunch.state.walk import Change, StateWalk, is_replaced
from onelaunch.uncompiled import leave_ours_alone
from onelaunch.unwinding import same_modes
from onelaunch.watch.compiled_accesses import CompiledAccesses, contents_of, places, watching
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.ledger_mode import LedgerMode
from onelaunch.watch.observer import Observer

Refuse = Callable[[SignatureStatus, CaptureError], object]
"""The reaction to a signature that cannot be captured: raises, or lets it run eagerly."""


_DETACHED = "write values without gradients, `self.total += loss.detach()`"


class Warmup:
    """The warm-up of a callable.

    Args:
        pool: estimates the memory that a recording will need.
    """

    def __init__(self, callee: Callee, options: Options, pool: PoolManager) -> None:
        self._callee = callee
        self._options = options
        self._pool = pool
        self.drawn: set[str] | None = None
        """See `Ledger.drawn`: of the latest run, if its operations were noted."""
        self.notes_all: bool | None = None
        """True if the operations of all runs are noted, False if of none, which then count for no
        warm-up; None if of the last alone."""

    def run(
        self, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any], refuse: Refuse
    ) -> Any:
        """Run one of the caller's own first calls."""
        leave_ours_alone()
        driver, status = candidate.driver, candidate.status
        earlier = status.ledger
        try:
            with same_modes() as modes, watching_lasting_effects(candidate, self._callee):
                hidden = self._callee.is_compiled(driver)
                if hidden and not self.foresees_capture(candidate):
                    status.accesses = None
                accesses = status.accesses
                if hidden and accesses is None:
                    with self._stepping(status, refuse):
                        watched = functools.partial(self._watched, candidate, args, kwargs)
                        result = _its_stream(candidate)(watched)()
                elif accesses is None or accesses.refused is not None:
                    result = self._called(candidate, args, kwargs, refuse)
                else:
                    tensors, changed = _on_device(candidate)
                    own = exchanged(candidate.flat.tree, (args, kwargs), tensors, changed)
                    with own as (args, kwargs):
                        result = self._called(candidate, args, kwargs, refuse)
        except CaptureError as error:
            let_go(error)  # and of the graph that the run made on the stream of captures
            raise
        ledger = status.ledger
        self.drawn = None if ledger is earlier or ledger is None else ledger.drawn
        status.warmups += self.notes_all is not False
        status.threads.add(get_ident())
        reads = self._callee.reads
        if reads is not None and reads.takes_functions is not None:
            modes.restore()  # torch's guards around such an operator turned them on again
        candidate.reached.drop_tensors()  # for the next walk, which the caller makes
        return result

    def _called(
        self, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any], refuse: Refuse
    ) -> Any:
        """Run the callable, or Inductor's version of it, as it will be captured."""
        driver, device, status = candidate.driver, candidate.device, candidate.status
        run = functools.partial(self._callee.captured_form(driver), *args, **kwargs)
        last = status.warmups + 1 >= status.enough_warmups(self._options.enough_warmups)
        estimates, on_its_stream = last and not _trains(candidate), _its_stream(candidate)
        accesses = status.accesses
        if not self._callee.is_compiled(driver):
            conditions = self._stepping(status, refuse)
            run = self._noted(candidate, run, last if self.notes_all is None else self.notes_all)
        elif accesses is not None:
            conditions = accesses.noting(driver, device, _now(candidate))
        else:
            conditions = nullcontext()
        candidate.reached.drop_tensors()  # memory that the run replaces is to be free at once
        run = on_its_stream(run)
        with inlining(), conditions:
            if not estimates:
                return run()
            # The last: nothing is new any more.
            result, status.need_bytes = self._pool.run_and_estimate(
                driver, device, run, candidate.flat.tensors
            )
            return result

    def _noted(self, candidate: Candidate, run: Callable[[], Any], last: bool) -> Callable[[], Any]:
        """Return a run with its reads noted in the first warm-up, its operations in the `last`."""
        step_aside = None
        if last:
            run = NotedRun(candidate, run)
            step_aside = run.step_aside
        first = not candidate.status.warmups and candidate.status.one_warmup is not OneWarmup.ENOUGH
        if first or self._callee.reads is None:  # the capture sees the rest
            run = self._callee.with_read_watch(run, candidate.device, step_aside)
        return run

    def _watched(self, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run code whose operations are hidden eagerly, and note its reads and writes."""
        device, status = candidate.device, candidate.status
        before = candidate.reached.walk()
        held = tensors_by_storage(candidate.driver, device, before)
        named = places(candidate.flat.tensors, before)
        observer = watching(candidate.driver, device, candidate.flat.tensors, held)
        try:
            run = functools.partial(self._callee.eager_form, *args, **kwargs)
            with ExitStack() as conditions:
                conditions.enter_context(observer.host_reads)
                conditions.enter_context(HostFactories(device, _steps(candidate), masks=False))
                if _trains(candidate):
                    conditions.enter_context(NoHooks(observer.note_refusal))
                conditions.enter_context(observer)
                conditions.enter_context(status.capture_answer.in_force())
                result = self._callee.with_read_watch(run, device, conditions.close)()
            accesses = self._accesses(candidate, observer, named, result, before)
        finally:
            observer.release()
        accesses.refuse_unseen()
        if _creates_state(candidate.reached.changed(before)[1]):
            status.warmups -= 1  # an optimizer's first step: the next call shows what it reads
        else:
            accesses.note_contents(self._callee.reached(candidate.flat).walk())
            status.accesses = accesses
            status.draws = observer.admission.has_drawn
        return result

    def _accesses(
        self,
        candidate: Candidate,
        observer: Observer,
        named: Iterable[tuple[object, Tensor]],
        result: Any,
        before: StateWalk,
    ) -> CompiledAccesses:
        """Return the accesses of an eager run in place of compiled code. Refuse host tensors among
        its results and in its state: compiled code cannot hand them on."""
        stored = [change.after for change in candidate.reached.changed(before)[1]]
        if any(map(observer.host.is_held_on_device, flatten([result, stored]).tensors)):
            fix = "compute and return it outside of the callable, or pass it on the device"
            what = "a host tensor is returned or stored"
            observer.note_refusal(CaptureError("OL104", what, where=user_line(), fix=fix))
        unseen = self._callee.unseen()
        if unseen is not None:
            observer.note_refusal(unseen)
        return CompiledAccesses.of(observer, named, contents_of(before))

    def _stepping(self, status: SignatureStatus, refuse: Refuse) -> AbstractContextManager[None]:
        """Return a context for a warm-up that watches optimizers. Before an optimizer steps it is
        made capturable, if the options ask for that, or refused if it cannot be captured."""

        def before(optimizer: Optimizer) -> None:
            if self._options.capturable and is_of_torch(optimizer):
                with suppress(CaptureError):  # no option makes it capturable
                    capturable(optimizer)
            error = refusal(optimizer)
            if error is None:
                settle(optimizer)
            elif status.refusal.code is None:
                refuse(status, error)

        return watching_steps(before)

    def foresees_capture(self, candidate: Candidate) -> bool:
        """Return whether the warm-ups show all facts for a capture of this call. Compiled code has
        to warm up again if its state has changed since."""
        if not self._callee.is_compiled(candidate.driver):
            return True
        accesses = candidate.status.accesses
        return accesses is not None and accesses.holds_for(candidate.reached.walk())

    def rehearse(
        self,
        candidate: Candidate,
        refuse: Refuse,
        then: Callable[[Any], object] = lambda result: None,
    ) -> list[Change]:
        """Warm up without a call, and restore everything. Return the changes of the run.

        Args:
            then: called with the result of the run; may write whatever the run may write.
        """
        callee, driver, device = self._callee, candidate.driver, candidate.device
        status, flat, reached = candidate.status, candidate.flat, candidate.reached
        args, kwargs = unflatten(flat.tree, flat.tensors)
        before = reached.walk()
        named = places(flat.tensors, before)
        on_its_stream = _its_stream(candidate)
        undone = rolled_back(driver, device, flat.tensors, reached, lambda: callee.reads)
        with undone as effects:
            observer = effects.observer
            shown = functools.partial(callee.eager_form, *args, **kwargs)
            run = NotedRun(candidate, shown, not callee.is_compiled(driver), observer)
            run = callee.with_read_watch(run, device)
            begin_run()
            reads = observer.host_reads
            with self._stepping(status, refuse), reads, observer, inlining():
                run = on_its_stream(run)
                with watching_lasting_effects(candidate, callee):
                    if _trains(candidate):
                        result, need = run(), 0
                    else:
                        result, need = self._pool.run_and_estimate(
                            driver, device, run, flat.tensors
                        )
                if status.refusal.error is not None:
                    refuse(status, status.refusal.error)
                after = flatten_call(args, kwargs, kinds_in(flat.tree))
                status.has_backward = wants_grad(driver, result, after, callee.reached(after))
                then(result)
            accesses = None
            if callee.is_compiled(driver):
                accesses = self._accesses(candidate, observer, named, result, before)
                status.accesses = accesses
                callee.note_result(result)
                result = None
            status.need_bytes = max(0, need - observer.memory.saved_bytes)
            status.threads.add(get_ident())
            if accesses is not None and accesses.refused is None:
                args, kwargs = unflatten(flat.tree, _on_device(candidate)[0])
                compiled = functools.partial(callee.captured_form(driver), *args, **kwargs)
                run = on_its_stream(compiled)
                for _ in range(2):
                    effects.restore()  # Dynamo compiles for the state that it finds
                    begin_run()
                    with accesses.noting(driver, device, _now(candidate)):
                        run()
        if accesses is not None:
            accesses.note_contents(callee.reached(flat).walk())
            if device.type != "cpu":  # where what `torch.tensor` makes is memory like any other
                accesses.refuse_unseen()
        elif callee.reads is not None:  # the capture begins where this run did
            callee.note_state_after(reached, flat, result, before, effects.left)
        callee.note_result(result)
        return effects.changes


def _on_device(candidate: Candidate) -> tuple[list[Tensor], set[int]]:
    """Return the tensors of a call as its capture has them, and the indices of host numbers. Host
    numbers are 0-dim host tensors, here copied to the device."""
    device, tensors = candidate.device, candidate.flat.tensors
    numbers = {i for i, t in enumerate(tensors) if is_filled(t, device)}
    return [t.to(device) if i in numbers else t for i, t in enumerate(tensors)], numbers


class NotedRun:
    """A run under the conditions of a capture, with its operations noted for comparison.

    Args:
        masks: see `HostFactories`.
        observer: a mode that is on and sees the operations, too.
    """

    def __init__(
        self,
        candidate: Candidate,
        run: Callable[[], Any],
        masks: bool = True,
        observer: Observer | None = None,
    ) -> None:
        tensors = candidate.flat.tensors
        pairs = list(zip(tensors, tensors, strict=True))
        walked = candidate.reached.walk()
        self._candidate = candidate
        self._run = run
        self._factories = HostFactories(candidate.device, _steps(candidate), masks)
        self._ledger = Ledger(candidate.driver, candidate.device, pairs, walked)
        self._observer = observer
        self._conditions = ExitStack()

    def __call__(self) -> Any:
        candidate, ledger = self._candidate, self._ledger
        with self._conditions as conditions:
            conditions.enter_context(no_collection())  # collected as seldom as in the capture
            conditions.enter_context(self._factories)
            conditions.enter_context(candidate.status.capture_answer.in_force())
            conditions.enter_context(noting_steps(ledger))
            if self._observer is None:
                conditions.enter_context(LedgerMode(ledger))
            else:
                conditions.callback(setattr, self._observer, "ledger", None)
                self._observer.ledger = ledger
            result = self._run()
        flat = flat_result(result, candidate.reached)
        ledger.handed_on(flat.tensors, flat.tree)
        ledger.finish()
        candidate.status.ledger = ledger
        candidate.status.draws = candidate.device.type in ledger.drawn
        return result

    def step_aside(self) -> None:
        """End the conditions, as an operator that takes functions cannot run under them."""
        self._conditions.close()


def flat_result(result: Any, reached: ReachableState) -> Flat:
    """Flatten the result of a run, and objects in it that the run made."""
    flat = flatten(result, "result")
    if any(is_ordinary(type(c.value)) for _, c in constants(flat.tree) if c.by_identity):
        whole = {id(v): Same(v, None) for _, v in reached.walk().all_slots.values()}
        flat = flatten(result, "result", objects="made", whole=whole)
    return flat


@contextmanager
def watching_lasting_effects(candidate: Candidate, callee: Callee) -> Generator[None]:
    """Return a context for a run. The next run is refused after a run that leaves a mode changed,
    advances an iterator, or gives a tensor of the state a graph."""
    changed = noted_modes()
    before = candidate.reached.walk()
    tensors = [(slot.name, t) for slot, t in before.tensors() if not t._is_view()]
    leaves = [(name, ref(t)) for name, t in tensors if is_leaf(t)]
    iterators, reads = iterators_of(before), candidate.reached.reads
    del before
    yield
    if iterators and reads is None:  # the first run: not all that was reached is read
        read = {slot.id for slot, *_ in iterators_of(callee.reached(candidate.flat).walk())}
        iterators = [iterator for iterator in iterators if iterator[0].id in read]
    graded = (name for name, t in leaves if (now := t()) is not None and not is_leaf(now))
    if not is_beside() and (names := changed()):  # by other threads
        error = CaptureError("OL119", f"it leaves changed: {names}")
    elif name := next(graded, None):
        what = f"`{name}` is written with values that require grad"
        error = CaptureError("OL113", what, fix=_DETACHED)
    else:
        error = advanced(iterators, callee.codes)
    if error is not None:
        refusal = candidate.status.refusal
        refusal.error, refusal.training = error, callee.training


def _now(candidate: Candidate) -> dict[object, Tensor]:
    """Return the tensors of a call by their places, for `CompiledAccesses`."""
    return dict(places(candidate.flat.tensors, candidate.reached.walk()))


def _its_stream(candidate: Candidate) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Return a function that puts a run on its stream. Threads of an eager call have streams of
    their own, so it stays on the caller's. A callable with a backward inside runs on the capture's
    stream. Its AccumulateGrad nodes stay on their first stream while somebody keeps the loss, and
    may be in the capture."""
    if torch.is_grad_enabled() and candidate.reached.walk().runs_backward():
        return lambda run: functools.partial(
            candidate.driver.run_on_capture_stream, run, candidate.device
        )
    return lambda run: run


def _trains(candidate: Candidate) -> bool:
    """Return whether a call seems to be a forward whose backward will run outside."""
    if not torch.is_grad_enabled():
        return False
    walked = candidate.reached.walk()
    if walked.runs_backward():
        return False
    tensors = [*candidate.flat.tensors, *(t for _, t in walked.tensors())]
    return any(t.requires_grad for t in tensors)


def _steps(candidate: Candidate) -> bool:
    """Return whether a call is known to run its backward itself, or to have none."""
    walked = candidate.reached.walk()
    return not torch.is_grad_enabled() or (walked.reads is not None and walked.runs_backward())


def wants_grad(driver: Driver, result: Any, flat: Flat, reached: ReachableState) -> bool:
    """Return whether a result requires grad, by a graph that a backward can still use. Mere views
    of the caller's memory do not count, except views of an expanded tensor: see `_through_node`.

    Args:
        flat, reached: the arguments and the state after the run.
    """
    tensors = [t for t in flatten(result).tensors if t.grad_fn is not None and not is_freed(t)]
    if not tensors:
        return False
    given = [*flat.tensors, *(t for _, t in reached.walk().tensors())]
    ids = set(map(id, given))
    tensors = [t for t in tensors if id(t) not in ids]
    viewed = [t for t in given if has_strides(t) and not overlaps_itself(t)]
    storages = set(map(driver.storage, viewed))
    ends = {node_of(t) for t in given}
    return any(driver.storage(t) not in storages or not is_pure_view(t, ends) for t in tensors)


def _creates_state(changes: Sequence[Change]) -> bool:
    """Return whether a slot that was empty now holds a tensor other than a gradient. A container in
    the place of another has slots of its own, which do not count."""
    replaced = {change.slot.id for change in changes if change.before is not MISSING}
    return any(
        isinstance(after, torch.Tensor)
        and before is MISSING
        and slot.key is not gradient_of
        and not is_replaced(slot, replaced)
        for slot, before, after in changes
    )

"""Recordings of a callable: captured for a call, or ahead of it, or taken over from another
request's objects."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from onelaunch.beside import is_beside
from onelaunch.call.ambient import ambient, refresh_mode_flag
from onelaunch.call.numbers import numbers_read
from onelaunch.call.tree import flatten, unique
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.checks import BackwardInside, refuse_lazy
from onelaunch.capture.io_plan import CannotPadInside
from onelaunch.capture.numbers import NumbersToFollow, Unfollowed
from onelaunch.capture.recording import CapturedCall, ExpectedInputs, NeedsGrad, describe
from onelaunch.capture.rolled_back import refuse_lasting
from onelaunch.capture.run import CaptureJob, NeedsTheCaller
from onelaunch.capture.session import CaptureSession
from onelaunch.driver.protocol import InPlace
from onelaunch.errors import CaptureError, CaptureSignal, let_go, letting_go
from onelaunch.gc_pause import no_collection
from onelaunch.optimizers.capturable import StepOptions
from onelaunch.runtime import answers
from onelaunch.runtime.candidate import UNPADDED, Call, Candidate, SignatureStatus, Strategy
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager, PoolMember
from onelaunch.runtime.ranks import NotAllReady, Ranks
from onelaunch.runtime.requests import Requests, locked, memory_uses, requests_in, shares, take_over
from onelaunch.runtime.signature import Signatures, opaque, spec_of
from onelaunch.runtime.table import Table, TableEntry
from onelaunch.runtime.warmup import Warmup, watching_lasting_effects
from onelaunch.runtime.why import backward_inside, no_room, why
from onelaunch.source import user_line
from onelaunch.trace_names import named, sizes
from onelaunch.unwinding import TorchSettings

if TYPE_CHECKING:
    from onelaunch.autograd.chain import Chain
    from onelaunch.runtime.graphed import Graphed

_LEAST_BYTES = 1 << 20  # the least bytes of a tensor that are worth a proof that it needs no copy


class CannotCaptureHere(CaptureError):
    """The refusal of a place or moment in which no callable can be captured."""


@dataclass(slots=True, eq=False)
class Recorder:
    """The maker of the recordings of one callable. `table`: gets the recordings that are made ahead
    of a call or taken over."""

    _name: str
    _options: Options
    _pool: PoolManager
    _callee: Callee
    _table: Table
    _signatures: Signatures
    _ranks: Ranks
    warmup: Warmup = field(init=False)
    requests: Requests = field(default_factory=Requests)

    def __post_init__(self) -> None:
        self.warmup = Warmup(self._callee, self._options, self._pool)

    def at_own_size(self, candidate: Candidate) -> Candidate:
        """Return the candidate for a warm-up after a refused capture: at the call's own size."""
        flat = self._signatures.flat(candidate.args, candidate.kwargs)
        candidate.reached.drop_tensors()  # the walk is kept, as the refused capture was rolled back
        return replace(candidate, flat=flat, reached=self._callee.reached(flat))

    def record(self, candidate: Candidate, owner: Graphed[..., Any]) -> TableEntry | None:
        """Return a recording in the pool; None if the pool's `max_bytes` leaves no room for it.
        See `Ranks.record` for a callable of several processes."""
        return self._ranks.record(
            lambda: self._record(candidate, owner), lambda entry: self._pool.free(entry.pool_member)
        )

    def _record(self, candidate: Candidate, owner: Graphed[..., Any]) -> TableEntry | None:
        strategy = candidate.strategy
        refuse_lazy(candidate.reached.walk())
        strategy.prepare(candidate)
        try:
            entry = self._record_in_pool(candidate, owner)
        except CannotPadInside:
            strategy.pad_outside()
            entry = self._record_in_pool(candidate, owner)
        if entry is not None:
            candidate.status.history.launches = None
            candidate.status.history.shrinks |= entry.captured.compared.resized
        return entry

    def _record_in_pool(self, candidate: Candidate, owner: Graphed[..., Any]) -> TableEntry | None:
        driver, device, need_bytes = candidate.driver, candidate.device, candidate.status.need_bytes
        with self._pool.lease(driver, device, need_bytes, owner._user) as lease:
            while lease.has_room:
                entry = self._capture(candidate, owner)
                if lease.keep(entry.pool_member):
                    return entry
                entry.undo()
                del entry  # before the next capture, which needs its memory
        return None

    def _capture(self, candidate: Candidate, owner: Graphed[..., Any]) -> TableEntry:
        """Capture a call, and return the recording with its call path."""
        status, spec, flat = candidate.status, candidate.spec, candidate.flat
        candidate.reached.know(self._callee.reads)
        request_tensors = unique(flatten(requests_in(spec.tree), objects=True).tensors)
        uses = memory_uses(request_tensors)
        reason = status.history.why or why(self._table.entries, spec, flat.tensors)
        job = self._job(candidate)
        session, following, replaced = CaptureSession(job), job.following, job.replaced
        with named(f"onelaunch capture: {self._name} {sizes([t.shape for t in flat.tensors])}"):
            captured = session.record(flat.tree, flat.tensors)
        status.draws = job.draws
        self._signatures.replacements.note_recorded(replaced, job.replaced)
        if not session.serves_one_call:
            self._signatures.varied.note_recorded(following, job.following)
        refresh_mode_flag()
        distributed.reset_before_shutdown(owner, captured.graph)
        entry = self._entry(candidate, job, captured, reason)
        entry.undo = session.undo
        if request_tensors:
            entry.shares = shares(uses, request_tensors, self._table.entries)
        if request_tensors or captured.followed.of_state:
            # No other thread may write these between the checks of a call and its launch.
            entry.call = locked(entry.call, entry.lock)
        return entry

    def _entry(
        self, candidate: Candidate, job: CaptureJob, captured: CapturedCall, reason: str
    ) -> TableEntry:
        status, spec, flat = candidate.status, candidate.spec, candidate.flat
        if status.history.launches is not None:
            captured.launches = status.history.launches
        captured.clock = self._pool.clock
        captured.guard = self._table.shared(captured.guard)
        captured.expected = ExpectedInputs.of(captured)
        call = candidate.strategy.call_path(captured, spec, self._name)
        if job.forward is not None:
            kept_bytes = captured.graph.memory_bytes
        elif job.pool is self._pool.on(candidate.driver, candidate.device):
            kept_bytes = job.pool.kept_bytes(
                captured.graph, [*captured.statics, *captured.kept_gradients]
            )
        else:
            kept_bytes = job.pool.memory_bytes
        figures = describe(self._name, captured, spec, flat, reason, kept_bytes)
        captured.inputs.tensors = []  # the caller's
        unguarded = captured.followed.keys | {*captured.stored}
        status.history.options = StepOptions(captured.optimizers, unguarded)
        self._table.counts.captured(captured.facts.seconds)
        pair = captured.pair
        busy = (lambda: False) if pair is None else lambda: pair.in_flight
        if self._ranks.several:
            busy = lambda: True  # noqa: E731  the others would not know of an eviction
        forget = weakref.WeakMethod(self._table.evicted)
        member = PoolMember(job.pool, captured.graph, captured.launches, kept_bytes, forget, busy)
        return TableEntry(call, spec, status, flat.paths, captured, figures, member)

    def _job(self, candidate: Candidate) -> CaptureJob:
        """Return the job of capturing a call, from the options and the facts of its warm-up."""
        driver, device, status = candidate.driver, candidate.device, candidate.status
        callee, options, plain = self._callee, self._options, candidate.strategy is UNPADDED
        raises, hidden = options.on_refusal == "raise", callee.is_compiled(driver)
        new_pool, forward = functools.partial(self._pool.separate, driver, device), None
        if status.has_backward:
            from onelaunch.capture.forward import Forward  # inference needs none of it

            direct = options.gradients == "direct" and not distributed.initialized()
            top = callee.state_root
            limit = self._pool.keep_within
            forward = Forward(driver, device, new_pool, limit, top, raises, direct, candidate.chain)
        following = NumbersToFollow()
        replaced = () if hidden or not plain else self._signatures.replacements.expected()
        if forward is None and not hidden:
            following = self._signatures.varied.following(candidate.spec, self._table.entries)
        elif numbers := numbers_read(candidate.spec.tree):
            raise Unfollowed(numbers)
        if is_beside() and (forward is not None or replaced or following):
            raise NeedsTheCaller("stand-ins take the place of its state")
        if is_beside() and status.draws:
            raise NeedsTheCaller("it draws random numbers")
        return CaptureJob(
            driver=driver,
            device=device,
            pool=self._pool.on(driver, device) if forward is None else forward.pool,
            new_pool=new_pool,
            callee=callee,
            reached=candidate.reached,
            static_outputs=options.outputs == "static" and forward is None,
            in_place=self._in_place(candidate),
            capture_answer=status.capture_answer,
            earlier=None if hidden else status.ledger,
            studied=candidate.studied,
            differed_in_a_row=status.history.differed if candidate.ahead or raises else None,
            shrinks=status.history.shrinks,
            accesses=status.accesses if hidden else None,
            forward=forward,
            wrap_for_capture=candidate.strategy.captured,
            varying=candidate.strategy.varying,
            follows=candidate.strategy.follows,
            following=following,
            replaced=replaced,
            parallel=options.parallel,
            draws=status.draws,
        )

    def _in_place(self, candidate: Candidate) -> InPlace | None:
        """Return the memory of the caller that kernels are to reach; None: none."""
        every = self._options.inputs == "rebind"
        if distributed.initialized():
            return None  # a proof launches what other processes do not
        if self._callee.in_place and not candidate.strategy.varying:
            return InPlace(0 if every else _LEAST_BYTES, _LEAST_BYTES)
        return InPlace(0) if every and not candidate.status.has_backward else None

    def take_over(self, call: Call) -> bool:
        """Give the recordings of an earlier request's objects to a new request's, if possible."""
        present, displaced = self._table.entries, self.requests.displaced
        if not present:
            return False
        spec = spec_of(call)
        known = self._signatures.statuses.get(spec)
        refused = known is not None and (known.refusal.code or known.refusal.error)
        if refused or any(e.spec == spec for e in present):
            return False
        successors, outdated, objects = take_over(call, present, spec, displaced, self._name)
        for entry in outdated:
            self._table.drop(entry)
        if not successors:
            return False
        old = set(map(id, objects))
        status = next(iter(successors.values())).status
        with self._table.lock:
            self._table.keep(successors.get(id(e), e) for e in self._table.entries)
            recorded = {id(e.status) for e in self._table.entries}
            for key, other in list(self._signatures.statuses.items()):
                unrecorded = id(other) not in recorded
                of_old = any(id(value) in old for value in requests_in(key.tree))
                if other is status or (unrecorded and of_old):
                    del self._signatures.statuses[key]
            self._signatures.statuses[spec] = status
            # What is read of the new objects is not known before a run over them.
            status.warmups = min(status.warmups, self._options.enough_warmups - 1)
            self._signatures.newest.clear()
        self.requests.displace(objects)
        return True

    # Ahead of a call.

    @letting_go()
    def capture_ahead(
        self,
        owner: Graphed[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        strategy: Strategy = UNPADDED,
        chain: Chain | None = None,
        then: Callable[[Any], object] | None = None,
    ) -> None:
        """Record the signature of a call ahead of it; see `Graphed.capture`.

        Args:
            strategy: how sizes are padded.
            chain: the chain under capture, if this callable is a part of it.
            then: called with the result of the warm-up, which is not left out for it.
        """
        kwargs = dict(kwargs)
        flat = self._signatures.flat(args, kwargs)
        reason = ambient()
        reached = self._callee.reached(flat)
        driver, device = self._callee.driver_and_device(flat, reached)
        if reason is not None or driver.capturing():
            what = f"cannot capture here: {reason or 'a capture is running'}"
            raise CannotCaptureHere("OL109", what)
        unequal = opaque(flat)
        if unequal is not None:
            raise CaptureError("OL302", unequal)
        with driver.exclusive(), no_collection():
            call = Call(args, kwargs, flat, driver, device, strategy)
            spec = spec_of(call)
            status = self._signatures.status(spec).for_case(self._callee.training, reached)
            if any(e.spec == spec and e.captured.guard.check() for e in self._table.entries):
                return
            self._table.drop_stale(spec, status)
            refuse_lazy(reached.walk())
            refused = distributed.refused_ahead(distributed.sharded_values(reached.values))
            if refused is not None:
                raise refused
            if len(self._table.entries) >= self._options.max_recordings:
                what = f"{len(self._table.entries)} recordings exist"
                raise CaptureError("OL301", what, where=user_line())
            candidate = Candidate(*call, spec, status, reached, ahead=True, chain=chain)
            works_elsewhere = False

            def learn(result: Any) -> None:
                nonlocal works_elsewhere
                works_elsewhere = self._callee.ran_elsewhere(flat, device, result)
                if then is not None and not works_elsewhere:
                    then(result)

            try:
                entry = None if then is not None else self._record_as_studied(candidate, owner)
                if entry is None:
                    with self._ranks.noting_ahead():
                        self._rehearse(candidate, owner, learn)
                    if works_elsewhere:
                        self.capture_ahead(owner, args, kwargs, strategy, chain, then)
                        return
                    entry = self._record_ahead(candidate, owner)
                while entry is not None and entry.ran_differently:
                    self._table.drop_unsettled(entry)
                    entry = self._record_ahead(candidate, owner)
            except BackwardInside:
                raise backward_inside(status.kept_graph) from None
            if entry is None:
                raise no_room(self._name, candidate, self._pool)
            status.refusal.code = None
            status.agreed()
            self._table.add(entry)

    def _record_as_studied(
        self, candidate: Candidate, owner: Graphed[..., Any]
    ) -> TableEntry | None:
        """Record a call without a warm-up, if a recording for other sizes has shown the run; None
        if there is none, or the capture does otherwise or fails, as by a library's first use."""
        status, spec = candidate.status, candidate.spec
        more_to_learn = self._ranks.several or self._pool.max_bytes or candidate.chain is not None
        if (
            more_to_learn
            or candidate.strategy is not UNPADDED
            or self._callee.is_compiled(candidate.driver)
        ):
            return None
        sizeless = spec.without_sizes()
        studied = next(
            (
                entry.captured.compared.ledger
                for entry in self._table.entries
                if entry.spec.without_sizes() == sizeless
                and get_ident() in entry.status.threads
                and entry.captured.shows_other_sizes()
                and entry.captured.guard.check()
            ),
            None,
        )
        if studied is None:
            return None
        settings = TorchSettings()
        try:
            with watching_lasting_effects(candidate, self._callee):
                entry = self.record(replace(candidate, studied=studied), owner)
            status.threads.add(get_ident())
        except (CaptureError, CaptureSignal) as error:
            let_go(error)
            entry = None
        finally:
            settings.restore()
        if entry is not None:
            entry.undo()
            if status.refusal.error is None:
                return entry
            self._pool.free(entry.pool_member)
        candidate.reached.forget()
        return None

    def _record_ahead(self, candidate: Candidate, owner: Graphed[..., Any]) -> TableEntry | None:
        if candidate.status.has_backward and self._table.others_run():
            raise CannotCaptureHere(
                "OL109",
                "cannot capture here: another thread is in an eager run",
                fix="capture before the threads call it",
            )
        try:
            entry = self.record(candidate, owner)
            if entry is not None:
                entry.undo()  # there is no call that its run would be
            return entry
        except NotAllReady:
            pass
        except NeedsGrad as error:
            candidate.status.has_backward, candidate.status.kept_graph = True, error.kept_graph
        except CaptureError as error:
            if self._ranks.several or not candidate.status.capture_answer.switch_to_yes():
                raise
            candidate.reached.forget()
            unlike = answers.compare(self._callee, candidate, self._name, error)
            if unlike is not None:
                raise unlike from None
            self._rehearse(candidate, owner, lambda result: None)
        return self._record_ahead(candidate, owner)

    def _rehearse(
        self, candidate: Candidate, owner: Graphed[..., Any], then: Callable[[Any], object]
    ) -> None:
        """Warm up without a call, and call `then` with the result. Raises `CaptureError`: OL110,
        the callable stores new tensors in Python state."""
        candidate.strategy.rehearse(
            candidate, lambda: refuse_lasting(self.warmup.rehearse(candidate, _raise, then))
        )


def _raise(_: SignatureStatus, error: CaptureError) -> None:
    """Refuse a recording ahead of calls, whatever `on_refusal` says of calls."""
    raise error

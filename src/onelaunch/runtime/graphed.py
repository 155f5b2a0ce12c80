"""Graphed: the choice, for each call, of replay, warm-up, capture or an eager run."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import get_ident
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from onelaunch.autograd.chain import Chain
from onelaunch.autograd.pair import packing
from onelaunch.call.ambient import ambient, note_modes, runs_inline
from onelaunch.call.tree import Flat
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.forward import BackwardInside, Forward
from onelaunch.capture.recording import NeedsGrad, describe
from onelaunch.capture.session import CaptureSession
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError
from onelaunch.gc_pause import collection_kept, no_collection
from onelaunch.optimizers.capturable import Options as StepOptions
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.attempt import (
    AS_IT_IS,
    Attempt,
    Eager,
    Phase,
    Ready,
    Refused,
    SignatureState,
    Strategy,
    Warming,
)
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager, User
from onelaunch.runtime.requests import requests_in, tensors_in
from onelaunch.runtime.serving import Serving
from onelaunch.runtime.signature import foreign, opaque, spec_of
from onelaunch.runtime.table import (
    Entry,
    in_flight,
    member_of,
    mismatch,
    moving_in,
    refuse_moving,
    varying,
    why,
)
from onelaunch.runtime.takeover import locked, memory_uses, shares
from onelaunch.runtime.ungraphed import (
    backward_inside,
    grad_in_no_grad,
    naming_split,
)
from onelaunch.runtime.warmup import Warmup, wants_grad
from onelaunch.source import user_line
from onelaunch.state.snapshot import ReachableState
from onelaunch.watch.ledger import TRIES
from onelaunch.watch.operations import HigherOrder

P = ParamSpec("P")
R = TypeVar("R")

_OF_FUNCTIONS = frozenset(
    {"__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"}
)


class Graphed(Serving, Generic[P, R]):
    """A callable that runs as one launch once it is warm. Made by `graph`.

    A call runs the original, warms up, captures or replays, whichever is due; see `graph`.
    Safe to call from several threads.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        options: Options,
        pool: PoolManager | None = None,
        root: tuple[str, object] | None = None,
        callee: Callee | None = None,
    ) -> None:
        super().__init__(getattr(fn, "__name__", type(fn).__name__), options, pool or PoolManager())
        self.fn = fn
        dynamic = options.buckets is not None
        self._callee = callee or Callee(fn, options.compile, dynamic, root)
        self._warmup = Warmup(self._callee, options, self._pool)
        self._chain: Chain | None = None
        """The chain that is being captured, of which this callable is a part."""
        self._running: list[int] = []
        """The threads in an eager run: a capture of a forward replaces parameters by stand-ins for
        a moment, and such a run would use these."""
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if runs_inline():
            return self.fn(*args, **kwargs)
        for entry in self._entries:
            result = entry.call(args, kwargs)
            if result is not MISS:
                return result
        return self._miss(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the graphed function that torch.export reads."""
        if name in _OF_FUNCTIONS:
            return getattr(inspect.unwrap(self.fn), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind as a method, as the function would be, with this object's attributes."""
        return self if owner is None else types.MethodType(self, owner)

    # The way to a recording.

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Warm up, capture, or run eagerly: no recording fits the call."""
        with collection_kept():
            return self._graphed_or_eager(args, kwargs)

    def _graphed_or_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        note_modes()
        flat = self._flat(args, kwargs)
        driver, device = self._callee.where(flat)
        if driver.capturing() or foreign(flat.tensors) is not None or packing():
            return self.fn(*args, **kwargs)
        with driver.exclusive():
            for entry in self._entries:  # recorded by another thread in the meantime?
                result = entry.call(args, kwargs)
                if result is not MISS:
                    return result
            result = self._advance(driver, device, flat, args, kwargs)
            if result is MISS:
                self._enter_eager()
        return self._eager(args, kwargs) if result is MISS else result

    def _enter_eager(self) -> None:
        """Count a run by `_eager`; call it while no other thread captures."""
        self._counts.eager_calls += 1
        self._running.append(get_ident())

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the callable itself, in a thread that has entered itself in `_running`.

        This holds no lock: threads that the callable starts may wait for each other.
        """
        try:
            return self._as_it_is(args, kwargs)
        finally:
            self._running.remove(get_ident())

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return self.fn(*args, **kwargs)

    def _advance(
        self,
        driver: Driver,
        device: torch.device,
        flat: Flat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strategy: Strategy = AS_IT_IS,
    ) -> R | Miss:
        """Warm up, or capture and replay; return `MISS` if the call is to run eagerly."""
        requests = requests_in(flat.tree) if strategy is AS_IT_IS else []
        if requests:
            fleeting = self._is_new(requests)
            self._set_apart(requests)
            if self._take_over(driver, device, flat):
                for entry in self._entries:
                    result = entry.call(args, kwargs)
                    if result is not MISS:
                        return result
            elif fleeting:
                return MISS
        match self._phase(driver, device, flat, strategy):
            case Eager(code, why):
                if code:
                    self._warn(code, why)
                return MISS
            case Refused(signature, error):
                return self._refused(signature, error)
            case Warming(attempt):
                now = self._flat(args, kwargs)  # at its own size, where `flat` is padded
                return self._warm(replace(attempt, flat=now), args, kwargs)
            case Ready(attempt):
                return self._recorded(attempt, args, kwargs)

    def _phase(self, driver: Driver, device: torch.device, flat: Flat, strategy: Strategy) -> Phase:
        """Return the phase of the signature of a call that no recording fits."""
        unequal = opaque(flat)
        if unequal is not None:
            return Eager("OL302", f"{unequal}: runs eagerly")
        spec = spec_of(driver, flat, device)
        signature = self._signatures.get(spec)
        if signature is None:
            alike = strategy.alike(self._entries)
            if self.options.on_mismatch == "raise" and alike:
                raise mismatch(self._name, alike[0], spec)
            if len(self._signatures) >= 4 * self.options.max_recordings:
                many = varying(self._name, self._entries, len(self._signatures), spec)
                return Eager("OL301", many)
            signature = self._signatures[spec] = SignatureState()
            self._note_new(spec, flat, signature)
        reached = self._callee.reached(flat)
        if (
            signature.parts is not None
        ):  # a gradient was replaced, so it counts which leaves have one
            signature = signature.part(reached.walk())
        if signature.eager is not None or signature.backoff.waits():
            return Eager()
        if distributed.is_unsharded(reached.values):
            return Eager()
        self._drop_stale(spec, signature)  # recordings whose parameters moved: recorded anew
        refused = self._refusal(signature, reached) or refuse_moving(
            self._name, self._entries, spec
        )
        if refused is not None:
            return Refused(signature, refused)
        waiting = in_flight(self._entries, spec)
        if waiting >= self.options.max_in_flight:
            return Eager("OL305", f"{waiting} forwards of `{self._name}` wait for their backward")
        attempt = Attempt(driver, device, spec, signature, flat, reached, strategy)
        cold = signature.warm < max(self.options.warmup_calls, signature.least) and not waiting
        if cold or get_ident() not in signature.threads:
            return Warming(attempt)
        if len(self._entries) >= self.options.max_recordings:
            count = len(self._signatures)
            return Eager("OL301", varying(self._name, self._entries, count, spec, flat.tensors))
        if signature.forward and any(ident != get_ident() for ident in self._running):
            return Eager()  # that thread would meet the proxies of the capture
        return Ready(attempt)

    def _recorded(
        self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> R | Miss:
        """Capture a call and replay it; return `MISS` if that is not possible."""
        signature = attempt.signature
        try:
            entry = self._record(attempt)
        except NeedsGrad:  # not seen in the warm-up
            if not torch.is_grad_enabled():
                return self._ungraphed(signature, grad_in_no_grad())
            signature.forward = True
            return MISS
        except BackwardInside:
            return self._ungraphed(signature, backward_inside())
        except CaptureError as error:
            if not signature.asking.otherwise():
                return self._refused(signature, error)
            signature.warm = max(0, self.options.warmup_calls - 1)
            flat = self._flat(args, kwargs)
            again = replace(attempt, flat=flat, reached=self._callee.reached(flat))
            unlike = self._warmup.compare_answers(again, self._name, error)
            if unlike is not None:
                return self._refused(signature, unlike)
            return self._warm(again, args, kwargs)
        if entry is None and self._pool.lacks_room_for(signature.need_bytes):
            signature.backoff.defer()
            return MISS
        if entry is None:
            return self._ungraphed(signature, CaptureError("OL304", self._no_room(attempt)))
        moves = bool(moving_in(entry.captured))  # the next value needs one call to warm up, no more
        signature.warm = max(0, self.options.warmup_calls - 1) if moves else 0
        result = entry.call(args, kwargs)
        if result is MISS:  # state that it relies on was changed, by another thread or the capture
            unfit = self._drop_unfit(entry, attempt)
            if unfit is None:
                return MISS
            return self._ungraphed(signature, CaptureError("OL307", unfit))
        signature.unfit = 0
        differs = entry.captured.differs
        if entry.unsettled:  # this call is done, as it was captured
            if not self._drop_unsettled(entry) and differs is not None:
                self._ungraphed(signature, differs.refusal())
            return result
        signature.agreed()
        self._note_alone(entry)
        self._drop_followed(entry)
        self._add(entry)
        return result

    def _refusal(self, signature: SignatureState, reached: ReachableState) -> CaptureError | None:
        """Return the refusal of a signature, as far as it shows before a capture; or None."""
        if signature.warm == 0 and not self._entries:  # modules of several processes
            values = distributed.where_spread(reached.values)
            signature.least = distributed.least_warmup(values)
            refused = distributed.refused_step(values)
            if refused is not None:
                return refused
        reads = self._callee.reads
        if reads is not None and reads.takes_functions is not None:
            return HigherOrder(reads.takes_functions)
        restless = signature.options.restless() if signature.options is not None else None
        return None if restless is None else CaptureError("OL123", f"{restless} changes")

    def _refused(self, signature: SignatureState, error: CaptureError) -> Miss:
        if self.options.on_refusal == "raise":
            raise naming_split(error, self._callee.root[1], self.options)
        return self._ungraphed(signature, error)

    def _warm(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R | Miss:
        """Run one of the caller's own first calls as a warm-up."""
        driver, signature = attempt.driver, attempt.signature
        try:
            result = self._warmup.run(attempt, args, kwargs, self._refused)
        except HigherOrder as error:
            return self._refused(signature, error)
        self._counts.warmup_calls += 1
        after = self._flat(args, kwargs)
        self._keep_whole(attempt.flat, after)
        reached = self._callee.reached(after)
        if self._callee.learn(attempt.flat, attempt.device, result, reached):
            signature.warm -= 1  # it did not run on the stream that will capture
            return result
        if wants_grad(driver, result, after, reached):
            signature.forward = True
            refused = distributed.refused_pair(distributed.where_spread(reached.values))
            if refused is not None:
                self._refused(signature, refused)
            elif not torch.is_grad_enabled():
                self._ungraphed(signature, grad_in_no_grad())
        return result

    def _rehearse(self, attempt: Attempt, then: Callable[[Any], object]) -> None:
        """Warm up without a call, and call `then` with the result."""
        attempt.strategy.rehearse(
            attempt, lambda: self._warmup.rehearse(attempt, self._refused, then)
        )

    @property
    def _user(self) -> User:
        """The callable that the pool asks for the figures of the recordings."""
        return self

    def _record(self, attempt: Attempt) -> Entry | None:
        """Return a recording in the pool; None if the pool's `max_bytes` leaves no room for it."""

        def admitted() -> Entry | None:
            return self._pool.admit(
                attempt.driver,
                attempt.device,
                attempt.signature.need_bytes,
                lambda: self._captured(attempt),
                self._user,
            )

        entry = attempt.strategy.record(attempt, admitted)
        if entry is not None:
            attempt.signature.launches = None
        return entry

    def _captured(self, attempt: Attempt) -> Entry:
        driver, device, signature = attempt.driver, attempt.device, attempt.signature
        spec, flat = attempt.spec, attempt.flat
        attempt.reached.know(self._callee.reads)
        owners = tensors_in(requests_in(spec.tree))
        before = memory_uses(owners)
        reason = signature.why or why(self._entries, spec, flat.tensors)
        forward = None
        if signature.forward:
            raises = self.options.on_refusal == "raise"
            direct = self.options.gradients == "direct" and not distributed.initialized()
            root = self._callee.root[1]
            forward = Forward(driver, device, self._pool, root, raises, direct, self._chain)
        hidden = self._callee.hidden(driver)
        recorder = CaptureSession(
            driver=driver,
            device=device,
            pool=self._pool.on(driver, device) if forward is None else forward.pool,
            apart=lambda: self._pool.apart(driver, device),
            callee=self._callee,
            fn=self._callee.on(driver),
            reached=attempt.reached,
            asking=signature.asking,
            static_outputs=self.options.outputs == "static" and forward is None,
            rebind=self.options.inputs == "rebind" and forward is None,
            earlier=None if hidden else signature.ledger,
            strict=signature.differing + 1 >= TRIES
            and (attempt.ahead or self.options.on_refusal == "raise"),
            known=signature.known if hidden else None,
            forward=forward,
            varying=attempt.strategy.varying,
            follows=attempt.strategy.follows,
            counting=self._counting(spec) if forward is None and not hidden else (),
        )
        captured = recorder.record(flat.tree, flat.tensors)
        note_modes()
        distributed.shutdown.watch(self, captured.graph)
        if signature.launches is not None:
            captured.launches = signature.launches
        captured.clock = self._pool.clock
        captured.guard = self._shared(captured.guard)
        call = attempt.strategy.call_path(captured, spec, self._name)
        if forward is not None:
            kept = captured.graph.memory_bytes
        elif recorder.pool is self._pool.on(driver, device):
            kept = recorder.pool.kept_bytes(captured.graph, [*captured.statics, *captured.lasting])
        else:
            kept = recorder.pool.memory_bytes
        info = describe(self._name, captured, spec, flat, reason, kept)
        captured.inputs.tensors = []
        signature.options = StepOptions(captured.optimizers, captured.scalars.keys)
        self._counts.captured(captured.seconds)
        member = member_of(captured, recorder.pool, kept, weakref.WeakMethod(self._evicted))
        entry = Entry(call, spec, signature, flat.paths, captured, info, member)
        if owners:
            entry.shares = shares(before, owners, self._entries)
            entry.call = locked(call, entry.lock)
        return entry

    def _ungraphed(self, signature: SignatureState, why: CaptureError) -> Miss:
        signature.eager = why.code
        why.where = why.where or user_line()
        self._warn(why.code, why.warning("this signature runs eagerly"))
        return MISS

    # For users.

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Record the signature of this call ahead of time, without making the call.

        The callable runs once to warm up and once to be captured; then every tensor that it wrote
        and the random state are restored. Costs about two eager calls and the capture.

        Raises:
            CaptureError: it cannot be captured; OL110 if it stores new tensors in Python state
                (a cold optimizer: run one real step first).
        """
        try:
            self._capture_in(None, args, kwargs, lambda result: None)
        except CaptureError as error:
            raise naming_split(error, self._callee.root[1], self.options)  # noqa: B904

    def _capture_in(
        self,
        chain: Chain | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        then: Callable[[Any], object],
        strategy: Strategy = AS_IT_IS,
    ) -> None:
        """Do `capture_in`; without a chain, do `capture`."""
        kwargs = dict(kwargs)
        flat = self._flat(args, kwargs)
        reason = ambient()
        reached = self._callee.reached(flat)
        driver, device = self._callee.where(flat, reached)
        if reason is not None or driver.capturing():
            raise CaptureError("OL109", f"cannot capture here: {reason or 'a capture is running'}")
        unequal = opaque(flat)
        if unequal is not None:
            raise CaptureError("OL302", unequal)
        with driver.exclusive(), no_collection():
            spec = spec_of(driver, flat, device)
            signature = self._signatures.setdefault(spec, SignatureState())
            if any(e.spec == spec and e.captured.guard.check() for e in self._entries):
                return
            self._drop_stale(spec, signature)
            refused = distributed.refused_ahead(distributed.where_spread(reached.values))
            if refused is not None:
                raise refused
            if len(self._entries) >= self.options.max_recordings:
                what = f"{len(self._entries)} recordings exist"
                raise CaptureError("OL301", what, where=user_line())
            self._chain = chain
            attempt = Attempt(driver, device, spec, signature, flat, reached, strategy, ahead=True)
            works_elsewhere = False

            def learn(result: Any) -> None:
                nonlocal works_elsewhere
                works_elsewhere = self._callee.learn(flat, device, result)
                if not works_elsewhere:
                    then(result)

            try:
                self._rehearse(attempt, learn)
                if works_elsewhere:
                    self._capture_in(chain, args, kwargs, then, strategy)
                    return
                entry = self._record_ahead(attempt)
                while entry is not None and entry.unsettled:
                    self._drop_unsettled(entry)
                    entry = self._record_ahead(attempt)
            except BackwardInside:
                raise backward_inside() from None
            finally:
                self._chain = None
            if entry is None:
                raise CaptureError("OL304", self._no_room(attempt))
            signature.eager = None
            signature.agreed()
            self._add(entry)

    def _record_ahead(self, attempt: Attempt) -> Entry | None:
        try:
            return self._record(attempt)
        except NeedsGrad:
            attempt.signature.forward = True
        except CaptureError as error:
            if not attempt.signature.asking.otherwise():
                raise
            attempt.reached.forget()
            unlike = self._warmup.compare_answers(attempt, self._name, error)
            if unlike is not None:
                raise unlike from None
            self._rehearse(attempt, lambda result: None)
        return self._record_ahead(attempt)

    def __repr__(self) -> str:
        return f"<onelaunch.Graphed {self._name}, recordings: {len(self._entries)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphed[P, R]:
        root = copy.deepcopy(self._callee.root, memo)
        return type(self)(copy.deepcopy(self.fn, memo), self.options, None, root)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fn, self.options, None, self._callee.root)


def like(graphed: Graphed[P, R], fn: Callable[P, R]) -> Graphed[P, R]:
    """Graph another callable over the same state, with the same options and pool."""
    return type(graphed)(fn, graphed.options, graphed._pool, graphed._callee.root)


def capture_in(
    graphed: Graphed[..., Any],
    chain: Chain,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    then: Callable[[Any], object],
) -> None:
    """Do `Graphed.capture` as a part of a chain; call `then` with the result of the warm-up."""
    graphed._capture_in(chain, args, kwargs, then)

"""`graph`: a callable in, the same callable out, running as one launch."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch.optim import Optimizer

from onelaunch import distributed
from onelaunch.autograd import packing
from onelaunch.callpath import MISS, build_call
from onelaunch.collection import no_collection
from onelaunch.compiled import compiled
from onelaunch.driver.driver import Driver, Varying
from onelaunch.driver.select import preserved_random_state, select
from onelaunch.errors import CATALOGUE, CaptureError, GraphWarning, ReplayError
from onelaunch.forward import BackwardInside, Forward
from onelaunch.guard import StateGuard
from onelaunch.observe import Observer
from onelaunch.optimizers import Options as StepOptions
from onelaunch.optimizers import refusal, settle, watching_steps
from onelaunch.options import Options
from onelaunch.padding import Follow
from onelaunch.pool import Comeback, Member, Pool
from onelaunch.recorder import Recorder
from onelaunch.recording import Captured, NeedsGrad, Recording, describe
from onelaunch.signature import foreign, opaque, spec_of
from onelaunch.slots import MISSING, gradient_of
from onelaunch.spec import CallSpec, ambient
from onelaunch.spent import is_spent
from onelaunch.state import Change, Walk, changes, walk
from onelaunch.stats import Counts, GraphStats, recording_stats
from onelaunch.training import WARMING, in_flight, inlining, trains
from onelaunch.tree import Flat, call_constants, flatten, flatten_call, is_plain

P = ParamSpec("P")
R = TypeVar("R")

_TRIALS = 5
"""Replays that policy="measure" times before it decides."""

_C: Any = torch._C


@dataclass(slots=True, eq=False)
class _Entry:
    """A recording in the table."""

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    spec: CallSpec
    paths: Sequence[str]
    captured: Captured
    info: Recording
    guard: StateGuard
    member: Member


@dataclass(slots=True)
class _Signature:
    """What is known of a signature, recorded or not."""

    warm: int = 0
    forward: bool = False
    """Whether its results require grad, so that it is captured as a forward with a backward."""
    threads: set[int] = field(default_factory=lambda: cast(set[int], set()))
    """Who warmed up: cuBLAS and cuDNN make a handle for each thread, and not under capture."""
    least: int = 0
    """Warm-up calls that what it reaches needs, whatever the option says."""
    eager: str | None = None
    """Why it runs eagerly for good, or None."""
    eager_us: list[float] = field(default_factory=lambda: cast(list[float], []))
    known: Observer | None = None
    why: str | None = None
    launches: list[int] | None = None
    """The count of a recording that this signature's next one takes the place of."""
    need_bytes: int = 0
    """What a recording needs in a pool of its own, as far as a warm-up showed; or 0."""
    comeback: Comeback = field(default_factory=Comeback)
    options: StepOptions | None = None
    """Of the optimizers that step in the last recording."""
    parts: dict[tuple[bool, ...], _Signature] | None = None
    """By which leaves have a gradient, once a recording was dropped because one was replaced."""

    def part(self, walked: Walk) -> _Signature:
        """The signature with the gradients of now, if they count."""
        if self.parts is None:
            return self
        empty = tuple(t.grad is None for _, t in walked.tensors() if t.is_leaf and t.requires_grad)
        if empty not in self.parts:  # the first goes on where this one was
            part = _Signature(self.warm, threads=self.threads, why=self.why, launches=self.launches)
            self.parts[empty] = part
            self.warm, self.launches = 0, None
        return self.parts[empty]


class Graphed(Generic[P, R]):
    """A callable that runs as one launch once it is warm. Made by `graph`.

    Calling it calls the original, warms up, captures or replays, whichever is due; see `graph`.
    Safe from several threads.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        options: Options,
        pool: Pool | None = None,
        root: tuple[str, object] | None = None,
    ) -> None:
        self.fn = fn
        self.options = options
        self._name: str = getattr(fn, "__name__", type(fn).__name__)
        self._pool = pool or Pool()
        self._entries: tuple[_Entry, ...] = ()
        self._signatures: dict[CallSpec, _Signature] = {}
        self._warned: set[str] = set()
        self._counts = Counts()
        self._lock = threading.RLock()
        self._root = root or (getattr(fn, "__name__", "callable"), fn)
        self._compiled: Callable[..., Any] | None = None
        self._running: list[int] = []
        """The threads in an eager run: a capture of a forward puts stand-ins in the place of
        parameters, and such a run would take them for the parameters."""
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or (WARMING and get_ident() in WARMING):
            return self.fn(*args, **kwargs)
        if (
            _dispatch_modes()
            or _function_modes()
            or _functorch() is not None
            or _forward_ad._current_level >= 0
            or _anomaly()
            or _tracing() is not None
        ) and ambient() is not None:
            return self.fn(*args, **kwargs)
        for entry in self._entries:
            result = entry.call(args, kwargs)
            if result is not MISS:
                return result
        return self._miss(args, kwargs)

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """As a method: bound like the function that it stands for."""
        return self if owner is None else functools.partial(cast(Any, self), owner)

    # The way to a recording.

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """A call that no recording fits: warm up, capture, or run eagerly."""
        flat = flatten_call(args, kwargs)
        driver, device = self._where(flat)
        if driver.capturing():
            return self.fn(*args, **kwargs)
        if foreign(flat.tensors) is not None or packing():
            return self.fn(*args, **kwargs)
        with driver.exclusive():
            for entry in self._entries:  # recorded by another thread in the meantime?
                result = entry.call(args, kwargs)
                if result is not MISS:
                    return result
            result = self._advance(driver, device, flat, args, kwargs)
            if result is MISS:
                self._counts.eager_calls += 1
                self._running.append(get_ident())
        return self._eager(args, kwargs) if result is MISS else result

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the callable itself, in a thread that has entered itself in `_running`.

        It holds no lock: threads of the callable's own may wait for each other.
        """
        try:
            return self.fn(*args, **kwargs)
        finally:
            self._running.remove(get_ident())

    def _where(self, flat: Flat) -> tuple[Driver, torch.device]:
        """The driver and device: an accelerator's if any argument, parameter or buffer is there."""
        driver, device = select(flat.tensors)
        if device.type == "cpu":
            driver, device = select(t for _, t in walk(self._roots(flat)).tensors())
        return driver, device

    def _advance(
        self,
        driver: Driver,
        device: torch.device,
        flat: Flat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """Warm up or capture; `MISS` where the call is to run eagerly."""
        unequal = opaque(flat)
        if unequal is not None:
            self._warn("OL302", f"{unequal}: runs eagerly")
            return MISS
        spec = spec_of(driver, flat, device)
        signature = self._signatures.get(spec)
        if signature is None:
            if self.options.on_mismatch == "error" and self._alike():
                raise self._mismatch(spec)
            if len(self._signatures) >= 4 * self.options.max_recordings:
                self._warn("OL301", self._varying(spec))
                return MISS
            signature = self._signatures[spec] = _Signature()
        if signature.parts is not None:
            signature = signature.part(walk(self._roots(flat)))
        if signature.eager is not None or signature.comeback.waits():
            return MISS
        self._drop_stale(spec, signature)
        if signature.warm == 0 and not self._entries:
            refused = self._spread(signature, flat)
            if refused is not None:
                return self._refused(signature, refused)
        restless = signature.options.restless() if signature.options is not None else None
        if restless is not None:
            return self._refused(signature, CaptureError("OL123", f"{restless} changes"))
        flying = in_flight(self._entries, spec)
        if flying >= self.options.max_in_flight:
            self._warn("OL305", f"{flying} forwards of `{self._name}` wait for their backward")
            return MISS
        cold = signature.warm < max(self._warmup, signature.least) and not flying
        if cold or get_ident() not in signature.threads:
            return self._warm(driver, device, signature, args, kwargs)
        if len(self._entries) >= self.options.max_recordings:
            self._warn("OL301", self._varying(spec))
            return MISS
        if signature.forward and any(ident != get_ident() for ident in self._running):
            return MISS
        try:
            entry = self._record(driver, device, spec, signature, flat)
        except NeedsGrad:  # not seen in the warm-up
            if not torch.is_grad_enabled():
                return self._ungraphed(signature, "OL303", "results require grad in no_grad mode")
            signature.forward = True
            return MISS
        except BackwardInside:
            return self._ungraphed(
                signature, "OL303", "a backward runs inside, or a leaf is made for one"
            )
        except CaptureError as error:
            return self._refused(signature, error)
        if entry is None and self._pool.crowded:
            signature.comeback.put_off()
            return MISS
        if entry is None:
            return self._ungraphed(signature, "OL304", f"{self._pool!r}")
        signature.warm = 0
        result = entry.call(args, kwargs)
        if result is MISS:  # another thread changed what it relies on in the meantime
            entry.captured.graph.reset()
            return MISS
        self._entries = (entry, *self._entries)
        return result

    def _reached(self, flat: Flat) -> list[object]:
        return [value for _, value in walk(self._roots(flat)).held.values()]

    def _spread(self, signature: _Signature, flat: Flat) -> CaptureError | None:
        """What modules of several processes ask for, seen at the first call of a signature."""
        reached = self._reached(flat)
        signature.least = distributed.least_warmup(reached)
        return distributed.refused_step(reached)

    def _refused(self, signature: _Signature, error: CaptureError) -> Any:
        if self.options.on_refusal == "raise":
            raise error
        return self._ungraphed(signature, error.code, str(error))

    def _stepping(self, signature: _Signature) -> AbstractContextManager[None]:
        """Around a warm-up: refuse an optimizer before it steps, if no capture could hold it."""

        def before(optimizer: Optimizer) -> None:
            error = refusal(optimizer)
            if error is None:
                settle(optimizer)
            elif signature.eager is None:
                self._refused(signature, error)

        return watching_steps(before)

    def _warm(
        self,
        driver: Driver,
        device: torch.device,
        signature: _Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """One of the caller's own first calls, on the stream that will capture."""
        measured = self.options.policy == "measure"
        if measured:
            driver.synchronize(device)
        started = perf_counter()
        callee = self._callee(driver)
        if self.options.compile and signature.known is None:
            with self._stepping(signature):
                result = driver.warmup(
                    lambda: self._watched(driver, device, signature, args, kwargs), device
                )
        else:
            flat = flatten_call(args, kwargs)
            here = trains(callee, flat, self._roots(flat))
            run = functools.partial(callee, *args, **kwargs)
            stepping = self._stepping(signature) if callee is self.fn else nullcontext()
            with inlining(), stepping:
                if here:
                    result = run()
                elif signature.warm + 1 < self._warmup:
                    result = driver.warmup(run, device)
                else:  # the last: nothing is new any more
                    result, signature.need_bytes = self._pool.warmup(
                        driver, device, run, flat.tensors
                    )
        if measured:
            driver.synchronize(device)
            signature.eager_us.append((perf_counter() - started) * 1e6)
        signature.warm += 1
        self._counts.warmup_calls += 1
        signature.threads.add(get_ident())
        if self._wants_grad(driver, result, args, kwargs):
            signature.forward = True
            refused = distributed.refused_pair(self._reached(flatten_call(args, kwargs)))
            if refused is not None:
                self._refused(signature, refused)
            elif not torch.is_grad_enabled():
                signature.eager = "OL303"
                self._warn("OL303", "results require grad in no_grad mode: runs eagerly")
            elif callee is not self.fn:
                signature.eager = "OL303"
                self._warn("OL303", "compile=True, and the results require grad: runs eagerly")
        return result

    def _wants_grad(
        self, driver: Driver, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether new memory of a result requires grad, by a graph that a backward can still use;
        views of the caller's memory may."""
        tensors = [t for t in flatten(result).tensors if t.grad_fn is not None and not is_spent(t)]
        if not tensors:
            return False
        flat = flatten_call(args, kwargs)
        given = [*flat.tensors, *(t for _, t in walk(self._roots(flat)).tensors())]
        storages = {driver.region(t).storage for t in given if t.layout is torch.strided}
        return any(driver.region(t).storage not in storages for t in tensors)

    def _watched(
        self,
        driver: Driver,
        device: torch.device,
        signature: _Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """An eager run that learns what Inductor's kernels will not show."""
        tensors = flatten_call(args, kwargs).tensors
        here = [t for t in tensors if t.device.type == device.type]
        observer = Observer(driver, device, here, refuse=False)
        roots = self._roots(flatten_call(args, kwargs))
        before = walk(roots)
        with observer:
            result = self.fn(*args, **kwargs)
        observer.release()
        if any(_creates_state(change) for change in changes(before, walk(roots))):
            signature.warm -= 1  # an optimizer's first step: the next call shows what it reads
        else:
            signature.known = observer
        return result

    def _callee(self, driver: Driver) -> Callable[..., Any]:
        """What runs in warm-up and capture: the callable, or Inductor's version of it."""
        if not self.options.compile or driver.name != "cuda":
            return self.fn
        if self._compiled is None:
            self._compiled = compiled(self.fn, self.options.compile)
        return self._compiled

    def _rehearse(
        self,
        driver: Driver,
        device: torch.device,
        signature: _Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Warm up ahead of time: run, then put everything back as it was."""
        flat = flatten_call(args, kwargs)
        here = [t for t in flat.tensors if t.device.type == device.type]
        before = walk(self._roots(flat))
        observer = Observer(driver, device, here, save=True, refuse=False)
        with preserved_random_state(device):
            try:
                run = functools.partial(self.fn, *args, **kwargs)
                with self._stepping(signature), observer, inlining():
                    if trains(self.fn, flat, self._roots(flat)):
                        result, need = run(), 0
                    else:
                        result, need = self._pool.warmup(driver, device, run, flat.tensors)
                signature.forward = self._wants_grad(driver, result, args, kwargs)
                del result
                signature.need_bytes = max(0, need - observer.saved_bytes)
                signature.threads.add(get_ident())
                if self.options.compile:
                    signature.known = observer
                    for _ in range(2):
                        driver.warmup(lambda: self._callee(driver)(*args, **kwargs), device)
            finally:
                observer.restore()
                found = changes(before, walk(self._roots(flat)))
        for change in reversed(found):
            change.slot.write(change.before)
        lasting = [c for c in found if c.slot.key is not gradient_of]
        if lasting:
            names = ", ".join(f"`{c.slot.name}`" for c in lasting[:3])
            raise CaptureError("OL110", f"the callable rebinds {names}")
        observer.release()

    def _record(
        self,
        driver: Driver,
        device: torch.device,
        spec: CallSpec,
        signature: _Signature,
        flat: Flat,
    ) -> _Entry | None:
        """A recording in the pool; None where the pool's `max_bytes` leaves no room for it."""
        entry = self._pool.admit(
            driver,
            device,
            signature.need_bytes,
            lambda: self._captured(driver, device, spec, signature, flat),
            self,
        )
        if entry is not None:
            signature.launches = None
        return entry

    def _captured(
        self,
        driver: Driver,
        device: torch.device,
        spec: CallSpec,
        signature: _Signature,
        flat: Flat,
    ) -> _Entry:
        why = signature.why or self._why(spec)
        callee = self._callee(driver)
        forward = None
        if signature.forward:
            raises = self.options.on_refusal == "raise"
            forward = Forward(driver, device, self._pool, self._root[1], raises)
        pool = forward.pool if forward else self._pool.on(driver, device)
        recorder = Recorder(
            driver=driver,
            device=device,
            pool=pool,
            fn=callee,
            roots=self._roots(flat),
            static_outputs=self.options.outputs == "static" and forward is None,
            rebind=self.options.inputs == "rebind" and forward is None,
            known=signature.known if callee is not self.fn else None,
            forward=forward,
            varying=self._varying_arguments(),
            follows=self._followed(),
        )
        captured = recorder.record(flat.tree, flat.tensors)
        distributed.shutdown.watch(self, captured.graph)
        if signature.launches is not None:
            captured.launches = signature.launches
        captured.clock = self._pool.clock
        call = self._call_of(captured, spec)
        kept = pool.kept_bytes(captured.graph, [*captured.statics, *captured.lasting])
        if forward is not None:
            kept = pool.memory_bytes
        info = describe(captured, spec, flat, why, signature.eager_us, kept)
        captured.inputs.tensors = []
        signature.options = StepOptions(captured.optimizers, captured.dials.keys)
        self._counts.captures += 1
        self._counts.capture_seconds += captured.seconds
        forget = weakref.WeakMethod(self._evicted)
        pair = captured.pair
        busy = bool if pair is None else lambda: pair.in_flight
        member = Member(pool, captured.graph, captured.launches, kept, forget, busy)
        entry = _Entry(call, spec, flat.paths, captured, info, captured.guard, member)
        if self.options.policy == "measure":
            entry.call = self._timed(entry, signature)
        return entry

    def _varying_arguments(self) -> Mapping[int, Varying]:
        """The arguments that may be smaller in a call than in the recording under way."""
        return {}

    def _followed(self) -> Sequence[tuple[Follow, ...]]:
        """For each tensor of its result the dimensions that follow their sizes."""
        return ()

    def _call_of(self, captured: Captured, spec: CallSpec) -> Callable[..., Any]:
        return build_call(captured, spec, self._name)

    def _alike(self) -> Sequence[_Entry]:
        """The recordings that a new signature differs from, under ``on_mismatch="error"``."""
        return self._entries

    def _roots(self, flat: Flat) -> list[tuple[str, object]]:
        """Where the state that the callable reaches begins."""
        objects = [
            (path, c.value) for path, c in call_constants(flat.tree) if not is_plain(c.value)
        ]
        return [self._root, *objects]

    def _ungraphed(self, signature: _Signature, code: str, what: str) -> Any:
        signature.eager = code
        self._warn(code, f"{what}: this signature runs eagerly")
        return MISS

    def _evicted(self, member: Member) -> None:
        """The pool takes a recording's room: its signature is captured again when it is called."""
        with self._lock:
            entry = next((e for e in self._entries if e.member is member), None)
            if entry is None:
                return
            self._entries = tuple(e for e in self._entries if e is not entry)
            self._counts.evictions += 1
            signature = self._signatures.get(entry.spec)
            if signature is not None:
                signature.why, signature.launches = "evicted", entry.captured.launches
                signature.warm = self._warmup
                signature.comeback.evicted(entry.captured.launches[0])

    @property
    def _warmup(self) -> int:
        # Of calls that are timed the first is cold; of calls that Inductor compiles the first is
        # watched in eager, and the second compiles.
        more = self.options.policy == "measure" or self.options.compile
        return max(self.options.warmup, 3 if more else 1)

    def _drop_stale(self, spec: CallSpec, signature: _Signature) -> None:
        """Free recordings of this signature whose parameters are gone: they cannot fit again."""
        for entry in self._entries:
            moved = entry.guard.moved() if entry.spec == spec else None
            if moved is not None:
                signature.why = f"{moved} moved"
                if moved.endswith(".grad") and signature.parts is None:
                    signature.parts = {}
                signature.launches = entry.captured.launches
                self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        with self._lock:
            self._entries = tuple(e for e in self._entries if e is not entry)
        entry.captured.graph.reset()

    def _timed(self, entry: _Entry, signature: _Signature) -> Callable[..., Any]:
        """The call path of a recording on trial: times the caller's own first replays, then keeps
        the faster way."""
        call, captured = entry.call, entry.captured
        spans: list[float] = []

        def timed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            captured.driver.synchronize(captured.device)
            started = perf_counter()
            result = call(args, kwargs)
            if result is MISS:
                return MISS
            captured.driver.synchronize(captured.device)
            spans.append((perf_counter() - started) * 1e6)
            if len(spans) == _TRIALS:
                entry.info.replay_us = median(spans)
                entry.call = call
                if entry.info.eager_us is not None and entry.info.eager_us < entry.info.replay_us:
                    signature.eager = "measured"
                    entry.call = _never
            return result

        return timed

    # What users ask of it.

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Record the signature of this call ahead of time, without the call happening.

        The callable runs once to warm up and once to be captured; every tensor that it wrote and
        the random state are put back. Costs about two eager calls and the capture.

        Raises:
            CaptureError: it cannot be captured; OL110 where it stores new tensors in Python state
                (a cold optimizer: run one real step first).
        """
        flat = flatten_call(args, kwargs)
        reason = ambient()
        driver, device = self._where(flat)
        if reason is not None or driver.capturing():
            raise CaptureError("OL109", f"cannot capture here: {reason or 'a capture is running'}")
        unequal = opaque(flat)
        if unequal is not None:
            raise CaptureError("OL302", unequal)
        with driver.exclusive(), no_collection():
            spec = spec_of(driver, flat, device)
            signature = self._signatures.setdefault(spec, _Signature())
            if any(e.spec == spec and e.guard.check() for e in self._entries):
                return
            self._drop_stale(spec, signature)
            if len(self._entries) >= self.options.max_recordings:
                raise CaptureError("OL301", f"{len(self._entries)} recordings exist")
            try:
                self._rehearse(driver, device, signature, args, kwargs)
                try:
                    entry = self._record(driver, device, spec, signature, flat)
                except NeedsGrad:
                    signature.forward = True
                    entry = self._record(driver, device, spec, signature, flat)
            except BackwardInside:
                raise CaptureError(
                    "OL303", "a backward runs inside, or a leaf is made for one"
                ) from None
            if entry is None:
                raise CaptureError("OL304", f"{self._pool!r}")
            signature.eager = None
            self._entries = (entry, *self._entries)

    @property
    def inputs_reached(self) -> int:
        """How many arguments and parameters the newest recording hands a gradient to."""
        pair = self._entries[0].captured.pair
        return 0 if pair is None else len(pair.static.inputs)

    @property
    def recordings(self) -> list[Recording]:
        """What was captured, the newest first."""
        return [entry.info for entry in self._entries]

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the recordings hold, a shared pool counted once."""
        return self._pool.memory_bytes if self._entries else 0

    def stats(self) -> GraphStats:
        """What the recordings hold, and what the calls were. Costs microseconds, and no sync."""
        entries, counts = self._entries, self._counts
        gone = [s.launches[0] for s in list(self._signatures.values()) if s.launches is not None]
        return GraphStats(
            recordings=tuple(recording_stats(self._name, entry.info) for entry in entries),
            captures=counts.captures,
            capture_seconds=counts.capture_seconds,
            replays=sum(entry.info.replays for entry in entries) + sum(gone),
            evictions=counts.evictions,
            warmup_calls=counts.warmup_calls,
            eager_calls=counts.eager_calls,
        )

    def reset(self) -> None:
        """Free every recording and forget every signature; the next calls warm up again.

        Tensors returned by earlier calls stay valid, but for those of ``outputs="static"``.
        """
        with self._lock:
            # Only the graphs: the last of a pool gives back what no static result holds any more.
            graphs = [entry.captured.graph for entry in self._entries]
            self._entries = ()
            self._signatures.clear()
            self._warned.clear()
            self._counts = Counts()
            for graph in graphs:
                graph.reset()

    def _why(self, spec: CallSpec) -> str:
        for entry in self._entries:
            if entry.spec == spec:
                numbers = None if entry.captured.dials.current() else "an optimizer's numbers"
                why = entry.guard.difference() or numbers or "memory shared otherwise"
                return f"state changed: {why}"
        if not self._entries:
            return "first signature"
        where, how = self._entries[0].spec.difference(spec, self._entries[0].paths)
        return f"{where}: {how}"

    def _mismatch(self, spec: CallSpec) -> ReplayError:
        entry = self._alike()[0]
        where, how = entry.spec.difference(spec, entry.paths)
        what = f"`{self._name}` was captured for {entry.spec}, got {spec}"
        return ReplayError("OL201", what, where=f"{where}: {how}")

    def _varying(self, spec: CallSpec) -> str:
        entry = self._entries[0] if self._entries else None
        count = len(self._entries)
        if entry is None:
            return f"`{self._name}` was called with {len(self._signatures)} signatures"
        if entry.spec == spec:
            return f"`{self._name}` has {count} recordings; {self._why(spec)}"
        where, how = entry.spec.difference(spec, entry.paths)
        return f"`{self._name}` has {count} recordings; {where} varies: {how}"

    def _warn(self, code: str, what: str) -> None:
        """Warn once for each code."""
        if code in self._warned:
            return
        self._warned.add(code)
        fix = CATALOGUE[code].fix if code in CATALOGUE else ""
        text = what if what.startswith("[") else f"[{code}] {what}\n  fix:   {fix}"
        warnings.warn(text, GraphWarning, stacklevel=5)

    def __repr__(self) -> str:
        return f"<onelaunch.Graphed {self._name}, {len(self._entries)} recordings>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphed[P, R]:
        root = copy.deepcopy(self._root, memo)
        return type(self)(copy.deepcopy(self.fn, memo), self.options, None, root)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fn, self.options, None, self._root)


def surrounded() -> bool:
    """Whether something ambient wants to see the operations of a call: see `ambient`."""
    if torch.compiler.is_dynamo_compiling() or (WARMING and get_ident() in WARMING):
        return True
    return (
        bool(
            _dispatch_modes()
            or _function_modes()
            or _functorch() is not None
            or _forward_ad._current_level >= 0
            or _anomaly()
            or _tracing() is not None
        )
        and ambient() is not None
    )


def _creates_state(change: Change) -> bool:
    """Whether a slot that was empty holds a tensor now, other than a gradient."""
    new = change.before is MISSING and change.slot.key is not gradient_of
    return new and isinstance(change.after, torch.Tensor)


def _never(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call path of a recording that lost to eager."""
    return MISS


_dispatch_modes = _C._len_torch_dispatch_stack
_function_modes = _C._len_torch_function_stack
_functorch = _C._functorch.peek_interpreter_stack
_forward_ad: Any = torch.autograd.forward_ad
_anomaly = torch.is_anomaly_enabled
_tracing = _C._get_tracing_state

"""Graphed: the choice, for each call, of replay, warm-up, capture or an eager run.

The words of this package are explained in `onelaunch.runtime`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from threading import get_ident
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from onelaunch.call.ambient import refresh_mode_flag, runs_inline
from onelaunch.call.tree import Flat
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.checks import BackwardInside
from onelaunch.capture.compilation import CompiledInCapture
from onelaunch.capture.numbers import Unfollowed
from onelaunch.capture.recording import NeedsGrad, Recording
from onelaunch.errors import CaptureError, describe_type, letting_go
from onelaunch.gc_pause import collection_restored, no_collection
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime import answers
from onelaunch.runtime.candidate import UNPADDED, Call, Candidate, OneWarmup, SignatureStatus
from onelaunch.runtime.notices import REMADE, Notices
from onelaunch.runtime.options import Options
from onelaunch.runtime.phase import Phase, Phases, Ready, Refused, RunsEagerly, Warming
from onelaunch.runtime.pool import PoolManager
from onelaunch.runtime.ranks import NotAllReady, Ranks
from onelaunch.runtime.recorder import Recorder
from onelaunch.runtime.requests import requests_in
from onelaunch.runtime.service import Service
from onelaunch.runtime.signature import Signatures
from onelaunch.runtime.stats import DEFERRED, GraphStats
from onelaunch.runtime.table import Table, TableEntry
from onelaunch.runtime.warmup import wants_grad
from onelaunch.runtime.why import backward_inside, grad_in_no_grad, no_room, offer_split
from onelaunch.source import user_line
from onelaunch.state.snapshot import ReachableState

P = ParamSpec("P")
R = TypeVar("R")

_FUNCTION_ATTRIBUTES = frozenset(
    {"__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"}
)
"""Attributes of a function that torch.export reads."""


class Graphed(Service, Generic[P, R]):
    """A callable that runs as one launch once it is warm. Made by `graph`.

    A call runs eagerly, warms up, captures or replays, whichever is due; see `graph`.
    Safe to call from several threads.
    """

    # Two subclasses override steps of a call, and "For users" below. `Bucketed` pads sizes:
    # `__call__`, `_recorded_or_eager`. `InPieces` graphs parts: `_phase`, `_stay_eager`, `_user`.

    def __init__(
        self,
        fn: Callable[P, R],
        options: Options,
        pool: PoolManager | None = None,
        root: tuple[str, object] | None = None,
        callee: Callee | None = None,
    ) -> None:
        """Graph `fn`. `root`: a name for messages, and the object whose state the callable reads: a
        module for its forward, else `fn` itself. `callee`: `fn` as captures run it."""
        self.fn = fn
        self.options = options
        self._name = name = getattr(fn, "__name__", type(fn).__name__)
        self._pool = pool = pool or PoolManager()
        self._callee = callee = callee or Callee(
            fn, options.compile, options.buckets is not None, root, bool(options.parallel)
        )
        self._notices = Notices()
        self._signatures = signatures = Signatures(name, self._notices)
        self._table = table = Table(name, options.enough_warmups, pool, self._notices)
        self._ranks = ranks = Ranks(fn, name, options, table, signatures)
        self._recorder = recorder = Recorder(name, options, pool, callee, table, signatures, ranks)
        self._phases = Phases(name, options, callee, signatures, table, ranks, recorder.warmup)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if runs_inline(self):  # called inside what is warmed up, captured, compiled or traced
            return self.fn(*args, **kwargs)
        # Each recording has a generated function (replay/call_path.py) that checks whether it fits
        # these arguments, and launches it if so. The tuple of them is replaced, never changed, so
        # that no lock is needed. This is `_replayed` in place: 0.1 us less.
        for launch_if_fits in self._table.calls:
            result = launch_if_fits(args, kwargs)
            if result is not MISS:
                return result
        return self._miss(args, kwargs)

    # The way to a recording.

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Warm up, capture, or run eagerly: no recording fits the call."""
        # A Ctrl-C just as a capture turns garbage collection off would leave it off.
        with collection_restored(), letting_go():
            refresh_mode_flag()  # "a dispatch mode is on": modes of other threads leave it wrong
            return self._recorded_or_eager(args, kwargs)

    def _recorded_or_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        call = self._call(args, kwargs)
        if self._table.unserved.is_unrecordable(call):
            return self._run_whole_eagerly(call)
        with call.driver.exclusive():  # one warm-up or capture at a time in the process
            # While this thread waited, another may have recorded the call.
            result = self._replayed(args, kwargs)
            if result is MISS:
                result = self._warm_up_or_capture(call)
            if result is MISS:
                self._begin_eager_run()  # under the lock: no other thread captures meanwhile
        return self._run_eagerly(args, kwargs) if result is MISS else result

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Flat | None = None
    ) -> Call:
        """Return a call with its arguments, flattened, and the device that it is for."""
        flat = flat or self._signatures.flat(args, kwargs)
        return Call(args, kwargs, flat, *self._callee.driver_and_device(flat))

    @no_collection()  # walks make so many objects that each call would cause full collections
    def _warm_up_or_capture(self, call: Call) -> R | Miss:
        """Warm up, or capture and replay; return `MISS` if the call is to run eagerly."""
        self._table.counts.reason = DEFERRED
        # A request, such as one `generate()`, passes a cache of its own. Recordings made with the
        # last request's cache may be taken over (runtime/requests.py), and one of them may fit.
        # If none could be, a new cache of a class that took recordings over before is most likely
        # a prompt's, whose size comes once: it runs eagerly. (Not with buckets.)
        caches = requests_in(call.flat.tree) if call.strategy is UNPADDED else []
        if caches:
            self._signatures.note_objects(caches)
            # `begin` marks the caches as seen, so this is asked first.
            is_prompt = self._recorder.requests.brings_new_object(caches)
            self._recorder.requests.begin(caches, self._callee)
            if self._recorder.take_over(call):
                result = self._replayed(call.args, call.kwargs)
                if result is not MISS:
                    return result
            elif is_prompt:
                what = f"each brings {describe_type(caches[0])} that is new"
                self._table.unserved.note("OL302", what, REMADE)
                self._table.counts.reason = "OL302"
                return MISS
        match self._phase(call):
            case RunsEagerly(code, why, fix, kind, reason):  # without a code nothing is to be told
                self._table.counts.reason = code or reason
                if code:
                    self._notices.warn(code, why, kind, fix)
                return MISS
            case Refused(status, error):
                return self._refused(status, error)
            case Warming(candidate):
                # `flat` may be padded; a warm-up runs at the call's own size.
                now = self._signatures.flat(call.args, call.kwargs)
                return self._warm(replace(candidate, flat=now))
            case Ready(candidate):
                if answers.may_differ(candidate):
                    warm = self._recorder.at_own_size(candidate)
                    if answers.differs(self._callee, warm):
                        return self._warm(warm)
                return self._capture_and_replay(candidate)

    def _phase(self, call: Call) -> Phase:
        """Return the next step of a call that no recording fits; see `Phases`."""
        return self._phases.of(call)

    def _warm(self, candidate: Candidate) -> R:
        """Run one of the caller's own first calls as a warm-up."""
        # `run` calls `_refused` before an optimizer's step that no graph can hold, and may go on.
        args, kwargs = candidate.args, candidate.kwargs
        before = None if self._callee.reads is None else candidate.reached.walk()
        with self._ranks.noting():
            result = self._recorder.warmup.run(candidate, args, kwargs, self._refused)
        self._table.counts.warmup_calls += 1
        self._table.unserved.note_warmup(candidate, self._signatures.statuses)
        after = self._signatures.flat(args, kwargs)
        # Objects whose fields the call has changed are taken apart no more.
        self._signatures.stop_taking_apart(candidate.flat, after)
        reached = self._callee.state_after(after, result, before)
        self._callee.note_result(result)
        # A callable without any tensor shows its device by its results.
        if self._callee.ran_elsewhere(candidate.flat, candidate.device, result, reached):
            candidate.status.warmups -= 1
            candidate.status.accesses = None
        elif wants_grad(candidate.driver, result, after, reached):
            self._expect_backward(candidate.status, reached)
        elif before is not None and reached.walk() is before and not self._ranks.several:
            answers.switch_early(self._callee, replace(candidate, reached=reached), result)
        candidate.status.capture_answer.left = weakref.ref(reached.walk().contents)
        reached.drop_tensors()  # the next call's walk starts from this one, which keeps none alive
        return result

    def _expect_backward(self, status: SignatureStatus, reached: ReachableState) -> None:
        """Have a signature captured as a forward and a backward, since results require grad, or
        refuse it. With ``on_refusal="raise"`` a call may raise here although it has run."""
        status.has_backward = True
        # A forward whose backward is outside the call cannot be captured for sharded modules.
        refused = distributed.refused_pair(distributed.sharded_values(reached.values))
        if refused is not None:
            self._refused(status, refused)
        elif not torch.is_grad_enabled():  # the callable turns it on for itself
            self._stay_eager(status, grad_in_no_grad())

    def _capture_and_replay(self, candidate: Candidate, may_retry: bool = True) -> R | Miss:
        """Capture a call and replay it; return `MISS` if that is not possible. With `may_retry` it
        is rehearsed and captured again, if Dynamo compiled in the capture."""
        status = candidate.status
        try:
            # The first warm-up of compiled code shows its effects from the state then. From another
            # state the callable is rehearsed: run once more, with everything put back.
            if not self._recorder.warmup.foresees_capture(candidate):
                self._recorder.warmup.rehearse(candidate, self._refused)
                if status.refusal.code is not None:  # `_refused` did not raise
                    return MISS
            with no_collection():
                entry = self._recorder.record(candidate, self)
        except NeedsGrad as error:  # the results require grad now, and did in no warm-up
            if not torch.is_grad_enabled():
                return self._stay_eager(status, grad_in_no_grad())
            status.has_backward, status.kept_graph = True, error.kept_graph
            return MISS  # the next call captures a forward with its backward
        except BackwardInside:  # it calls backward, though its results need one after the call
            return self._stay_eager(status, backward_inside(status.kept_graph))
        except Unfollowed as error:  # a number that the caller varies cannot be read at each call
            self._signatures.take_for_constants(candidate.spec, candidate.flat.tree, error)
            return MISS
        except NotAllReady:  # for another process of the group
            return MISS
        except CompiledInCapture as error:  # by Dynamo: no warm-up had this state, or these sizes
            if not may_retry:
                return self._refused(status, error)
            status.accesses = None  # so that `foresees_capture` says no
            if self._ranks.several:
                return MISS
            return self._capture_and_replay(candidate, may_retry=False)
        except CaptureError as error:
            # It may ask whether it is captured: once refused after a no, it is told yes.
            if not self._ranks.several and status.capture_answer.switch_to_yes():
                return self._capture_told(candidate, error)
            return self._refused_or_warmed(candidate, error)
        if entry is None:  # the pool has no room for it
            if self._pool.may_fit_later(status.need_bytes):
                status.history.backoff.defer()  # some calls run eagerly, then it is tried again
                self._table.counts.reason = "OL304"
                return MISS
            return self._stay_eager(status, no_room(self._name, candidate, self._pool))
        return self._replay_new(entry, candidate)

    def _capture_told(self, candidate: Candidate, refused: CaptureError) -> R | Miss:
        """Capture a callable that was refused after the answer no, with the answer yes."""
        status = candidate.status
        # One warm-up is enough: the second run of `answers.compare`, or the call itself.
        status.warmups = self.options.enough_warmups - 1
        status.accesses = status.ledger = None
        warm = self._recorder.at_own_size(candidate)
        unlike = answers.compare(self._callee, warm, self._name, refused)
        if unlike is not None:
            return self._refused_or_warmed(candidate, unlike)
        if status.ledger is None:
            return self._warm(warm)
        return self._capture_and_replay(replace(warm, flat=candidate.flat))

    def _refused_or_warmed(self, candidate: Candidate, error: CaptureError) -> R | Miss:
        """Refuse a capture, unless only one warm-up came before: then warm up in full first. Or its
        run did something that no replay does, perhaps for the only time, as filling a cache. Then
        the call is one more warm-up, which does it, and the next is captured."""
        status = candidate.status
        launched = self._signatures.launched(status.history.worth, self._table.entries)
        if status.one_warmup is OneWarmup.ENOUGH and error.code != "OL140":
            status.begin_anew()
        elif error.may_pass and not self._ranks.several and status.history.forgives(launched):
            status.warmups = status.enough_warmups(self.options.enough_warmups) - 1
        else:
            return self._refused(status, error)
        return self._warm(self._recorder.at_own_size(candidate))

    def _replay_new(self, entry: TableEntry, candidate: Candidate) -> R | Miss:
        """Replay a recording for the call of its capture. Keep it if its run agreed with the runs
        before it."""
        status = candidate.status
        # The next recording starts with all warm-up calls. But where the call changes a number that
        # it reads (`self.step += 1`), its next value is soon to be recorded, and one is enough.
        status.warmups = self.options.enough_warmups - 1 if entry.captured.moved_numbers() else 0
        if status.one_warmup is OneWarmup.ENOUGH:
            status.one_warmup = OneWarmup.UNASKED
        result = entry.call(candidate.args, candidate.kwargs)
        if result is MISS:  # another thread, or the capture, changed state that it relies on
            misfit = self._table.drop_misfit(entry, candidate)
            if misfit is None:  # for the first time: the next may fit
                return MISS
            return self._stay_eager(status, CaptureError("OL307", misfit))
        status.history.misfits = 0
        self._signatures.note_served(entry, self._table.entries)
        if entry.ran_differently:
            # The captured run read more than the runs before it, or did other work. The next call
            # is captured and compared with it. After too many, all run eagerly, or are refused.
            differs = entry.captured.compared.differs
            try_again = self._table.drop_unsettled(entry)
            if differs is not None and not try_again:
                self._stay_eager(status, differs.refusal())
            return result
        status.agreed()
        # Recordings of single values of a number go, if this one reads the number at each call.
        self._table.drop_superseded(entry, self._signatures.varied)
        self._table.add(entry)
        return result

    def _replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R | Miss:
        """Return the result of the first recording that fits; `MISS` if none does."""
        for launch_if_fits in self._table.calls:
            result = launch_if_fits(args, kwargs)
            if result is not MISS:
                return result
        return MISS

    @property
    def _user(self) -> Graphed[..., Any]:
        """The user of these recordings in the pool's figures; of a piece, the whole module."""
        return self

    # Refused.

    def _refused(self, status: SignatureStatus, error: CaptureError) -> Miss:
        """Raise the refusal of a signature, or have it run eagerly, as `on_refusal` says."""
        if error.code == "OL117":
            # The captured run did not do what the run before it did, or Python drew a random
            # number. Two later runs may be alike by chance, so the next call is not captured anew.
            # A module in its other mode, `train()` or `eval()`, is.
            status.refusal.error = copy.copy(error)
            status.refusal.training = self._callee.training
        if self._ranks.raises(error):
            offer_split(error, self._callee.state_root, self.options)
            raise error
        return self._stay_eager(status, error)

    def _stay_eager(self, status: SignatureStatus, error: CaptureError) -> Miss:
        """Have a signature run eagerly from now on, with a warning. It is refused, has no room or
        a backward or grad mode inside, or its recording misfits the call."""
        status.refusal.code, status.refusal.training = error.code, self._callee.training
        self._table.counts.reason = error.code
        error.where = error.where or user_line()
        self._notices.give(error.warning("this signature runs eagerly"))
        return MISS

    # An eager run.

    def _begin_eager_run(self, why: str | None = None) -> None:
        """Count an eager run, and list its thread, while no other thread captures. Until it is done
        no forward is captured with a backward: stand-ins would replace parameters under it."""
        self._table.counts.ran_eagerly(why or self._table.counts.reason)
        self._table.running.append(get_ident())

    def _run_eagerly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., R] | None = None
    ) -> R:
        """Run a call eagerly, in a thread listed in `running`. Holds no lock: threads that the
        callable starts may wait for each other."""
        try:
            return (run or self._run_callable)(*args, **kwargs)
        finally:
            self._table.running.remove(get_ident())

    def _run_whole_eagerly(self, call: Call) -> R:
        """Run a call eagerly, and not in pieces, with its thread in `running`."""
        with call.driver.exclusive():
            self._table.running.append(get_ident())
        return self._run_eagerly(call.args, call.kwargs, self.fn)

    def _run_callable(self, *args: Any, **kwargs: Any) -> R:
        """Run the callable itself; `InPieces` runs its pieces."""
        return cast(Any, self.fn)(*args, **kwargs)

    # For users; see `Service`, too.

    @property
    def recordings(self) -> list[Recording]:
        """The figures of each recording, the newest first."""
        return self._table.figures()

    def stats(self) -> GraphStats:
        """Return the figures of the recordings and calls. Costs microseconds, and no sync."""
        recordings, counts = self._table.figures(), self._table.counts
        replays = sum(r.replays for r in recordings) + self._signatures.past_launches()
        figures: dict[str, Any] = {**vars(counts), "eager_reasons": dict(counts.eager_reasons)}
        del figures["reason"]
        return GraphStats(tuple(recordings), replays=replays, **figures)

    def reset(self) -> None:
        """Free every recording and forget every signature; the next calls warm up again.

        Tensors returned by earlier calls stay valid, except under ``outputs="static"``.
        """
        with self._table.lock:
            self._ranks.forget()
            self._signatures.clear()
            self._notices.clear()
            self._table.clear()

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Record the signature of this call ahead of time, without making the call.

        The callable runs once to warm up, whatever `warmup` is, and once to be captured; then every
        tensor that it wrote, the random state and torch's modes are restored. Costs two calls. A
        recording of the same operations at other sizes takes the place of the warm-up.

        Raises:
            CaptureError: it cannot be captured; OL110 if it stores new tensors in Python state
                (a cold optimizer: run one real step first).
        """
        self._capture_ahead(args, kwargs)

    def _capture_ahead(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        then: Callable[[Any], object] | None = None,
    ) -> None:
        """Do `capture`; `then` gets the result of the warm-up."""
        try:
            self._recorder.capture_ahead(self, args, kwargs, then=then)
        except CaptureError as error:
            offer_split(error, self._callee.state_root, self.options)
            raise

    # As the callable itself.

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the graphed function that torch.export reads."""
        if name in _FUNCTION_ATTRIBUTES:
            return getattr(inspect.unwrap(self.fn), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind as a method, as the function would be."""
        return self if owner is None else types.MethodType(self, owner)

    def __repr__(self) -> str:
        return f"<onelaunch.Graphed {self._name}, recordings: {len(self._table.entries)}>"

    # A copy has a pool of its own: nothing that it records is the original's.

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphed[P, R]:
        root = copy.deepcopy(self._callee.root, memo)
        return type(self)(copy.deepcopy(self.fn, memo), self.options, None, root)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fn, self.options, None, self._callee.root)


_KINDS = {
    (True, "call"): "onelaunch.padding.bucketed:Bucketed",
    (False, "background"): "onelaunch.runtime.background:CapturesBeside",
    (True, "background"): "onelaunch.padding.background:BucketedBeside",
}
"""(with buckets, the option `capture`) -> the class, imported where it is asked for."""


def graphed(
    fn: Callable[P, R],
    options: Options,
    pool: PoolManager | None = None,
    root: tuple[str, object] | None = None,
    callee: Callee | None = None,
) -> Graphed[P, R]:
    """Return the graphed callable for these options. Padding takes 20 ms to import, and Dynamo half
    a second: they are imported where they are needed. A module's forward has a `root`."""
    where = _KINDS.get((options.buckets is not None, options.capture))
    if options.compile == "later":
        where = "onelaunch.runtime.later:CompilesLater"
    if options.on_refusal == "split":
        of_module = "onelaunch.split.graphed:SplitGraphed"
        where = of_module if root else "onelaunch.dynamo.function:SplitFunction"
    kind: Any = Graphed if where is None else resolve_name(where)
    return kind(fn, options, pool, root, callee)

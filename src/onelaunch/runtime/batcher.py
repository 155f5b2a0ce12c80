"""`Batcher`: single requests from many threads, run together in batches."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

from onelaunch.call.ambient import Modes
from onelaunch.errors import ArgumentError, GraphError
from onelaunch.runtime.forks import condition
from onelaunch.sizes.batching import best
from onelaunch.sizes.buckets import Sizes, positive

_NEW = 0.2  # the weight of a new time in the running mean of its size
_DOUBT = 0.02
_BELOW = 0.999
"""A size that is dearer per row than a smaller one is not chosen, so its time is not renewed. The
time sinks by so much for each batch, to just below the smaller size's price: it is tried again."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in the queue."""

    request: Any
    future: Future[Any] = field(default_factory=Future[Any])
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """A queue whose requests run in batches, each batch one launch. Made by `Graphed.batcher`.

    A thread of its own takes the requests in their order, so that none starves. How many run
    together is decided by `Buckets.best`, by the times that it measures of its batches. Requests
    run together if they differ in nothing but the contents and the number of their rows.

    Attributes:
        max_wait_ms: the most milliseconds that a request waits for others.
        max_waiting: the most requests in the queue.

    Safe to use from several threads. It is a context manager that closes it.

    Example:
        >>> import torch, onelaunch as ol
        >>> fast = ol.graph(torch.sin, buckets=ol.Buckets.powers_of_two(8))
        >>> with fast.batcher(max_wait_ms=2.0) as batcher:
        ...     futures = [batcher.put(torch.zeros(1, 3)) for _ in range(5)]
        >>> futures[4].result()
        tensor([[0., 0., 0.]])
    """

    def __init__(self, joining: Any, max_wait_ms: float, max_waiting: int) -> None:
        if not isinstance(max_wait_ms, (int, float)) or not max_wait_ms >= 0:
            fix = "milliseconds, 0 or more"
            raise ArgumentError("OL401", f"max_wait_ms={max_wait_ms!r}", fix=fix)
        self.max_wait_ms = max_wait_ms
        self.max_waiting = positive("max_waiting", max_waiting)
        self._joining = joining  # `padding.joined_calls.JoinedCalls`, of a package above this one
        self._modes = Modes(graded=False)
        self._times: dict[Sizes, float] = {}
        self._queue: deque[_Waiting] = deque()
        self._changed = condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="onelaunch batcher", daemon=True)
        self._thread.start()
        # A daemon thread that runs into the end of the interpreter may crash it.
        atexit.register(self.close, cancel=True)

    def put(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Add a request, a call of the callable, and return the future of its result.

        The arguments are those of a call: tensors with 1 row or more in the bucketed dimension; a
        single row is ``x[None]``. Work on them in another stream than the default must be done.
        The result, or an error, is the call's own, and complete on the device. A future that is
        cancelled while it waits costs nothing. With asyncio, await ``asyncio.wrap_future(future)``.

        Raises:
            GraphError: OL211, `max_waiting` requests wait already, or the batcher is closed.
        """
        waiting = _Waiting(self._joining.taken(args, kwargs))
        with self._changed:
            if len(self._queue) >= self.max_waiting:
                self._drop_cancelled()
            closed = self._closed or not self._thread.is_alive()  # as in the child of a fork
            if closed or len(self._queue) >= self.max_waiting:
                what = "the batcher is closed" if closed else f"{len(self)} requests wait"
                raise GraphError("OL211", what)
            self._queue.append(waiting)
            self._changed.notify()
        return waiting.future

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._queue)

    @property
    def times(self) -> dict[int | Sizes, float]:
        """Bucket size -> milliseconds of a batch, measured so far: a running mean. A size is a
        tuple where several dimensions are bucketed."""
        return {s[0] if len(s) == 1 else s: time for s, time in self._times.copy().items()}

    def measure(self, *args: Any, **kwargs: Any) -> None:
        """Show that rows are independent, and time each size, before the first request.

        The arguments are a request of any size. Each size runs a few times on rows made of it.
        Without this, the first batch is checked, and each size is timed when it comes.

        Raises:
            CaptureError: OL140, a row depends on others, or a call changes state.
        """
        with self._modes.entered():
            times = self._joining.timed(args, kwargs)
        with self._changed:
            self._times |= times

    def close(self, *, cancel: bool = False) -> None:
        """Run the requests that wait, then end the thread. With `cancel` they are cancelled."""
        with self._changed:
            self._closed = True
            if cancel:
                self._cancel()
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Close; after an exception, such as a Ctrl-C, the requests that wait are cancelled."""
        self.close(cancel=kind is not None)

    # The thread.

    def _serve(self) -> None:
        """Run batches until it is closed and nothing waits."""
        try:
            with self._modes.entered():
                while batch := self._next():
                    self._run(batch)
                    del batch  # with the results, which the wait for the next would keep
        finally:  # nobody is to wait for a thread that ended
            with self._changed:
                self._closed = True
                self._cancel()

    def _next(self) -> list[_Waiting]:
        """Wait for the next batch, and take it from the queue. Return none at the end."""
        with self._changed:
            while True:
                self._drop_cancelled()
                if not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                batch = self._chosen()
                if batch:
                    taken = set(map(id, batch))
                    self._queue = deque(w for w in self._queue if id(w) not in taken)
                    batch = [w for w in batch if w.future.set_running_or_notify_cancel()]
                    if batch:
                        return batch
                    continue
                waited = time.perf_counter() - self._queue[0].since
                rest = max(self.max_wait_ms / 1e3 - waited, 0)
                self._changed.wait(min(rest, threading.TIMEOUT_MAX))

    def _chosen(self) -> list[_Waiting]:
        """Return the first requests that may run together and need not wait for others."""
        groups: dict[Hashable, list[_Waiting]] = {}
        for waiting in self._queue:
            groups.setdefault(waiting.request.key, []).append(waiting)
        now = time.perf_counter()
        for group in groups.values():  # in the order of the first of each
            may_wait = not self._closed and (now - group[0].since) * 1e3 < self.max_wait_ms
            rows, others = (w.request.rows for w in group), group[0].request.others
            times = {sizes[0]: time for sizes, time in self._times.items() if sizes[1:] == others}
            count = best(self._joining.sizes, rows, may_wait, times)
            if count:
                return group[:count]
        return []

    def _run(self, batch: list[_Waiting]) -> None:
        """Run a batch. If it fails, each request runs alone, and only the bad ones fail."""
        started = time.perf_counter()
        try:
            done = self._joining.together([w.request for w in batch])
        except BaseException as error:  # noqa: BLE001  it is the future's
            if len(batch) == 1 or (isinstance(error, GraphError) and error.__cause__ is None):
                for waiting in batch:
                    waiting.future.set_exception(error)
                return
            done = None
        if done is None:
            for waiting in batch:
                self._run([waiting])
            return
        results, replayed = done
        if replayed:
            self._note(batch, (time.perf_counter() - started) * 1e3)
        for waiting, result in zip(batch, results, strict=True):
            waiting.future.set_result(result)

    def _note(self, batch: list[_Waiting], milliseconds: float) -> None:
        """Note the time of a batch for its size."""
        rows = sum(w.request.rows for w in batch)
        size = next((size for size in self._joining.sizes if size >= rows), None)
        if size is None:
            return
        bucket = size, *batch[0].request.others
        with self._changed:
            mean = self._times.get(bucket, milliseconds)
            self._times[bucket] = mean = mean + _NEW * (milliseconds - mean)
            for other, before in self._times.items():
                limit = mean * other[0] / size * _BELOW
                if other[0] > size and other[1:] == bucket[1:] and before > limit:
                    self._times[other] = before + _DOUBT * (limit - before)

    def _drop_cancelled(self) -> None:
        """Forget the requests whose futures were cancelled. Hold the lock."""
        gone = [w for w in self._queue if w.future.cancelled()]
        for waiting in gone:
            self._queue.remove(waiting)
            waiting.future.set_running_or_notify_cancel()  # for `concurrent.futures.wait`

    def _cancel(self) -> None:
        """Cancel the requests that wait. Hold the lock."""
        for waiting in list(self._queue):  # a callback may come back to this batcher
            waiting.future.cancel()
        self._drop_cancelled()

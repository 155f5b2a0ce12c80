"""A mode that records the ATen operations of a body, each to run again on the same addresses.

A body runs once, for real, under a dispatch mode. What comes out is a list of calls with their
arguments bound: a view is no call at all (its address is fixed), an in-place operation is called
on the same memory, and of any other the result is copied to where it was in the capture.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.call.wrappers import is_wrapper_subclass
from onelaunch.call_events import unwatched
from onelaunch.driver.aten import Operator, Step, imagined, leaves, mapped, operator, tensors
from onelaunch.driver.host_reads import HostReads
from onelaunch.driver.known_causes import WEIGHTS_ALONE
from onelaunch.driver.refusals import refusal
from onelaunch.driver.seeding import RandomState, seeding_line, watching_seeds
from onelaunch.driver.storage_resize import resize, watching_resizes
from onelaunch.driver.tape.calls import TapeCall
from onelaunch.errors import CaptureError, kind_of
from onelaunch.source import Place, user_frame
from onelaunch.unwinding import DispatchMode, unnoticed


class Memory(Protocol):
    """The memory of the recorded tensors."""

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call with these arguments runs on the device that is being recorded."""
        ...

    def run(
        self, recorder: TapeRecorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation on tensors of the device: `TapeRecorder.call` with host tensors."""
        ...

    @staticmethod
    def on_host(t: Tensor) -> Tensor:
        """Make a host tensor over the same bytes as `t`."""
        ...

    def fixed(self, t: Tensor) -> Tensor:
        """Make a host tensor over the same bytes as host tensor `t`, for use at every replay."""
        ...

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """Give the fresh host tensor `t` the address where every replay will write it.

        Its values need not be kept where they are not `defined` (by `torch.empty`).
        """
        ...

    def external(self, t: Tensor) -> Tensor | None:
        """View all bytes around host tensor `t` if they existed before the capture, else None."""
        ...

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a recorded operation made this memory."""
        ...


class _Active(threading.local):
    recorder: TapeRecorder | None = None


_active = _Active()


def recording() -> TapeRecorder | None:
    """Find the recorder of the capture whose body this thread is running, or None."""
    return _active.recorder


def is_recording() -> bool:
    """Tell whether this thread is inside the body of a capture: 0.07 us."""
    return _active.recorder is not None


@contextmanager
def recording_with(recorder: TapeRecorder) -> Generator[None]:
    """Record what runs in the context: its operations, and its reads on the host."""
    try:  # at once: a Ctrl-C may come between any two lines
        _active.recorder = recorder
        seeds, resizes = watching_seeds(recorder.note_seeding), watching_resizes(recorder.resize)
        with seeds, resizes, recorder.host_reads(), recorder:
            yield
        recorder.finish()
    finally:
        _active.recorder = None


class TapeRecorder(DispatchMode):
    """The dispatch mode of one capture.

    Args:
        memory: the device being recorded.
        generators: random state to watch and restore, besides the default generator.
    """

    def __init__(self, memory: Memory, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.memory = memory
        self.steps: list[Step] = []
        self.refused: CaptureError | None = None
        self.random = RandomState(generators)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._resized: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._line: Place | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have Dynamo run code that it has compiled for the capture as in one on a GPU, which no
        mode watches."""
        return unnoticed.by_dynamo

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # its own dispatch comes back with this process's parts
        if imagined():
            return func(*args, **kwargs)
        with unwatched(), torch._C.DisableTorchFunction():
            line = user_frame()
            self._watch_random(line)
            self._line = line
            wraps = operator(func).wraps
            if wraps or func.namespace == "profiler" or not self.memory.owns(args, kwargs):
                result = func(*args, **kwargs)
            else:
                result = self._on_the_device(func, args, kwargs)
            self.random.accept()
            return result

    def _on_the_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = operator(func)
        why = refusal(func, args, kwargs)
        if why is not None:
            raise self.note_refusal(why.code, f"`{op.label}` was called during a capture.", why.fix)
        if op.composite:
            with self:
                return op.decomposed(args, kwargs)
        return self.memory.run(self, op, args, kwargs)

    def call(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `op` on host tensors, and record it.

        Returns:
            The results, the fresh ones at the addresses where every replay will write them.
        """
        if op.is_constant:
            return self._constant(args[0])
        written = op.written(args, kwargs)
        addresses = [t.untyped_storage().data_ptr() for t in written]
        for t in written:
            self.save(t)
        result = op.run(args, kwargs)
        for t, address in zip(written, addresses, strict=True):
            if t.untyped_storage().data_ptr() != address and self.memory.external(t) is not None:
                raise self.note_refusal(
                    "OL107", f"`{op.label}` moved the memory of a caller's tensor."
                )
        self._check(op, result)
        known = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        results = tensors(result)
        fresh = [
            i
            for i, t in enumerate(results)
            if not t._is_zerotensor() and t.untyped_storage()._cdata not in known
        ]
        placed = {id(results[i]): self.memory.place(results[i], not op.idle) for i in fresh}
        if not op.idle and (fresh or written or not results):
            targets = {i: self.memory.fixed(placed[id(results[i])]) for i in fresh}
            args, kwargs = self._fixed((args, kwargs))
            self.steps.append(TapeCall(op, args, kwargs, targets))
        return mapped(result, lambda t: placed.get(id(t), t))

    def _fixed(self, value: Any) -> Any:
        """Replace tensors by aliases; one that comes twice by the same, as an operation may ask."""
        fixed = {id(t): self.memory.fixed(t) for t in tensors(value)}
        return mapped(value, lambda leaf: fixed.get(id(leaf), leaf))

    def _constant(self, value: Tensor) -> Tensor:
        # `torch.tensor(...)`, made by the host: a replay must find it as it was made.
        value = self.memory.place(value)
        self.steps.append(functools.partial(self.memory.fixed(value).copy_, value.clone()))
        return value

    def save(self, t: Tensor) -> None:
        """Remember the memory of `t`, about to be written, unless it is the recording's own."""
        around = self.memory.external(t)
        if t.untyped_storage()._cdata in self._resized:
            return
        if around is not None and around.numel():
            self._saved.setdefault(around.data_ptr(), (around, around.clone()))

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Record that the body resizes a storage, as FSDP does to free a parameter and to have it
        again."""
        if storage.device.type != "cpu":
            return  # such memory is given back by the device's own functions
        if self.memory.made(storage):
            raise self.note_refusal("OL107", "a tensor made in the call is given other memory")
        if storage._cdata not in self._resized:
            with _disable_current_modes():
                self._resized[storage._cdata] = storage, storage.clone()
        self.steps.append(functools.partial(resize, storage, nbytes))

    def restore(self) -> None:
        """Put memory and random state back to what they were before the capture."""
        for storage, before in self._resized.values():
            if storage.nbytes() != before.nbytes():
                resize(storage, before.nbytes())
            storage.copy_(before)
        # Latest first: two storages may share memory, and the first copy is the true one.
        for around, saved in reversed(self._saved.values()):
            with torch.inference_mode(around.is_inference()):
                around.copy_(saved)
        self.random.restore()

    def note_refusal(self, code: str, what: str, fix: str | None = None) -> CaptureError:
        """Make an error to raise, and keep it: a body that swallows it is refused all the same."""
        place = user_frame() or self._line  # the engine's threads have no frame of the user
        error = CaptureError(code, what, where=place, fix=fix)
        self.refused = self.refused or error
        return error

    def note_seeding(self, method: str) -> CaptureError:
        """Make the error for a call of `method` of a generator."""
        return self.note_refusal("OL106", f"A generator's `{method}` was called during a capture.")

    def finish(self) -> None:
        """Raise what was refused, if the body swallowed it or no operation came after it."""
        self._watch_random(None)
        if self.refused is not None:
            raise self.refused

    def host_reads(self) -> HostReads:
        """Make the mode that refuses the reads that no dispatcher sees."""

        def refuse(code: str, what: str, t: Tensor, fix: str | None) -> None:
            raise self.note_refusal(code, what, fix)

        return HostReads(lambda t: self.memory.owns((t,), {}), refuse)

    def _watch_random(self, line: Place | None) -> None:
        if self.random.moved():
            self.random.accept()
            place = seeding_line(self._line, line)
            what = "A random generator was seeded, or its state set, during a capture."
            self.refused = self.refused or CaptureError("OL106", what, where=place)
            raise self.refused

    def _check(self, op: Operator, result: Any) -> None:
        for value in leaves(result):
            if isinstance(value, Tensor):
                if value.is_nested:
                    raise self.note_refusal("OL109", f"`{op.label}` gave a nested tensor.")
                if value.is_quantized:
                    what = f"`{op.label}` gave a quantized tensor."
                    raise self.note_refusal("OL109", what, WEIGHTS_ALONE)
                if value.layout is not torch.strided:
                    what = f"`{op.label}` gave a tensor of layout {value.layout}."
                    raise self.note_refusal("OL109", what)
            elif value is not None and not op.describes and not op.collective:
                if isinstance(value, (bool, int, float, complex)):
                    raise self.note_refusal("OL101", f"`{op.label}` gave a number to the host.")
                what = f"`{op.label}` gave {kind_of(value)}, which cannot be replayed."
                raise self.note_refusal("OL109", what)

"""A mode that records the ATen operations of a body, each to run again on the same addresses.

A body runs once, for real, under a dispatch mode. What comes out is a list of calls with their
arguments bound: a view is no call at all (its address is fixed), an in-place operation is called
on the same memory, and of any other the result is copied to where it was in the capture.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.call.wrappers import is_wrapper_subclass
from onelaunch.call_events import unwatched
from onelaunch.driver.aten import Operator, copy_bits, imagined, leaves, mapped, operator, tensors
from onelaunch.driver.host_reads import HostReads
from onelaunch.driver.known_causes import WEIGHTS_ALONE
from onelaunch.driver.refusals import fix_of_line, refusal
from onelaunch.driver.seeding import watching_seeds
from onelaunch.driver.substitutes import resize, watching_resizes
from onelaunch.errors import CaptureError, describe_type
from onelaunch.source import CodePoint, Place, user_frame, user_point
from onelaunch.testing.collectives import run_alone
from onelaunch.testing.memory import HostMemory
from onelaunch.testing.random_state import RandomState, seeding_line
from onelaunch.testing.repeats import Step, bind, wraps
from onelaunch.unwinding import DispatchMode, unnoticed

_FILLS = frozenset({"aten::masked_fill.Tensor", "aten::masked_fill_.Tensor"})
"""Operations whose kernels on CUDA take the value of a tensor on the host."""


class TapeCall:
    """A step that repeats an operation on the same memory, in the grad mode of the capture.

    The mode decides whether some kernels give a workspace for the backward (`mkldnn_rnn_layer`); a
    checkpoint runs its forward in grad mode inside of a backward, which is not.

    Args:
        op, args, kwargs: the call, with tensors that nobody else has.
        targets: index of a fresh result -> the memory where each replay copies it.
    """

    def __init__(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: dict[int, Tensor],
    ) -> None:
        self._op = op
        self._recorded = args, kwargs
        self._targets = targets
        self._places: list[Any] = []
        self._repeat = bind(op, args, kwargs)
        self._grad = torch.is_grad_enabled()

    def __call__(self) -> None:
        with torch.set_grad_enabled(self._grad):
            results = tensors(self._repeat())
            for i, target in self._targets.items():
                copy_bits(target, results[i])

    def numbers(self) -> set[float]:
        """Collect the numbers among the recorded arguments."""
        found = {key: {v for v in leaves(value) if type(v) is float} for key, value in self._each()}
        self._places = [key for key, numbers in found.items() if numbers]
        return set[float]().union(*found.values())

    def _each(self) -> Iterator[tuple[int | str, Any]]:
        args, kwargs = self._recorded
        yield from enumerate(args)
        yield from kwargs.items()

    def patch(self, numbers: dict[float, float]) -> None:
        """Repeat the operation with other numbers from now on: recorded number -> new number."""

        def changed(value: Any) -> Any:
            if type(value) is float:
                return numbers.get(value, value)
            return mapped(value, changed) if type(value) in (list, tuple) else value

        args, kwargs = [*self._recorded[0]], {**self._recorded[1]}
        for place in self._places:
            if type(place) is int:
                args[place] = changed(args[place])
            else:
                kwargs[place] = changed(kwargs[place])
        self._repeat = bind(self._op, tuple(args), kwargs)


class _Active(threading.local):
    recorder: TapeRecorder | None = None


_active = _Active()


def recording() -> TapeRecorder | None:
    """Find the recorder of the capture whose body this thread is running, or None."""
    return _active.recorder


def is_recording() -> bool:
    """Tell whether this thread is inside the body of a capture: 0.07 us."""
    return _active.recorder is not None


class TapeRecorder(DispatchMode):
    """The dispatch mode of one capture.

    Args:
        memory: the holder of the recorded tensors.
        generators: random state to watch and restore, besides the default generator.
    """

    def __init__(self, memory: HostMemory, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.memory = memory
        self.steps: list[Step] = []
        self.refused: CaptureError | None = None
        self.random = RandomState(generators)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._resized: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._point: CodePoint | None = None

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record what runs in the context: its operations, and its reads on the host."""

        def refuse_read(code: str, what: str, t: Tensor, fix: str | None) -> None:
            raise self.note_refusal(code, what, fix)

        try:  # at once: a Ctrl-C may come between any two lines
            _active.recorder = self
            seeds, resizes = watching_seeds(self.note_seeding), watching_resizes(self.resize)
            reads = HostReads(lambda t: self.memory.owns((t,), {}), refuse_read)
            with seeds, resizes, reads, self:
                yield
            self._watch_random(None)  # a last seeding, after which no operation came
        finally:
            _active.recorder = None

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
            point = user_point()
            self._watch_random(point)
            self._point = point
            if wraps(func) or func.namespace == "profiler" or not self.memory.owns(args, kwargs):
                result = func(*args, **kwargs)
            else:
                result = self._on_the_device(func, args, kwargs)
            self.random.accept()
            return result

    def _on_the_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = operator(func)
        why = refusal(op, args, kwargs)
        if why is not None:
            raise self.note_refusal(why.code, f"`{op.label}` was called during a capture.", why.fix)
        if op.composite:
            with self:
                return op.decomposed(args, kwargs)
        if self.memory.transfers(op, args, kwargs):
            what = f"`{op.label}` copied between the host and the device during a capture."
            raise self.note_refusal("OL103", what)
        if op.name in _FILLS and self.memory.owns(args[2:], {}):
            what = f"`{op.label}` read its value on the host during a capture."
            raise self.note_refusal("OL109", what)
        return self.memory.run(self.call, op, args, kwargs)

    def call(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `op` on host tensors, and record it.

        Returns:
            The results, new tensors among them at the addresses that every replay will write to.
        """
        if op.name == "aten::lift_fresh":
            return self._constant(args[0])
        written = op.written(args, kwargs)
        addresses = [t.untyped_storage().data_ptr() for t in written]
        for t in written:
            self.save(t)
        self.random.drawn |= op.random
        result = run_alone(op, args, kwargs)
        for t, address in zip(written, addresses, strict=True):
            if t.untyped_storage().data_ptr() != address and self.memory.external(t) is not None:
                raise self.note_refusal(
                    "OL107", f"`{op.label}` moved the memory of a caller's tensor."
                )
        self._check(op, result)
        results = tensors(result)
        placed = self.memory.place_fresh(op, (args, kwargs), results)
        if not op.idle and (placed or written or not results):
            fixed = {key: self.memory.fixed(t) for key, t in placed.items()}
            targets = {i: fixed[id(t)] for i, t in enumerate(results) if id(t) in fixed}
            # Aliases, too: a tensor that comes twice by the same, as an operation may ask.
            aliases = {id(t): self.memory.fixed(t) for t in tensors((args, kwargs))}
            args, kwargs = mapped((args, kwargs), lambda v: aliases.get(id(v), v))
            self.steps.append(TapeCall(op, args, kwargs, targets))
        return mapped(result, lambda t: placed.get(id(t), t))

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

    def note_refusal(
        self, code: str, what: str, fix: str | None = None, place: Place | None = None
    ) -> CaptureError:
        """Make an error to raise, and keep it: a body that swallows it is refused all the same."""
        place = place or user_frame() or self._line()  # the engine's threads have no user's frame
        error = CaptureError(code, what, where=place, fix=fix_of_line(code, place) or fix)
        self.refused = self.refused or error
        return error

    def note_seeding(self, method: str) -> CaptureError:
        """Make the error for a call of `method` of a generator."""
        return self.note_refusal("OL106", f"A generator's `{method}` was called during a capture.")

    def _line(self) -> Place | None:
        return self._point and self._point.place()

    def _watch_random(self, point: CodePoint | None) -> None:
        if self.random.moved():
            self.random.accept()
            what = "A random generator was seeded, or its state set, during a capture."
            raise self.note_refusal(
                "OL106", what, place=seeding_line(self._line(), point and point.place())
            )

    def _check(self, op: Operator, result: Any) -> None:
        for value in leaves(result):
            code, given, fix = "OL109", None, None
            if isinstance(value, Tensor):
                if value.is_nested:
                    given = "a nested tensor"
                elif value.is_quantized:
                    given, fix = "a quantized tensor", WEIGHTS_ALONE
                elif value.layout is not torch.strided:
                    given = f"a tensor of layout {value.layout}"
            elif value is not None and not op.describes and not op.collective:
                if isinstance(value, (bool, int, float, complex)):
                    code, given = "OL101", "a number to the host"
                else:
                    given = f"{describe_type(value)}, which cannot be replayed"
            if given is not None:
                raise self.note_refusal(code, f"`{op.label}` gave {given}.", fix)

"""A profile hook that notes the loads of a run's Python code, and their objects.

The interpreter's profile hook watches every function that runs, in any package. When a function
returns, the loads of its instructions (see `loads`) are looked up from the values of its variables.
So methods of objects made in the call, partials, enumerations and classes of libraries are seen,
and an object that merely shares an attribute's name is not. Where the object of a load cannot be
found afterwards, as in `queue.pop().scale`, the name counts for all objects (`Loads.loose`).
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
from collections.abc import Callable, Generator, Set
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.beside import make_way_in_hook
from onelaunch.call_events import Matters, hook, profiling, unwatched
from onelaunch.frames.callees import is_method
from onelaunch.frames.codes import (
    HANDS_ON,
    LISTS_MODULE,
    MODULE_DICTS,
    RUNS_BACKWARD,
    UNREAD,
    CodeFacts,
    SureStore,
)
from onelaunch.frames.frame import RanFrame, note_attributes
from onelaunch.frames.origins import gives_own_work, is_machinery
from onelaunch.frames.peek import (
    LEAVES,
    MOST,
    attributes_of,
    has_attributes,
    has_contents,
    iterated_container,
    peek,
)
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import ITERATED, Use
from onelaunch.gc_pause import no_collection
from onelaunch.identity import id
from onelaunch.source import Place, user_frame

_CPU = torch.device("cpu")
_NONE: dict[Any, Any] = {}
_NO_ENDS: frozenset[int] = frozenset()


class FrameWatch:
    """A watch that notes in `reads` the reads of functions that run while it is active.

    Args:
        device: the device of the run: a backward for an accelerator works in a thread of its own.
        step_aside: called before an operator that takes functions runs, to end the modes that watch
            the run: Dynamo never compiles a function that it met under a mode (pytorch#190286).
        ended: frames that were read before, as `Reads.ended`, and are not read again.
    """

    def __init__(
        self,
        reads: Reads,
        device: torch.device = _CPU,
        step_aside: Callable[[], object] | None = None,
        ended: frozenset[tuple[types.CodeType, int]] = frozenset(),
    ) -> None:
        self.reads = reads
        self._past: dict[types.CodeType, set[int]] = {}
        """code -> the ends of frames that are not read again."""
        for code, end in ended:
            self._past.setdefault(code, set()).add(end)
        self._step_aside = step_aside
        self._device = device
        self.matters: dict[int, Matters] = {}
        """id of code -> which of its events are noted."""
        self.leaves: set[type] = {*LEAVES}
        """Types of results without attributes or items, as they are met."""
        self._hook = hook(self, self.matters, self.leaves)
        # The collector's callbacks may run at any time, and are not the callable's.
        self._unread = UNREAD | {getattr(fn, "__code__", None) for fn in gc.callbacks}
        self._aside: list[FrameType] = []
        """Imports and compilations under way, whose reads are no part of the run."""
        self._codes: dict[int, CodeFacts] = {}
        """id of a code object -> facts about it."""
        self._arguments: dict[int, dict[str, Any]] = {}
        """id of a frame -> argument that it assigns anew -> value at the call."""
        self._results: dict[int, dict[int, list[object]]] = {}
        """id of a frame -> offset of an instruction -> results of Python code called there."""
        self.stored: set[tuple[int, object]] = set()
        """(id of a container or dict of attributes, key) of sure stores."""
        self.handed_on: Place | None = None
        """The first line that gave work to another thread, which is not watched."""
        self.failed: str | None = None
        """The error in the watch itself that turned it off before the run's end."""
        self._lock = threading.RLock()
        self._noting = False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch a run in this thread. Slows it down by 5 to 20 us for each function that runs."""
        with no_collection(), self.active(), profiling(self._hook):
            yield

    @contextmanager
    def active(self) -> Generator[None]:
        """Be active during a run; another hook calls this hook."""
        try:
            yield
        except BaseException as error:
            self._end(error.__traceback__)
            raise
        else:
            self._end(None)

    def _end(self, traceback: types.TracebackType | None) -> None:
        self._hook.end()
        try:
            with unwatched():  # the hook of this thread may be on still
                self._note_ended(traceback)
                for facts in self._codes.values():
                    self.reads.ended.difference_update((facts.code, end) for end in facts.singular)
                for kept in (self._arguments, self._results, self._codes):
                    kept.clear()  # another thread may keep this as its hook
                self.reads.sum_up()
        except Exception as error:  # noqa: BLE001  the watch's own: the run goes on
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}"  # it keeps frames alive
        self._hook.end()

    @property
    def seen(self) -> Reads | None:
        """The reads of the run; None if the watch was turned off before its end."""
        return None if self.failed is not None else self.reads

    def _note_ended(self, traceback: types.TracebackType | None) -> None:
        """Note the frames that an error ended. An error of a hook ends the hook, too."""
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            facts = self._codes.get(id(frame.f_code))
            if facts is not None and facts.met:
                self._returned(frame, facts, None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.failed is not None:
            return
        try:
            code = frame.f_code
            facts = self._codes.get(id(code)) or self._facts_of(code)
            if facts.aside or self._aside:
                self._note_aside(frame, event, facts)
            elif event == "return":
                self._returned(frame, facts, arg)
            else:
                if facts.matters:
                    self._note_torch(code, frame)
                if not facts.unread:
                    self._called(frame, facts)
                elif facts.standard:
                    self._note_standard(frame, code)
        except Exception as error:  # noqa: BLE001  raised here, it would end the user's frame
            self._fail(error)

    def _note_aside(self, frame: FrameType, event: str, facts: CodeFacts) -> None:
        if facts.aside and event == "call":
            self._aside.append(frame)
        elif facts.aside and frame in self._aside:
            self._aside.remove(frame)

    def _facts_of(self, code: types.CodeType) -> CodeFacts:
        unread = is_machinery(code.co_filename) or code in self._unread
        facts = CodeFacts(code, unread, self._past.get(code, _NO_ENDS) if self._past else _NO_ENDS)
        self._codes[id(code)] = facts
        passes_on = facts.standard and code.co_name == "__get__"
        if facts.unread and not (facts.aside or facts.matters or passes_on):
            self.matters[id(code)] = Matters.USES if facts.standard else Matters.RESULTS
        return facts

    def _note_torch(self, code: types.CodeType, frame: FrameType) -> None:
        """Note a call that gives work to a thread, or of a backward, a higher-order operator, or a
        generator over the parts of a module."""
        if code in LISTS_MODULE:
            self._note_listing(frame.f_locals[code.co_varnames[0]], LISTS_MODULE[code])
        elif code in HANDS_ON:
            if gives_own_work(frame):
                self.handed_on = self.handed_on or user_frame()
        elif code in RUNS_BACKWARD:
            self.reads.backward = True
            if self._device.type != "cpu":
                run_in_engine(self._device, self._join)
        else:
            self.reads.takes_functions = code.co_name
            if self._step_aside is not None:
                self._step_aside()

    def _note_listing(self, module: object, names: Set[str]) -> None:
        """Note the attributes of a module by which torch lists its parts."""
        inside = attributes_of(module) or _NONE
        note_attributes(self.reads, module, dict.fromkeys(names, Use.READ), inside)
        self.reads.whole.update(id(inside[n]) for n in MODULE_DICTS if n in names and n in inside)

    def _note_standard(self, frame: FrameType, code: types.CodeType) -> None:
        """Note a call of the standard library by code that is read. Its methods and properties read
        all of their object, as `value` of an enumeration's member."""
        parent = frame.f_back
        while parent is not None:
            caller = self._codes.get(id(parent.f_code)) or self._facts_of(parent.f_code)
            if not (caller.standard and parent.f_code.co_name == "__get__"):
                break
            parent = parent.f_back  # a descriptor in Python
        else:
            return
        if not (caller.unread or caller.is_unread(parent)):
            value = frame.f_locals.get(code.co_varnames[0])
            if has_attributes(value) and is_method(type(value), code):
                self.reads.owner(value).opaque = True

    def _join(self) -> None:
        """Watch the engine's thread, before this run gives it work."""
        if sys.getprofile() is None:
            self._hook.begin()

    def _meet(self, facts: CodeFacts) -> None:
        facts.meet()
        self.reads.codes.add(facts.code)
        if facts.ignores_calls:
            self.matters[id(facts.code)] = Matters.RETURNS

    def _called(self, frame: FrameType, facts: CodeFacts) -> None:
        if facts.depends and facts.is_unread(frame):
            return
        if not facts.met:
            self._meet(facts)
        kept: dict[str, Any] = {}
        if facts.replaced:
            values = frame.f_locals
            kept = {n: v for n in facts.replaced if has_contents(v := values.get(n))}
        if facts.is_enclosed:
            kept = _enclosing(frame)
        if facts.iterates:  # at the end it is exhausted
            kept[ITERATED] = iterated_container(frame.f_locals.get(ITERATED))
        if kept:
            facts.given = True
            self._arguments[id(frame)] = kept

    def _returned(self, frame: FrameType, facts: CodeFacts, result: object) -> None:
        arguments, results = _NONE, _NONE
        if facts.given:
            key = id(frame)
            arguments, results = self._arguments.pop(key, _NONE), self._results.pop(key, _NONE)
        if not has_contents(result):
            self.leaves.add(type(result))
        elif (parent := frame.f_back) is not None:
            code = parent.f_code
            caller = self._codes.get(id(code)) or self._facts_of(code)
            if not caller.unread:
                caller.given = True
                at = self._results.setdefault(id(parent), {}).setdefault(parent.f_lasti, [])
                if len(at) < MOST:
                    at.append(result)
        make_way_in_hook()
        at = frame.f_lasti
        if facts.unread or (facts.depends and facts.is_unread(frame)):
            return
        if not facts.met:  # the frame may be older than the watch
            self._meet(facts)
        for store in facts.stores:
            if at > store.offset:
                self._note_store(store, frame.f_locals.get(store.variable))
        if at in facts.past:
            return
        with self._lock:
            if self._noting:  # in this thread
                raise RuntimeError("the watch was called in its own work")
            self._noting = True
            of_tensors = self._note(frame, facts, at, arguments, results)
            self._noting = False
        if of_tensors:
            facts.singular.add(at)
        elif at not in facts.ends:
            facts.ends.add(at)
            self.reads.ended.add((facts.code, at))

    def _note(
        self,
        frame: FrameType,
        facts: CodeFacts,
        at: int,
        arguments: dict[str, Any],
        results: dict[int, list[object]],
    ) -> bool:
        """Note the reads of a frame. Return whether it read what hangs on tensors."""
        named = None if arguments or results else facts.named.get(at)
        if named is None or not named.note_alike(self.reads, frame.f_globals, frame.f_locals):
            run = RanFrame(self.reads, frame, facts, arguments, results)
            run.note(at)
            return run.reads_tensor_attributes
        return False

    def _note_store(self, store: SureStore, value: object) -> None:
        for name in store.path:
            value = next(iter(peek(value, name)), None)
        holder = value if store.item else attributes_of(value)
        if holder is not None:
            self.stored.add((id(holder), store.key))


def _enclosing(frame: FrameType) -> dict[str, Any]:
    """Return the variables that the body of a class takes from the function around it, which runs
    it. The frame of the body has only the names of the class."""
    variables: dict[str, Any] = {}
    parent = frame.f_back
    while parent is not None and len(variables) < len(frame.f_code.co_freevars):
        values = parent.f_locals
        for name in frame.f_code.co_freevars:
            if name in values and parent.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables.setdefault(name, values[name])
        parent = parent.f_back
    return variables


def run_in_engine(device: torch.device, function: Callable[[], object]) -> None:
    """Run a function in the engine's thread for an accelerator, as the hook of an empty leaf in a
    backward without operators. No mode or transform sees it. Costs 0.2 ms."""

    def hook(_: Tensor) -> None:
        function()

    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
    ):
        leaf = torch.empty(0, device=device, requires_grad=True)
        leaf.register_hook(hook)
        leaves, gradients = (leaf,), (torch.empty(0, device=device),)
        Variable._execution_engine.run_backward(
            leaves, gradients, False, False, leaves, allow_unreachable=True, accumulate_grad=False
        )

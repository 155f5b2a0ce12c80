"""One compiled graph: its recordings, for each set of parameters in its calls."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_, itemgetter
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.compilation import Backend, compiled_graph
from onelaunch.capture.io_plan import is_filled
from onelaunch.dynamo.nodes import example, function_in, inputs_of, is_on
from onelaunch.dynamo.numbers import floats_elsewhere, is_float
from onelaunch.dynamo.settings import CompileSettings
from onelaunch.dynamo.sizes import Sized, sized
from onelaunch.dynamo.split import code_of_dynamo, refused_in
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.frames.watch import FrameWatch
from onelaunch.native import FAILURES, compiled
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.candidate import SignatureStatus
from onelaunch.runtime.graphed import Graphed, graphed
from onelaunch.sizes.buckets import Buckets
from onelaunch.state.slots import Unchanging

_LEAST_WARMUP = 3
"""The least number of warm-up calls: the first shows the graph, and the others run its code."""
_MOST_PROGRAMS = 256
"""The most sets of parameters of one region: layers of a model that are compiled once."""


class RegionCallee(Callee):
    """A compiled graph with the tensors that it reads where they are. `eager_form`: the graph
    itself, whose operations can be watched. `cut`: see `CompiledRegion._cut`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        eager_form: Callable[..., Any],
        statics: Unchanging,
        cut: Callable[[CaptureError], bool],
    ) -> None:
        super().__init__(fn, compile=False, dynamic=False, root=("", statics))
        self._eager_form = eager_form
        self.cut = cut
        self.reads = Reads(items={(id(statics), name): Use.READ for name in statics})

    @property
    def eager_form(self) -> Callable[..., Any]:
        """See `Callee.eager_form`."""
        return self._eager_form

    @property
    def in_place(self) -> bool:
        """See `Callee.in_place`: the next graph often reads the results of this one."""
        return True

    def read_watch(self, *_: Any, **__: Any) -> None:
        """Return no watch: Dynamo has seen the reads of the code."""

    def store_reads(self, watch: FrameWatch | None) -> None:
        """Keep the reads as they are."""


class CutGraphed(Graphed[..., Any]):
    """The recordings of a graph that is compiled anew if an operator in it is refused."""

    _callee: RegionCallee

    def _refused(self, status: SignatureStatus, error: CaptureError) -> Miss:
        if not self._callee.cut(error):
            return super()._refused(status, error)
        status.refusal.code = error.code
        return MISS


class Program(NamedTuple):
    """A region over one set of parameters, and its recordings."""

    places: bytes  # of these parameters among the inputs, as bytes of int64
    given: tuple[Tensor, ...]  # the parameters
    taken: Callable[[Sequence[Any]], tuple[Any, ...]]  # takes the inputs that move from all inputs
    graphed: Graphed[..., Any]


@dataclass(eq=False)
class CompiledRegion:
    """A compiled graph; each of its calls is one launch."""

    name: str
    run: Callable[..., Any]
    eager_form: Callable[..., Any]  # the graph itself, whose operations can be watched
    _static: Mapping[int, str]  # place of an input that is read where it is -> its name
    _numbers: Sequence[int]
    """Places of inputs that are host tensors of one number, and read on the device."""
    _sizes: Sized | None  # the inputs that follow bucketed sizes, if any do
    _count: int
    _device: torch.device
    settings: CompileSettings
    _code: CodeType | None = None
    """The code that Dynamo compiles anew, in parts, if an operator in the graph is refused."""
    _floats: Sequence[int] = ()
    """Places of others, which the graph reads on the host: a recording for each value."""
    _stopped_in: object = None
    _programs: list[Program] = field(default_factory=list[Program])
    """Replaced, never changed, so that no lock is needed."""

    def __post_init__(self) -> None:
        self._refused = refused_in(self._code)
        self._refused_before = {None, *self._refused}
        self._holds = _holds()
        self._place(self._static)

    def call(self, *args: Any) -> Any:
        """Run the graph on its inputs: the program of the parameters among them."""
        for places, given, taken, run in self._programs:
            if self._holds(args, places, given):
                return run(*taken(args))
        self._add_program(args)
        return self.call(*args)

    def graphs(self) -> list[Graphed[..., Any]]:
        return [program.graphed for program in self._programs]

    def reset(self) -> None:
        programs, self._programs = self._programs, []
        for program in programs:
            program.graphed.reset()

    def buckets(self) -> Buckets | None:
        """Return the buckets of a function of the inputs that move, if it has any."""
        return None if self._sizes is None else self._sizes.buckets(self._moving)

    def named(self, tensors: Sequence[Tensor]) -> Unchanging:
        """Return the inputs that are read where they are, parameters and buffers, by name."""
        return Unchanging(zip(self._static.values(), tensors, strict=True))

    def bound(self, run: Callable[..., Any], statics: Unchanging) -> Callable[..., Any]:
        """Return a function of the moving inputs; the others are those of `statics`."""
        static, moving, device = tuple(self._static), self._moving, self._device
        sizes = {} if self._sizes is None else self._sizes.numbers

        def call(*given: Any) -> Any:
            args: list[Any] = [None] * self._count
            for place, t in zip(static, statics.values(), strict=True):
                args[place] = t
            for place, value in zip(moving, given, strict=True):
                args[place] = value
            for place in self._numbers:
                args[place] = args[place].to(device)
            for place, (tensor, dim) in sizes.items():
                args[place] = args[tensor].shape[dim]
            for place in self._floats:
                args[place] = torch.tensor(args[place], dtype=torch.float64)
            self._stopped_in = None
            try:
                return run(*args)
            except Exception as error:
                self._stopped_in = _operator_in(error.__traceback__)
                raise

        call.__name__ = self.name
        return call

    def _cut(self, error: CaptureError) -> bool:
        """Have Dynamo compile the code anew at its next call, in parts around the operator that a
        capture was refused in. Return False if there is none, or if its parts contain it, too."""
        if self._code is None or self._stopped_in in self._refused_before:
            return False
        refused = CaptureError(error.code, error.what, fix=error.fix)
        self._refused.setdefault(self._stopped_in, refused)
        torch._dynamo.reset_code(self._code)
        return True

    def _place(self, static: Mapping[int, str]) -> None:
        self._static = static
        derived = () if self._sizes is None else self._sizes.numbers
        self._moving = tuple(i for i in range(self._count) if i not in static and i not in derived)

    def _add_program(self, args: Sequence[Any]) -> None:
        """Add the program of a new set of static inputs. A buffer that a module replaces, where its
        parameters stay, becomes an ordinary input."""
        statics = tuple(args[place] for place in self._static)
        for program in self._programs:
            pairs = list(zip(self._static, program.given, statics, strict=True))
            other = [(place, t) for place, t, now in pairs if t is not now]
            if all(not isinstance(t, nn.Parameter) for _, t in other):
                self.reset()
                moved = {place for place, _ in other}
                self._place({p: n for p, n in self._static.items() if p not in moved})
                self._add_program(args)
                return
        if len(self._programs) >= _MOST_PROGRAMS:
            self.reset()
        run = self._graphed(statics)
        places = array("q", self._static).tobytes()
        program = Program(places, statics, _taking(self._moving, self._floats), run)
        self._programs = [*self._programs, program]

    def _graphed(self, tensors: Sequence[Tensor]) -> Graphed[..., Any]:
        statics = self.named(tensors)
        run, eager_form = self.bound(self.run, statics), self.bound(self.eager_form, statics)
        warmup = max(self.settings.graph.warmup, _LEAST_WARMUP)
        options = replace(self.settings.graph, buckets=self.buckets(), warmup=warmup)
        callee = RegionCallee(run, eager_form, statics, self._cut)
        kind = graphed if self._code is None else CutGraphed
        return kind(run, options, self.settings.pool, callee=callee)


class Regions(weakref.WeakSet[CompiledRegion]):
    """The compiled graphs of one owner."""

    def graphs(self) -> list[Graphed[..., Any]]:
        return [graphed for region in list(self) for graphed in region.graphs()]

    def reset(self) -> None:
        for region in list(self):
            region.reset()


def region_of(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device,
    compiler: Backend,
    settings: CompileSettings,
) -> CompiledRegion:
    """Compile a graph of Dynamo's, or a part of one."""
    placeholders = inputs_of(graph)
    static = {i: n.name for i, n in enumerate(placeholders) if _is_static(n, inputs[i])}
    numbers = [
        i
        for i, node in enumerate(placeholders)
        if isinstance(inputs[i], Tensor)
        and is_filled(inputs[i], device)
        and all(is_on(example(user), device) for user in node.users)
    ]
    floats = [i for i, node in enumerate(placeholders) if is_float(node)]
    buckets = settings.graph.buckets
    sizes = None if buckets is None else sized(graph, static, buckets)
    given = [t.to(device) if i in numbers else t for i, t in enumerate(inputs)]
    name = function_in(node.meta.get("stack_trace") for node in graph.graph.nodes)
    with floats_elsewhere(graph):
        run, eager_form = compiled_graph(graph, given, compiler)
    raises = settings.graph.on_refusal == "raise" or distributed.initialized()
    code = None if raises or sizes is not None else code_of_dynamo()
    return CompiledRegion(
        name, run, eager_form, static, numbers, sizes, len(inputs), device, settings, code, floats
    )


@functools.cache
def _holds() -> Callable[[tuple[Any, ...], bytes, tuple[Tensor, ...]], bool]:
    """Return a function that tells whether tensors are at their places, in C if possible."""
    try:
        return compiled("guard").holds
    except FAILURES:
        return lambda args, places, given: all(
            map(is_, map(args.__getitem__, array("q", places)), given)
        )


def _taking(
    places: Sequence[int], floats: Sequence[int]
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the items at `places`. It takes the values of the `floats`."""
    if len(places) > 1 and not floats:
        return itemgetter(*places)
    return lambda items: tuple(items[i].item() if i in floats else items[i] for i in places)


def _operator_in(traceback: TracebackType | None) -> object:
    """Return the outermost operator whose call raised an exception, or None."""
    frames = (frame for frame, _ in walk_tb(traceback))
    calls = (f for f in frames if f.f_code is OpOverload.__call__.__code__)
    return next((call.f_locals["self"] for call in calls), None)


def _is_static(node: torch.fx.Node, value: object) -> bool:
    """Return whether an input is a parameter or an attribute of a module, or is marked as static by
    `torch._dynamo.mark_static_address`."""
    marks = node.meta.get("tensor_dict") or {}
    return isinstance(value, Tensor) and (
        isinstance(value, nn.Parameter) or "_dynamo_static_input_type" in marks
    )

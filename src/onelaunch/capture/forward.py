"""The autograd side of a capture, for a callable whose results require grad."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.autograd.accumulate import takes_directly
from onelaunch.autograd.backward import ForwardRun, StaticGraph
from onelaunch.autograd.chain import Chain, Link, stream_of
from onelaunch.autograd.components import Component
from onelaunch.autograd.graph_walk import CapturedGraph, is_one_of_several, is_pure_view, viewed
from onelaunch.autograd.node import Saved, SavedOver
from onelaunch.autograd.pair import AutogradPair, Watched
from onelaunch.autograd.proxies import NoHooks, ProxyLeaves, refuse_backward_hooks
from onelaunch.call.spec import TensorSpec, lies_on, overlaps_itself
from onelaunch.call.tree import first_places, unique
from onelaunch.capture.checks import WRITE_IN_PLACE, BackwardInside
from onelaunch.capture.compilation import CompiledInCapture
from onelaunch.capture.io_plan import (
    ArgumentView,
    HeldView,
    Inputs,
    Output,
    Outputs,
    Own,
    OwnView,
    put_in_group,
)
from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.protocol import DevicePool, Driver, Rewind
from onelaunch.driver.refusals import error_here
from onelaunch.errors import CaptureError
from onelaunch.state.guard import StateGuard
from onelaunch.state.slots import Slot
from onelaunch.state.walk import StateWalk
from onelaunch.watch.observer import Observer


class _SeenByBackward(NamedTuple):
    """The tensors that a backward may read; see `pair.Watched`."""

    inputs: list[int]
    tensors: list[Tensor]
    results: list[int]
    plain: list[int]
    saves: bool
    saved: list[Tensor] | None
    """The tensors that the captured graph saves; None if a node does not show them."""


@dataclass(slots=True, eq=False)
class Forward:
    driver: Driver
    device: torch.device
    new_pool: Callable[[], DevicePool]
    """Makes a device pool that no other recording uses. Tensors saved for a backward must outlive
    all launches in between, so each forward has one of its own."""
    keep_within: Callable[[DevicePool], bool]
    """Evicts until the limit of all pools is kept, but nothing of one pool; returns False if that
    is impossible."""
    top: object  # the module that is graphed; hooks on it run outside
    raises: bool  # whether a backward that cannot be captured is an error
    direct: bool  # whether the backward may write the gradients of parameters itself
    chain: Chain | None = None  # callables that run before and after it, and share its memory
    pool: DevicePool = field(init=False)
    stream: object = field(init=False)  # also for eager backwards over the captured graph
    rewind: Rewind | None = None  # the capture's rewind of the random state
    holders: set[int] = field(default_factory=set)
    _proxies: ProxyLeaves | None = None
    _pair: AutogradPair | None = None
    _link: Link | None = None

    def __post_init__(self) -> None:
        self._link = self.chain and self.chain.on(self.driver, self.device)
        if self._link is not None:
            self.pool, self.stream = self._link.forwards, self._link.stream
            return
        self.pool = self.new_pool()
        # Whatever works on the stream, a capture or a backward, keeps the pool.
        self.stream = stream_of(self.pool, self.driver, self.device)

    @property
    def pair(self) -> AutogradPair:
        assert self._pair is not None
        return self._pair

    def forget(self) -> None:
        """Let go of the graph of a run that was undone."""
        self._pair, self.holders = None, set()

    @contextmanager
    def around(self, before: StateWalk, hidden: Sequence[Slot]) -> Generator[None]:
        """Put stand-ins in place of tensors that require grad, and let no hooks run."""
        values = [(slot.name, value) for slot, value in before.slots.values()]
        modules = [(name, m) for name, m in values if isinstance(m, nn.Module)]
        refuse_backward_hooks((name, m) for name, m in modules if m is not self.top)
        self._proxies = ProxyLeaves(before, self.device, hidden)
        with NoHooks(), self._proxies:
            try:
                yield
            except CompiledInCapture:  # for the stand-ins, perhaps of what it differentiates
                if before.runs_backward():
                    raise BackwardInside from None
                raise

    def real(self, t: Tensor) -> Tensor:
        """Return the tensor that a stand-in replaces, or `t` itself."""
        assert self._proxies is not None
        return self._proxies.real(t)

    def viewed(self, t: Tensor) -> Tensor | None:
        """Return the callable's own base of a view; see `graph_walk.viewed`."""
        base = viewed(t)
        return None if base is None else self.real(base)

    def replace_proxies(
        self, observer: Observer, results: list[Tensor], arguments: Sequence[Tensor], plan: Inputs
    ) -> None:
        """Replace stand-ins by the callable's own tensors, in the results and in the observer.
        Refuse a stand-in that was given other memory (OL105), and arguments changed in place
        (OL113). Raises `BackwardInside`: a gradient was accumulated in the run."""
        assert self._proxies is not None
        moved = self._proxies.moved()
        if moved is not None:
            what = f"`{self._proxies.name(moved)}` is given other memory in the call"
            where = observer.memory.made_at(moved)
            raise CaptureError("OL105", what, where=where, fix=WRITE_IN_PLACE)
        for t, spec in zip(arguments, plan.specs, strict=False):
            if t.requires_grad != spec.requires_grad or t.grad_fn is not None:
                raise error_here("OL113", f"an argument, {spec}, is changed in place")
        if self._proxies.accumulated() or any(t.grad is not None for t in arguments):
            raise BackwardInside
        self._proxies.replace_in(observer, self.driver.storage)
        results[:] = map(self.real, results)

    def read_after(
        self, plan: Inputs, outside: Collection[int]
    ) -> tuple[list[Tensor], dict[int, SavedOver]] | None:
        """Return the tensors that a backward reads, or None if they are not known. The first are in
        the recording's memory, the second inputs that it can read where the caller has them, by
        position among the watched. `outside`: storages of tensors from before the capture."""
        graph, pair = CapturedGraph(self.pair.static.outputs), self.pair
        saved = graph.saved()
        if saved is None or graph.packs or graph.spoiled or self._link or pair.components:
            return None
        storage = self.driver.storage
        every = unique([t for t in (*saved, *graph.kept()) if self._here(t)])
        # Another read gives the same tensors, but for those that a node makes anew.
        lasting = set(map(id, (*(graph.saved() or ()), *graph.kept())))
        alone = {group.members[0] for group in plan.groups if len(group.members) == 1}
        readable: dict[int, SavedOver] = {}
        for at, index in enumerate(pair.watched.inputs):
            static, whole = plan.statics[index], at in pair.saved.inputs
            over = [t for t in every if storage(t) == storage(static)]
            if index in alone and all(
                id(t) in lasting and (t is static) == whole and t.dtype == static.dtype
                for t in over
            ):
                first = static.storage_offset()
                readable[at] = [(t, int(t.storage_offset() - first)) for t in over]
        elsewhere = {id(t) for over in readable.values() for t, _ in over}
        inside = [t for t in every if id(t) not in elsewhere and storage(t) not in outside]
        return inside, readable

    def plan(
        self,
        outputs: Outputs,
        results: Sequence[Tensor],
        inputs: Inputs,
        observer: Observer,
        held: dict[int, list[Tensor]],
        run: ForwardRun,
    ) -> None:
        """Classify the results by their part in autograd, and keep the graph that leads to them."""
        results = [*results, *_add_hidden_bases(self.driver, outputs, results)]
        numbers = _through_node(self.driver, outputs, results, inputs)
        of_node = [results[number] for number in numbers]
        graph = CapturedGraph(of_node)
        graph.refuse_unfit()
        self.holders = graph.held()
        assert self._proxies is not None
        reached = {id(t) for t in graph.leaves}
        first = first_places(inputs.statics)  # one that is given twice is one leaf
        arguments = sorted(i for t, i in first.items() if t in reached)
        proxies = [pair for pair in self._proxies.pairs() if id(pair[0]) in reached]
        reached -= {id(inputs.statics[i]) for i in arguments} | {id(s) for s, _ in proxies}
        lost = next((t for t in graph.leaves if id(t) in reached), None)
        if lost is not None:
            given = set(map(self.driver.storage, filter(self._here, inputs.statics)))
            storage, hidden = self.driver.storage(lost), observer.ledger is None
            memory = observer.memory
            is_new = storage not in memory.external if hidden else memory.is_new(lost)
            if is_new or storage in given:
                raise BackwardInside  # made in the call, of an argument's memory perhaps
            raise CaptureError("OL114", f"a tensor of shape {list(lost.shape)} requires grad")
        proxies.sort(key=lambda pair: self.direct and takes_directly(pair[1]))
        direct = [real for _, real in proxies if self.direct and takes_directly(real)]
        leaves = [inputs.statics[i] for i in arguments] + [s for s, _ in proxies]
        ours = len(leaves) - len(direct)
        static = StaticGraph(
            self.driver, self.device, self.stream, of_node, leaves, len(direct), self.rewind, run
        )
        static.preexisting = outputs.from_before()
        link = self._link
        if link is not None:
            static.stream_lock = link.lock
        plain = {
            number: results[number]
            for number, output in enumerate(outputs.tensors)
            if isinstance(output.memory, Own) and number not in numbers
        }
        seen = self._seen(graph, of_node, plain, inputs, observer, held)
        memory = [inputs.statics[i] for i in seen.inputs] + seen.tensors
        memory += [plain[number] for number in seen.plain]
        static.overwritten.statics = memory + [of_node[place] for place in seen.results]
        pair = AutogradPair(
            static=static,
            pool=self.pool,
            new_pool=self.new_pool,
            make_room=partial(self.keep_within, self.pool),
            results=numbers,
            arguments=arguments,
            parameters=[real for _, real in proxies[: len(proxies) - len(direct)]],
            direct=direct,
            watched=Watched(
                seen.inputs, seen.tensors, seen.plain, list(map(self.driver.storage, memory))
            ),
            watched_results=seen.results,
            saved=self._saved(graph, seen, inputs, observer),
            saves=seen.saves,
            raises=self.raises,
            link=link,
        )
        groups = [] if link else graph.groups(of_node)  # torch's callables are one node each
        for group in groups if len(groups) > 1 else ():
            of = [of_node[place] for place in group]
            inside = CapturedGraph(of)
            part = self._seen(inside, of, plain, inputs, observer, held)
            reached, used = {id(t) for t in inside.leaves}, {id(t) for t in part.tensors}
            watched = [i in part.inputs for i in pair.watched.inputs]
            watched += [id(t) in used for t in pair.watched.tensors]
            watched += [number in part.plain for number in pair.watched.plain]
            places = [place for place, is_watched in enumerate(watched) if is_watched]
            pair.components.append(
                Component(
                    results=group,
                    inputs=[i for i, t in enumerate(leaves[:ours]) if id(t) in reached],
                    watched=places,
                    watched_results=part.results,
                    saves=part.saves,
                    statics=[memory[place] for place in places] + [of[i] for i in part.results],
                )
            )
        self._pair = pair

    def _seen(
        self,
        graph: CapturedGraph,
        results: Sequence[Tensor],
        plain: Mapping[int, Tensor],
        inputs: Inputs,
        observer: Observer,
        held: dict[int, list[Tensor]],
    ) -> _SeenByBackward:
        """Return the caller's tensors and the results that eager would save. `results`: those of
        the node. `plain`: result index -> result that needs no gradient."""
        saved = graph.saved()
        region = self.driver.region
        saves = True
        if saved is None:  # a node does not show them: assume that everything is saved
            every = (*inputs.statics, *results, *plain.values())
            storages = {region(t).storage for t in every if self._here(t)}
            storages |= set(held)
        else:
            storages = {region(t).storage for t in saved if self._here(t)}
            saves = bool(saved or graph.packs or graph.spoiled) or any(
                isinstance(node, torch.autograd.function.BackwardCFunction) for node in graph.nodes
            )
        storages |= {region(t).storage for t in graph.kept() if self._here(t)}
        # Tensors that the forward writes without counting it (the statistics of a BatchNorm) are
        # saved too, and may change before the backward.
        storages -= observer.memory.written.keys() - observer.memory.version_bumped
        external = {
            s: ts for s, ts in observer.memory.external.items() if s in storages and s in held
        }
        return _SeenByBackward(
            inputs=[
                i
                for i, static in enumerate(inputs.statics)
                if self._here(static)
                and region(static).storage in storages
                and not inputs.tensors[i].is_inference()
            ],
            tensors=unique([t for ts in external.values() for t in ts if not t.is_inference()]),
            results=[i for i, t in enumerate(results) if region(t).storage in storages],
            plain=[
                number
                for number, t in plain.items()
                if self._here(t) and not t.is_inference() and region(t).storage in storages
            ],
            saves=saves,
            saved=saved,
        )

    def _saved(
        self, graph: CapturedGraph, seen: _SeenByBackward, inputs: Inputs, observer: Observer
    ) -> Saved:
        """Return the tensors that eager saves as objects."""
        assert self._proxies is not None
        # Values packed by hooks (checkpointing) read everything again that the forward read.
        every = seen.saved is None or graph.packs
        saved = {id(t) for t in (*(seen.saved or ()), *graph.kept())}
        tensors = observer.memory.external.values() if every else ()
        read = {id(t) for ts in tensors for t in ts}
        state = [(s, t) for s, t in self._proxies.pairs() if id(s) in saved or id(t) in read]
        of_inputs = {
            place: inputs.statics[i]
            for place, i in enumerate(seen.inputs)
            if every or id(inputs.statics[i]) in saved
        }
        if graph.spoiled:
            return Saved(state, of_inputs, lambda: False)
        with torch.no_grad():  # a leaf may be frozen meanwhile
            return Saved(state, of_inputs, StateGuard((), [t for _, t in state]).check)

    def _here(self, t: Tensor) -> bool:
        return lies_on(t, self.device) and bool(t.numel())


def _through_node(
    driver: Driver, outputs: Outputs, results: Sequence[Tensor], inputs: Inputs
) -> list[int]:
    """Return the indices of results that come out of the node. Views of the caller's memory are
    made outside of the node, for autograd to see them as views."""
    chosen: list[int] = []
    for number, (output, t) in enumerate(zip(outputs.tensors, results, strict=True)):
        if not output.spec.requires_grad:
            continue
        if isinstance(output.memory, ArgumentView | HeldView):
            # Neither a function's own gradient is one of `as_strided`, nor is that of a view of a
            # tensor that overlaps itself, which it shares out among all elements at one address.
            memory = output.memory
            if not is_pure_view(t) or overlaps_itself(
                inputs.tensors[memory.number] if isinstance(memory, ArgumentView) else memory.tensor
            ):
                output.is_view = False
                chosen.append(number)
            continue
        if not isinstance(output.memory, Own):
            continue
        base = _base(t, results, outputs)
        if base is None:
            output.is_view = False
            chosen.append(number)
            continue
        first = driver.region(results[base]).start
        output.memory = OwnView(base, driver.region(t).start - first if t.numel() else 0)
    return chosen


def _add_hidden_bases(driver: Driver, outputs: Outputs, results: Sequence[Tensor]) -> list[Tensor]:
    """Add to the plan, and return, tensors whose views among the results overlap. A write to one
    view changes the gradients of the others, so their base must be there."""
    bases: list[Tensor] = []
    views: dict[int, list[Tensor]] = {}
    ids = set(map(id, results))
    for output, t in zip(outputs.tensors, results, strict=True):
        base = t._base
        if base is None or base.grad_fn is None or id(base) in ids or is_one_of_several(t):
            continue
        if isinstance(output.memory, Own) and is_pure_view(t, {base.grad_fn}):
            views.setdefault(id(base), []).append(t)
    for several in views.values():
        if any(_overlap(driver, a, b) for a, b in itertools.combinations(several, 2)):
            base = cast(Tensor, several[0]._base)
            outputs.numbers[id(base)] = len(outputs.tensors)
            memory = put_in_group(driver, outputs, base)
            outputs.tensors.append(Output(TensorSpec.of(base), memory, False))
            bases.append(base)
    return bases


def _overlap(driver: Driver, a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage share an element."""
    regions = driver.region(a), driver.region(b)
    if not regions[0].overlaps(regions[1]):
        return False
    first = min(region.start for region in regions)
    count, host = max(region.stop for region in regions) - first, torch.device("cpu")
    with raw(), no_functions():  # on a CPU, this is no part of what is captured
        used = torch.zeros(count, dtype=torch.bool, device=host)
        places: list[Tensor] = []
        for t, region in zip((a, b), regions, strict=True):
            place = torch.full((), region.start - first, device=host)
            for size, stride in zip(t.shape, t.stride(), strict=True):
                place = place[..., None] + torch.arange(size, device=host) * stride * t.itemsize
            part = min(a.itemsize, b.itemsize)  # of a complex number
            places.append(place[..., None] + torch.arange(0, t.itemsize, part, device=host))
        used[places[0]] = True
        return bool(used[places[1]].any())


def _base(t: Tensor, results: Sequence[Tensor], outputs: Outputs) -> int | None:
    """Return the index of the result that `t` is a view of, or None."""
    if not t._is_view():
        return None
    for number, other in enumerate(results):
        owned = isinstance(outputs.tensors[number].memory, Own)
        if other is t._base and owned and other.grad_fn is not None:
            return number if is_pure_view(t, {other.grad_fn}) else None
    return None

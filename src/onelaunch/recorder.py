"""How a call is captured."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onelaunch import distributed
from onelaunch.autograd import ForwardGraph
from onelaunch.dials import Dials, Reached, Steps, constants, dials, every_key, keys_read
from onelaunch.driver.driver import Capture, Driver, Graph, Varying
from onelaunch.driver.driver import Pool as DevicePool
from onelaunch.driver.randomness import seeded_once, seeding_line_of, watching_seeds
from onelaunch.errors import CaptureError
from onelaunch.forward import BackwardInside, Forward
from onelaunch.gradients import lasting_gradients
from onelaunch.guard import StateGuard
from onelaunch.leaves import stand_in_for
from onelaunch.observe import Observer, let_go
from onelaunch.optimizers import parameters_of
from onelaunch.padding import Follow
from onelaunch.plan import (
    Inputs,
    Outputs,
    Unfit,
    plan_inputs,
    plan_outputs,
    stage,
    unique,
    varying_group,
)
from onelaunch.recording import Captured, NeedsGrad, StateOutput
from onelaunch.relied import relied_on
from onelaunch.shards import local
from onelaunch.slots import gradient_of
from onelaunch.spec import TensorSpec, readers
from onelaunch.spent import is_spent
from onelaunch.state import (
    MISSING,
    Change,
    Slot,
    Walk,
    changes,
    restore,
    walk,
)
from onelaunch.tree import Tree, flatten, flatten_call, is_code, is_plain, unflatten
from onelaunch.tree import constants as tree_constants


@dataclass(slots=True)
class _Run:
    """What one run of the body found."""

    result: Any = None
    inputs: Inputs | None = None
    outputs: Outputs | None = None
    tree: Tree | None = None
    numbers: tuple[int, ...] = ()
    state: list[StateOutput] = field(default_factory=lambda: cast(list[StateOutput], []))
    found: list[Change] = field(default_factory=lambda: cast(list[Change], []))
    after: Walk | None = None
    lasting: list[Tensor] = field(default_factory=lambda: cast(list[Tensor], []))
    """Gradients that each replay writes where they are."""
    again: list[Slot] = field(default_factory=lambda: cast(list[Slot], []))
    """Slots that turned out to be inputs: the run is to be repeated with them as such."""
    steps: Steps = field(default_factory=Steps)


@dataclass(slots=True)
class Recorder:
    """Captures one call.

    Args:
        fn: what runs in the capture.
        roots: where the state that `fn` reaches begins, named.
        forward: where the results require grad: what of the capture is autograd's business.
        known: for code whose operations cannot be watched (Inductor's): what a watched eager run
            of the same call read and wrote.
    """

    driver: Driver
    device: torch.device
    pool: DevicePool
    fn: Callable[..., Any]
    roots: Sequence[tuple[str, object]]
    static_outputs: bool
    rebind: bool
    known: Observer | None = None
    forward: Forward | None = None
    varying: Mapping[int, Varying] = field(default_factory=dict[int, Varying])
    """Arguments that may be smaller in a call than here."""
    follows: Sequence[tuple[Follow, ...]] = ()
    """For each tensor of the result the dimensions that follow their sizes."""
    _constants: dict[int, tuple[frozenset[str], Reached]] = field(
        default_factory=lambda: cast(Any, {})
    )
    """id of an optimizer -> see `dials.constants`."""

    def record(self, tree: Tree, tensors: Sequence[Tensor]) -> Captured:
        """Capture the call ``fn(*args, **kwargs)`` whose flattened form is given.

        Nothing that the capture did remains, whether it succeeds or not, apart from the Python
        effects of running `fn` once.
        """
        # Torch imports Dynamo when a dispatch mode first runs: 1 s, which is no part of a capture.
        importlib.import_module("torch._dynamo")
        started = time.perf_counter()
        hidden: list[Slot] = []
        while True:
            try:
                captured = self._attempt(tree, tensors, hidden, started)
            except (CaptureError, NeedsGrad, BackwardInside) as error:
                let_go(error)
                raise
            if captured is not None:
                return captured

    def _attempt(
        self, tree: Tree, tensors: Sequence[Tensor], hidden: list[Slot], started: float
    ) -> Captured | None:
        before = walk(self.roots)
        slots_kept = [_Kept.of(local(t)) for _, t in before.tensors() if self._strided(t)]
        held = self._held(before)
        hidden_tensors = [cast(Tensor, slot.read()) for slot in hidden]
        pinned = set(held) - {self.driver.region(t).storage for t in hidden_tensors}
        run = _Run(steps=Steps(self._kept(before), self.device.type == "cuda"))
        observer: list[Observer] = []
        plan = plan_inputs(self.driver, [*tensors, *hidden_tensors], self.device, pinned)
        plan.varying = dict(self.varying)
        try:
            generators = _generators(tree, before)

            def body(capture: Capture) -> list[Tensor]:
                watching = self._run(capture, plan, tree, hidden, before, held, run)
                observer[:] = [watching]
                assert run.outputs is not None
                kept = run.result if self.static_outputs or self.forward else ()
                return [*kept, *run.lasting]

            stream = self.forward and self.forward.stream
            graph, statics = self.driver.capture(body, self.pool, generators, stream)
        except BaseException:
            distributed.abandon_step(value for _, value in before.held.values())
            self._undo(run, slots_kept, before)
            plan.release()  # frames of the traceback refer to it for good
            raise
        if run.again:
            graph.reset()
            self._undo(run, slots_kept, before)
            hidden.extend(run.again)
            return None
        holders = self.forward.holders if self.forward else ()
        error = _afterthought(slots_kept, observer[0], run, plan, before, holders)
        if error is not None:
            graph.reset()
            self._undo(run, slots_kept, before)
            raise error
        turned = self._turned(run.steps, graph)
        if turned is None:
            graph.reset()
            self._undo(run, slots_kept, before)
            return None
        if self.rebind and not run.found:
            graph = self._rebound_inputs(graph, plan, tree, before, held, observer[0], generators)
        statics = statics[: len(statics) - len(run.lasting)]
        captured = self._finish(graph, statics, run, hidden, before, observer[0], held, started)
        captured.dials = turned
        return captured

    def _kept(self, before: Walk) -> Callable[[Optimizer], frozenset[str]]:
        def kept(optimizer: Optimizer) -> frozenset[str]:
            known = self._constants.get(id(optimizer))
            return keys_read(before, optimizer) if known is None else known[0]

        return kept

    def _turned(self, steps: Steps, graph: Graph) -> Dials | None:
        """What turns the numbers of the optimizers that stepped; None if the capture is to be
        repeated, because some of them turned out to be constants."""
        if not steps.places:
            return Dials.none()
        for optimizer in steps.optimizers:
            if id(optimizer) not in self._constants:
                kept = steps.kept(optimizer)
                stepped = steps.stepped[id(optimizer)]
                found = constants(self.driver, self.device, self.pool, optimizer, stepped, kept)
                self._constants[id(optimizer)] = found
                if found[0] != kept:
                    return None
        turned = dials(steps, graph)
        if turned is not None and turned.current():
            known = [(o, self._constants[id(o)][1]) for o in steps.optimizers]
            if all(expected <= turned.reached((o,)) for o, expected in known):
                return turned
        for optimizer in steps.optimizers:
            self._constants[id(optimizer)] = every_key(optimizer), frozenset()
        return None

    def _rebound_inputs(
        self,
        graph: Graph,
        plan: Inputs,
        tree: Tree,
        before: Walk,
        held: dict[int, list[Tensor]],
        observer: Observer,
        generators: Sequence[torch.Generator],
    ) -> Graph:
        """Have kernels read the inputs where the caller has them, as far as that is proven.

        The callable is captured again for it, so it must have no Python effects of its own.
        """
        pinned = {self.driver.region(t).storage for ts in held.values() for t in ts}

        def body(capture: Capture) -> None:
            fresh = plan_inputs(self.driver, plan.tensors, self.device, pinned)
            steps = Steps(every_key, self.device.type == "cuda")
            self._run(capture, fresh, tree, [], before, dict(held), _Run(steps=steps))

        state = [t for t in observer.written.values() if not observer.known(t)]
        try:
            return self.driver.rebind(graph, body, self.pool, state, generators)
        except CaptureError:
            return graph  # it works as it is: the inputs are copied

    def _strided(self, t: Tensor) -> bool:
        return t.layout is torch.strided and t.device.type == self.device.type

    def _held(self, before: Walk) -> dict[int, list[Tensor]]:
        """storage -> tensors that the callable reaches by address."""
        held: dict[int, list[Tensor]] = {}
        for _, t in before.tensors():
            if self._strided(t):
                held.setdefault(self.driver.region(t).storage, []).append(t)
        return held

    def _run(
        self,
        capture: Capture,
        plan: Inputs,
        tree: Tree,
        hidden: list[Slot],
        before: Walk,
        held: dict[int, list[Tensor]],
        run: _Run,
    ) -> Observer:
        """The body: bring the inputs in, run the callable, take the outputs out."""
        statics = stage(self.driver, capture, plan, self.device)
        if self.forward is not None:
            for index, how in enumerate(plan.travels):
                if how == "address":
                    statics[index] = stand_in_for(statics[index])
        arguments = statics[: len(statics) - len(hidden)]
        for slot, static in zip(hidden, statics[len(arguments) :], strict=True):
            slot.write(static)
        device = [
            static
            for static, how in zip(statics, plan.travels, strict=True)
            if how not in ("host", "address")
        ]
        displaced = [
            static
            for static, t in zip(statics, plan.tensors, strict=True)
            if any(static is d for d in device) and t.storage_offset() != static.storage_offset()
        ]
        observer = Observer(self.driver, self.device, device, displaced=displaced, held=held)
        args, kwargs = unflatten(tree, list(arguments))
        places = [t.data_ptr() for t in arguments]
        around = nullcontext() if self.forward is None else self.forward.around(before, hidden)
        if self.known is not None:
            result = self.fn(*args, **kwargs)
            observer.adopt(self.known, plan.tensors, plan.statics)
        else:
            seeds = watching_seeds(observer.refuse_seed, reads=self.forward is not None)
            stepping = run.steps.watched(observer)
            reads = observer.host_reads()
            with self._seeds_kept(observer), seeds, stepping, reads, around, observer:
                result = self.fn(*args, **kwargs)
            if observer.refused is not None:
                raise observer.refused  # the callable caught it
        self._inspect_arguments(tree, (args, kwargs), arguments, plan)
        if places != [t.data_ptr() for t in arguments]:
            raise CaptureError("OL107", "an argument was given other memory")
        flat = flatten(result, "result", objects=True)
        if self.forward is not None:
            self.forward.settle(observer, flat.tensors, arguments, plan)
        _refuse_opaque(flat.tree)
        run.after = walk(self.roots)
        run.found = changes(before, run.after)
        run.steps.refuse_schedule(run.found)
        run.again = self._read_and_rebound(run.found, hidden, observer, flat.tensors)
        _refuse_parts([cast(Tensor, slot.read()) for slot in run.again], (), ())
        if run.again:
            run.outputs = Outputs()
            run.result = []
            return observer
        for storage, tensors in observer.external.items():
            held.setdefault(storage, []).extend(tensors)
        rebound = list(self._rebound(run.found, before))
        trees = [flatten(value, slot.name) for slot, value in rebound]
        if self.forward is not None:
            for part in trees:
                part.tensors[:] = map(self.forward.real, part.tensors)
        every = [*flat.tensors, *(t for part in trees for t in part.tensors)]
        run.inputs = plan
        _refuse_parts(every, rebound, {id(t) for ts in held.values() for t in ts})
        lasting: set[int] = set()
        if self.forward is None:
            lasting = lasting_gradients(self.driver, rebound, flat.tensors, self.device)
        run.outputs = plan_outputs(self.driver, every, plan, observer, self.device, held, lasting)
        run.lasting = [o.tensor for o in run.outputs.made if o.tensor is not None and o.lasts]
        if self.forward is not None:
            self.forward.plan(run.outputs, unique(every), plan, observer, held)
        else:
            _mark_spent(run.outputs, every)
        numbers = run.outputs.numbers
        for t, follows in zip(flat.tensors, self.follows, strict=False):
            output = run.outputs.made[numbers[id(t)]]
            output.follows = follows
            if follows and output.source not in ("own", "argument"):
                raise Unfit
        run.tree, run.numbers = flat.tree, tuple(numbers[id(t)] for t in flat.tensors)
        run.state = [
            StateOutput(slot, part.tree, tuple(numbers[id(t)] for t in part.tensors))
            for (slot, _), part in zip(rebound, trees, strict=True)
        ]
        self._covered(run.after, every, observer)
        lasting = {id(t) for t in run.lasting}
        run.result = [t for t in unique(every) if id(t) not in lasting]
        self._output_ports(capture, plan, run.outputs, observer)
        return observer

    def _seeds_kept(self, observer: Observer) -> AbstractContextManager[None]:
        if self.device.type != "cuda":
            return nullcontext()  # the tape compares the state that it records

        def refusal() -> CaptureError:
            place = seeding_line_of(self.fn)
            what = "`torch.manual_seed`, or the like, in a capture"
            return CaptureError("OL106", what, where=str(place) if place else None)

        def redraw() -> None:
            for draw in observer.draws:
                draw()

        return seeded_once(refusal, redraw)

    def _inspect_arguments(
        self, tree: Tree, now: Any, statics: Sequence[Tensor], plan: Inputs
    ) -> None:
        """Refuse what the callable did to its arguments other than write into tensors."""
        flat = flatten_call(*now)
        if flat.tree != tree or any(
            a is not b for a, b in zip(flat.tensors, statics, strict=False)
        ):
            raise CaptureError("OL105", "the callable changed a container among its arguments")
        for t, spec in zip(statics, plan.specs, strict=False):
            if t.shape != spec.shape or t.stride() != spec.stride or t.dtype != spec.dtype:
                raise CaptureError("OL107", f"an argument, {spec}, became {list(t.shape)}")

    def _read_and_rebound(
        self,
        found: Sequence[Change],
        hidden: Sequence[Slot],
        observer: Observer,
        results: Sequence[Tensor],
    ) -> list[Slot]:
        """Slots whose old tensor was read, returned or moved to another slot, and which hold a new
        one now: recurrent state."""
        known = {slot.id for slot in hidden}
        passed = [*results, *(t for change in found for t in flatten(change.after).tensors)]
        used = {self.driver.region(t).storage for t in passed if self._strided(t)}
        used |= observer.external.keys()
        return [
            change.slot
            for change in found
            if isinstance(change.before, Tensor)
            and change.slot.id not in known
            and self._strided(change.before)
            and self.driver.region(change.before).storage in used
        ]

    def _rebound(
        self,
        found: Sequence[Change],
        before: Walk,
    ) -> Iterator[tuple[Slot, object]]:
        """The slots that each replay has to write, with what the capture put there."""
        holders = {id(slot.holder) for slot, _ in before.held.values()}
        holders |= set(before.containers)
        leaves = {id(t) for _, t in before.tensors()}
        for slot, old, new in found:
            if slot.key is gradient_of and id(slot.holder) in leaves:
                yield slot, new
                continue
            if id(slot.holder) not in holders:
                continue  # a new container: rebuilt as a whole where its own slot is
            tensors = flatten(new).tensors if new is not MISSING else []
            if not tensors and not isinstance(old, Tensor):
                continue  # a Python effect: it is not repeated
            grown = old is MISSING and not isinstance(slot.holder, dict)
            if new is MISSING or grown or isinstance(slot.holder, tuple):
                raise CaptureError("OL105", f"`{slot.name}` grew, or lost, a tensor in the call")
            yield slot, new

    def _covered(self, after: Walk, every: Sequence[Tensor], observer: Observer) -> None:
        """Refuse tensors of the recording that were stored where no replay will renew them."""
        covered = {id(t) for t in every}
        for slot, t in after.tensors():
            if id(t) not in covered and self._strided(t) and observer.known(t):
                raise CaptureError("OL105", f"`{slot.name}` keeps a tensor made in the call")

    def _output_ports(
        self, capture: Capture, plan: Inputs, outputs: Outputs, observer: Observer
    ) -> None:
        """Results to fresh memory, and written inputs back to where they came from."""
        if not self.static_outputs:
            for index, group in enumerate(outputs.groups):
                size = (group.stop - group.start,)
                buffer = self.driver.alias(group.example, torch.uint8, size, (1,), 0)
                capture.output(buffer, 0, varying_group(outputs, index))
        for index in written_groups(self.driver, plan, observer):
            group = plan.groups[index]
            if group.travel == "fill":
                raise CaptureError("OL104", "a 0-dim host argument is written")
            assert group.buffer is not None
            example = plan.tensors[group.members[0]]
            displacement = self.driver.region(example).start - group.region.start
            if group.travel == "copy":
                displacement = 0
            capture.output(group.buffer, displacement)

    def _writes(self, observer: Observer) -> Callable[[Tensor], bool]:
        return lambda t: self._strided(t) and self.driver.region(t).storage in observer.written

    def _stepped(self, steps: Steps, before: Walk, observer: Observer) -> list[Optimizer]:
        """The optimizers that step; of compiled code, those whose parameters it wrote."""
        if self.known is None:
            return steps.optimizers
        writes = self._writes(observer)
        found = {id(o): o for _, o in before.held.values() if isinstance(o, Optimizer)}
        return [o for o in found.values() if any(map(writes, parameters_of(o)))]

    def _undo(self, run: _Run, kept: Sequence[_Kept], before: Walk) -> None:
        """Put back what a failed capture left in the callable's state."""
        found = run.found or changes(before, walk(self.roots))
        restore(c for c in found if isinstance(c.before, Tensor) or flatten(c.after).tensors)
        for k in kept:
            k.restore()

    def _finish(
        self,
        graph: Graph,
        statics: list[Tensor],
        run: _Run,
        hidden: list[Slot],
        before: Walk,
        observer: Observer,
        held: dict[int, list[Tensor]],
        started: float,
    ) -> Captured:
        assert run.inputs is not None
        assert run.outputs is not None
        assert run.tree is not None
        # The slots are as before the call until a launch rebinds them.
        rebound = {state.slot.id for state in run.state}
        restore(change for change in run.found if change.slot.id in rebound)
        written_slots = rebound | {slot.id for slot in hidden}
        slots = relied_on(before, run.found, written_slots, observer, self.driver, self.device)
        pinned = [
            t
            for t, how in zip(run.inputs.tensors, run.inputs.travels, strict=True)
            if how == "address"
        ]
        external = [t for tensors in observer.external.values() for t in tensors]
        external += [value for _, value in slots if isinstance(value, Tensor)]
        unique = list({id(t): t for t in [*external, *pinned]}.values())
        unmoved = [t for t in unique if self._strided(t)]
        if self.known is None:  # of compiled code no step is seen
            slots = run.steps.relied_on(slots, before, self._writes(observer))
        # A scheduler writes to the groups at each step, and each would be looked into again then.
        groups = {id(group) for o in run.steps.optimizers for group in o.param_groups}
        sized = {id(c): (c, names) for c, names in before.sized() if id(c) not in groups}
        guard = StateGuard(slots, unmoved, list(sized.values()), readers())
        groups = written_groups(self.driver, run.inputs, observer)
        written_inputs = sorted(m for g in groups for m in run.inputs.groups[g].members)
        written = [t for t in observer.written.values() if not observer.known(t)]
        bumped = [t for t in written if self.driver.region(t).storage in observer.counted]
        storages = [
            None if group.buffer is None else self.driver.region(group.buffer).storage
            for group in run.inputs.groups
        ]
        bumped_inputs = sorted(
            m
            for g in groups
            if storages[g] in observer.counted
            for m in run.inputs.groups[g].members
        )
        run.inputs.release()
        for own in run.outputs.groups:
            own.example = own.example.new_empty(0) if not self.static_outputs else own.example
        observer.release()
        pair = None
        if self.forward is not None:
            pair = self.forward.pair
            graph, statics = ForwardGraph(graph, pair), []
        return Captured(
            driver=self.driver,
            device=self.device,
            graph=graph,
            inputs=run.inputs,
            hidden=list(hidden),
            outputs=run.outputs,
            tree=run.tree,
            numbers=run.numbers,
            state=run.state,
            guard=guard,
            written=written,
            written_inputs=written_inputs,
            bumped=bumped,
            bumped_inputs=bumped_inputs,
            draws=observer.draws,
            dials=Dials.none(),
            optimizers=self._stepped(run.steps, before, observer),
            statics=statics,
            lasting=run.lasting,
            untraced=guard.untraced([t for t in external if not _is_input(t, pinned)]),
            seconds=time.perf_counter() - started,
            pair=pair,
        )


def _mark_spent(outputs: Outputs, results: Sequence[Tensor]) -> None:
    """Tell results whose backward has run inside from those whose gradients are still wanted."""
    for t in results:
        output = outputs.made[outputs.numbers[id(t)]]
        output.spent = output.source == "own" and is_spent(t)
        if output.source == "own" and output.spec.requires_grad and not output.spent:
            raise NeedsGrad


def _afterthought(
    kept: Sequence[_Kept],
    observer: Observer,
    run: _Run,
    plan: Inputs,
    before: Walk,
    holders: Collection[int],
) -> CaptureError | None:
    """What is wrong with a capture that succeeded, or None.

    A tensor of the callable's state was moved; or one that was made in the run lives on where no
    slot leads: a hook's list, a tensor's attribute, an iterator. No replay would renew it, and each
    would write over it.
    """
    for k in kept:
        if k.changed():
            shape = list(k.tensor.shape)
            return CaptureError("OL107", f"a tensor of the callable's state became {shape}")
    dropped = _dropped(run.found, before)
    lasting = [part for t in run.lasting for part in (t, local(t))]
    expected = [*run.result, *lasting, *plan.statics, *dropped]
    stray = observer.survivor(expected, holders)
    if stray is None:
        return None
    what = f"somebody keeps a tensor made in the call, {TensorSpec.of(stray)}"
    return CaptureError("OL105", what)


def _dropped(found: Sequence[Change], before: Walk) -> list[Tensor]:
    """The tensors in containers that the callable replaced, and that only `before` still holds, as
    a GradScaler does with what it found in each step."""
    ours = {id(entry) for entry in (*before.held.values(), *before.containers.values(), *found)}
    tensors: list[Tensor] = []
    for change in found:
        if isinstance(change.before, dict | list):
            holders = gc.get_referrers(change.before)
            if all(id(h) in ours or isinstance(h, FrameType) for h in holders):
                tensors += _inside(change.before)
    return tensors


def _inside(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [t for part in cast(Sequence[object], parts) for t in _inside(part)]


def _is_input(t: Tensor, pinned: Sequence[Tensor]) -> bool:
    return any(t is p for p in pinned)


def written_groups(driver: Driver, plan: Inputs, observer: Observer) -> list[int]:
    """The groups of inputs that the callable wrote into."""
    return [
        index
        for index, group in enumerate(plan.groups)
        if group.buffer is not None and driver.region(group.buffer).storage in observer.written
    ]


def _generators(tree: Tree, before: Walk) -> list[torch.Generator]:
    """The generators that the callable reaches, each once."""
    values = [constant.value for _, constant in tree_constants(tree)]
    values += [value for _, value in before.held.values()]
    found = {id(g): g for g in values if isinstance(g, torch.Generator)}
    return list(found.values())


@dataclass(slots=True)
class _Kept:
    """A tensor that existed before a capture, with where it was."""

    tensor: Tensor
    alias: Tensor
    address: int
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(t: Tensor) -> _Kept:
        return _Kept(t, t.detach(), t.data_ptr(), t.shape, t.stride())

    def changed(self) -> bool:
        t = self.tensor
        return (t.data_ptr(), t.shape, t.stride()) != (self.address, self.shape, self.stride)

    def restore(self) -> None:
        if self.changed():
            self.tensor.data = self.alias


def _refuse_parts(
    results: Sequence[Tensor], rebound: Sequence[tuple[Slot, object]], held: Collection[int]
) -> None:
    """A DTensor is more than the memory that a replay would give: only what is there already may
    be a result, and gradients, which stay as they are."""
    kept = {id(t) for slot, t in rebound if slot.key is gradient_of} | set(held)
    for t in results:
        if local(t) is not t and id(t) not in kept:
            what = f"the result holds a {type(t).__name__}"
            raise CaptureError("OL108", what, fix="return t.full_tensor(), or t.to_local()")


def _refuse_opaque(tree: Tree) -> None:
    """Results must be tensors and plain values: anything else would be shared between calls."""
    for _, constant in tree_constants(tree):
        value = constant.value
        if not (is_plain(value) or is_code(value) or isinstance(value, nn.Module)):
            kind = type(value)
            raise CaptureError("OL108", f"the result holds a {kind.__module__}.{kind.__qualname__}")

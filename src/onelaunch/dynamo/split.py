"""Parts of a graph that cannot be captured, found before it is compiled.

Every node runs once on fake tensors. Operations on tensors of the host, reads by the host and
operators marked as unsafe make parts of their own, which run as they are. The parts in between are
recorded. Host tensors that are the same in each call stay in them: a capture keeps the copies that
they have on the device, see `watch.device_constants`. A mode that the graph turns on and off,
autocast or `no_grad`, is not cut. A custom operator shows its inside only in a capture: region.py
has the graph compiled anew then.
"""

from __future__ import annotations

import importlib
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_map_only

from onelaunch.driver.aten import operator as operator_of
from onelaunch.driver.aten import tensors
from onelaunch.driver.refusals import refusal
from onelaunch.dynamo.nodes import Graph, Node, detached, example, fake_mode, inputs_of, line_in
from onelaunch.errors import CaptureError
from onelaunch.unwinding import DispatchMode

Compile = Callable[[Graph, Sequence[Any]], Callable[..., Any]]

_ON = re.compile(r"_enter_|.*_increment_nesting$|_saved_tensors_hooks_disable$")
_OFF = re.compile(r"_exit_|.*_decrement_nesting$|_saved_tensors_hooks_enable$")
"""The names of functions that turn a mode on or off."""
_FIX = "move it out of the compiled function, or to the device"


class Inspection(NamedTuple):
    """The nodes of a graph that need care. `refused`: the nodes that a recording cannot contain,
    each with the reason."""

    refused: dict[Node, CaptureError]
    constants: list[Node]  # the others that make tensors of the host, the same in each call


refused_operators: WeakKeyDictionary[CodeType, dict[object, CaptureError]] = WeakKeyDictionary()
"""Code -> operator that a capture of its graphs was refused in -> the refusal."""


def code_of_dynamo() -> CodeType | None:
    """Return the code that Dynamo compiles in this thread."""
    translators: Any = importlib.import_module("torch._dynamo.symbolic_convert")
    try:
        return translators.InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:  # somebody else compiles
        return None


def refused_in(code: CodeType | None) -> dict[object, CaptureError]:
    """Return the operators that captures of a code's graphs were refused in, to be added to."""
    return {} if code is None else refused_operators.setdefault(code, {})


def inspected(
    graph: Graph, device: torch.device, refusals: Mapping[object, CaptureError]
) -> Inspection:
    """Look for nodes of a graph that a recording cannot contain. `refusals`: operator that a
    capture was refused in -> the refusal."""
    mode = fake_mode(graph)
    if mode is None:
        return Inspection({}, [])
    with mode:
        checked = _Checked(graph, mode, device, refusals)
        checked.run(*map(detached, inputs_of(graph)))
    return checked.inspection()


def compiled_parts(
    graph: Graph, inspection: Inspection, compile_part: Compile
) -> Callable[..., Any]:
    """Return the graph with its recordable parts compiled; the others run as they are."""
    eager = {*inspection.refused, *_of_floats(graph)}
    for node in reversed(inspection.constants):
        min(node.users).prepend(node)
    parts = _parts(graph, eager)
    uses = [(node, user) for node in inspection.constants for user in node.users]
    if any(parts[node] != parts[user] for node, user in uses):
        eager.update(*uses)  # no part hands on a tensor of the host
        parts = _parts(graph, eager)
    whole = split_module(graph, graph, lambda node: parts.get(node, 0), keep_original_order=True)
    eager_parts = {f"submod_{parts[node]}" for node in eager if node in parts}
    inputs: dict[str, Sequence[Any]] = {}
    mode: Any = fake_mode(graph)
    with mode:
        _Inputs(whole, mode, inputs).run(*[node.meta["example_value"] for node in inputs_of(graph)])
    with warnings.catch_warnings():
        # Torch looks at the `grad` of inputs, and hides what it warns of then.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for name, given in inputs.items():
            part: Any = whole.get_submodule(name)
            del whole._modules[name]
            # No module: its call is plain.
            run = part.forward if name in eager_parts else _compiled(part, given, compile_part)
            vars(whole)[name] = run
    return whole.forward


def _compiled(part: Graph, given: Sequence[Any], compile_part: Compile) -> Callable[..., Any]:
    """Compile a part with a single result, no tuple, as AOTAutograd wants it."""
    output = part.graph.output_node()
    if isinstance(output.args[0], tuple | list):
        return compile_part(part, given)
    output.args = (output.args,)
    part.recompile()
    run = compile_part(part, given)
    return lambda *args: run(*args)[0]


def _of_floats(graph: Graph) -> Iterator[Node]:
    """Yield the nodes with changing floats that could not be taken out of the graph. A part with
    such a node would be compiled for its value."""
    for node in graph.graph.nodes:
        values = map(example, (node, *node.all_input_nodes))
        if node.op != "output" and any(isinstance(v, torch.SymFloat) for v in values):
            yield node


def _modes(graph: Graph) -> Iterator[list[Node]]:
    """Yield the nodes from each start of a mode to its end. A cut in between would leave the next
    part in another mode."""
    usual = {"_set_grad_enabled": torch.is_grad_enabled(), "_set_fwd_grad_enabled": True}
    depth, changed, within = 0, set[str](), list[Node]()
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name in usual:
            (changed.discard if node.args[0] == usual[name] else changed.add)(name)
        depth += bool(_ON.match(name)) - bool(_OFF.match(name))
        if depth or changed or within:
            within.append(node)
        if within and not depth and not changed:
            yield within
            within = []
    if within:
        yield within


def _parts(graph: Graph, eager: set[Node]) -> dict[Node, int]:
    """Return node -> number of its part, in the order of the graph, as later operations may read
    earlier writes. Modes that a node of `eager` stands in are added there."""
    modes = [set(nodes) for nodes in _modes(graph)]
    eager.update(*(nodes for nodes in modes if not nodes.isdisjoint(eager)))
    in_modes = set[Node]().union(*modes)
    parts: dict[Node, int] = {}
    number, within = 0, False
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if source in parts and isinstance(example(source), tuple | list):
            parts[node] = parts[source]
            continue
        stays = within and node not in in_modes and _is_number(node)
        if (node in eager) != within and not stays:
            number, within = number + 1, not within
        parts[node] = number
    return parts


def _is_number(node: Node) -> bool:
    """Return whether a node handles numbers alone. A size, and assertions on it, stay beside the
    operation whose result has that size."""
    values = list(map(example, (node, *node.all_input_nodes)))
    return not isinstance(values[0], tuple | list) and (
        isinstance(values[0], torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        or not any(isinstance(value, Tensor) for value in values)
    )


class _Fake(torch.fx.Interpreter):
    """A run on examples of the inputs and of the graph's tensors, such as an optimizer's."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        super().__init__(graph)
        self.mode = mode

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph as Dynamo has, and restore the grad mode, which the graph may change."""
        with torch.set_grad_enabled(torch.is_grad_enabled()), enable_python_dispatcher():
            return super().run(*args, **kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the example of a tensor that the graph holds."""
        value = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(value) if isinstance(value, Tensor) else value

    def run_node(self, n: Node) -> Any:
        """Run a node. If it reads data its result is Dynamo's, with the symbols that other nodes
        know. A changing float is Dynamo's too: Dynamo passes it as a tensor, and examples have
        forgotten its symbol."""
        reads = n.meta.get("unbacked_bindings")
        if n.op == "call_method" and n.target == "item" and not reads:
            value = example(n)
            if isinstance(value, torch.SymFloat):
                return value
        if not reads:
            return super().run_node(n)
        with self.mode.shape_env.ignore_fresh_unbacked_symbols():
            super().run_node(n)
        return n.meta["example_value"]


class _Computed(torch.autograd.Function):
    """A stand-in for the result of an earlier part, and no leaf either. AOTAutograd loses the
    gradients of writes to leaves."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Return another tensor of its layout, over memory of its own."""
        del ctx
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return gradients[0]


class _Inputs(_Fake):
    """A run that notes the inputs of each part."""

    def __init__(self, whole: Graph, mode: Any, inputs: dict[str, Sequence[Any]]) -> None:
        super().__init__(whole, mode)
        self._inputs = inputs

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the inputs, in the form that a separate graph gets."""
        with torch.enable_grad():
            self._inputs[target] = [
                _Computed.apply(value.detach().requires_grad_())
                if isinstance(value, Tensor) and value.grad_fn
                else value
                for value in args
            ]
        return _Fake(cast(Graph, self.fetch_attr(target)), self.mode).run(*args)


class _Checked(_Fake):
    """A run that looks at the operations of each node."""

    def __init__(
        self, graph: Graph, mode: Any, device: torch.device, refusals: Mapping[object, CaptureError]
    ) -> None:
        super().__init__(graph, mode)
        self._device = device
        self._refusals = refusals
        self._refused: dict[Node, CaptureError] = {}
        self._steady: dict[Node, CaptureError] = {}
        """Node with host work that is the same in each call -> its refusal."""
        self._constants: dict[Node, Tensor] = {}
        """Node that makes a constant of the host -> the constant."""

    def run_node(self, n: Node) -> Any:
        """Run a node, and note the first of its operations that is refused."""
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            return tree_map_only(Tensor, Tensor.detach, n.meta["example_value"])
        checking = _Checking(self._device, self._refusals)
        with checking:
            result = super().run_node(n)
        if checking.refusal is not None:
            checking.refusal.where = line_in(n.meta.get("stack_trace") or "")
            steady = checking.steady and self._is_steady(n, result)
            (self._steady if steady else self._refused)[n] = checking.refusal
            if steady and _is_on_host(result, self._device):
                self._constants[n] = result
        return result

    def _is_steady(self, n: Node, result: Any) -> bool:
        """Return whether the host tensors that a node takes and makes are the same in each call."""
        if isinstance(result, tuple | list):
            return False
        makes = _is_on_host(result, self._device)
        return all(
            m in self._constants
            or not (makes or isinstance(value, torch.SymFloat) or _is_on_host(value, self._device))
            for m in n.all_input_nodes
            for value in [example(m)]
        )

    def inspection(self) -> Inspection:
        """Return the findings. If a constant is written, or used by what is refused, all are."""
        constants, refused = self._constants, self._refused
        uses = {user for node in constants for user in node.users}
        written = any(t._version for t in constants.values())
        if written or any(user.op == "output" or user in refused for user in uses):
            taken = {node: e for node, e in self._steady.items() if node in uses | constants.keys()}
            return Inspection(refused | taken, [])
        return Inspection(refused, [node for node in constants if node.users])


class _Checking(DispatchMode):
    """A mode that notes the first operation that a recording cannot contain. `steady`: whether each
    such operation is only refused for tensors of the host, draws nothing, and takes nothing from
    the device."""

    def __init__(self, device: torch.device, refusals: Mapping[object, CaptureError]) -> None:
        super().__init__()
        self._device = device
        self._refusals = refusals
        self.refusal: CaptureError | None = None
        self.steady = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = operator_of(func)
        given, results = tensors((args, kwargs)), [*tensors(result), *op.written(args, kwargs)]
        error = self._known_refusal(func, args, kwargs)
        self.steady &= error is None
        if error is None:
            error = self._of_host(f"`{func.overloadpacket.__name__}`", given, results)
            leaves = {_is_on_host(t, self._device) for t in given} == {False}
            brings = any(_is_on_host(t, self._device) for t in results)
            self.steady &= error is None or not (op.random or (leaves and brings))
        self.refusal = self.refusal or error
        return result

    def _known_refusal(self, func: Any, args: Any, kwargs: dict[str, Any]) -> CaptureError | None:
        name = f"`{func.overloadpacket.__name__}`"
        refused = self._refusals.get(func)
        if refused is not None:
            return CaptureError(refused.code, f"{name}: {refused.what}", fix=refused.fix)
        row = refusal(operator_of(func), args, kwargs)
        if row is None:
            return None
        what = row.what or f"{name} needs the value of a tensor"
        return CaptureError(row.code, what, fix=row.fix)

    def _of_host(
        self, name: str, given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> CaptureError | None:
        if any(_is_on_host(t, self._device) for t in results):
            return CaptureError("OL103", f"{name} works on the host", fix=_FIX)
        if any(t.dim() and _is_on_host(t, self._device) for t in given):
            return CaptureError("OL104", f"{name} uses a tensor of the host", fix=_FIX)
        return None


def _is_on_host(value: object, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device.type not in (device.type, "meta")

"""Inductor on the emulated device: all of it but the kernels.

Dynamo, `compile_fx`, AOTAutograd and what follows the generation of code are torch's own. The code
is the graph that Inductor would generate kernels for, run by torch's operators. It empties the list
of its inputs; it makes results in the memory of inputs that nobody else needs, a backward in what
AOTAutograd donates, a part in what another one computed; and it is cut where Inductor cuts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import get_donated_idxs
from torch.fx.passes.split_module import split_module

Boxed = Callable[[list[Any]], Sequence[Any]]
Node = torch.fx.Node


def reduce_overhead(f: Callable[..., Any], policy: Any, **compile_options: Any) -> Any:
    """Return what ``torch.compile(f, mode="reduce-overhead")`` is with a policy."""
    patches = {
        "triton.cudagraphs": True,
        "cudagraph_policy": policy,
        "force_disable_caches": True,
        "use_joint_graph_passes": False,  # their patterns are traced on the device
    }

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=generated, config_patches=patches)

    return torch.compile(f, backend=backend, **compile_options)


class Code(SimpleNamespace):
    """What Inductor makes of a graph: a `CompiledFxGraph`."""


def generated(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    static_input_idxs: Sequence[int] = (),
    is_backward: bool = False,
    is_inference: bool = False,
    **kwargs: Any,
) -> Boxed:
    """Do what `compile_fx_inner` does, with a stand-in for the code and for what Inductor notes."""
    donated = (get_donated_idxs() or ()) if is_backward else ()
    (results,) = graph.graph.output_node().args
    made = Code(
        current_callable=partial(boxed, graph, donated),
        recursively_apply_fns=None,
        partition_maps=None,
        cudagraph_info=SimpleNamespace(
            cudagraph_fail_reasons=[],
            placeholders=(),
            stack_traces=[getattr(node, "stack_trace", None) for node in results],
        ),
        fx_kwargs={
            "static_input_idxs": static_input_idxs,
            "is_backward": is_backward,
            "is_inference": is_inference,
        },
        device_types={"cuda"},
        device_idxs={0},
        disabled_cudagraphs_reason=None,
        mutated_input_idxs=set(mutated(graph)),
        kernel_free_cudagraph=False,  # since torch 2.15
        inputs_to_check=(),
        output_strides=[None] * len(results),
        _defers_input_alignment=True,
        _original_gm=None,
        _serialized_original_gm=None,
        _wrap_compiled_regions=False,
    )
    if any(map(is_cut, graph.graph.nodes)):
        runner = Runner(graph)
        made.current_callable = runner.call
        made.recursively_apply_fns = runner.recursively_apply_fns
        made.partition_maps = runner.maps
    constants = SimpleNamespace(unwrap=lambda graph: {})
    post_compile: Any = CompiledFxGraph.post_compile
    options = {"is_backward": is_backward, "is_inference": is_inference, **kwargs}
    post_compile(made, example_inputs, constants, options)

    def call(inputs: list[Any]) -> Any:
        return made.current_callable(inputs)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def boxed(graph: torch.fx.GraphModule, donated: Sequence[int], inputs: list[Any]) -> Sequence[Any]:
    """Run a graph, or a part of one; results take the memory of the inputs that are donated."""
    args = list(inputs)
    inputs.clear()
    results = graph.forward(*args)
    results = list(results) if isinstance(results, tuple | list) else [results]
    free = [args[i] for i in donated]
    for i, result in enumerate(results):
        for t in free if isinstance(result, Tensor) else ():
            if (t.shape, t.stride(), t.dtype) == (result.shape, result.stride(), result.dtype):
                results[i] = t.copy_(result)
                free = [other for other in free if other is not t]
                break
    return results


def mutated(graph: torch.fx.GraphModule) -> Iterator[int]:
    """Yield the inputs that a graph writes."""
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        for user in node.users:
            schema = getattr(user.target, "_schema", None)
            if schema is not None and schema.is_mutable and user.args[0] is node:
                yield place
                break


def is_cut(node: Node) -> bool:
    """Return whether Inductor leaves an operation out of its graphs."""
    value = node.meta.get("val")
    on_host = isinstance(value, Tensor) and value.device.type == "cpu"
    from_host = any(
        isinstance(arg.meta.get("val"), Tensor) and arg.meta["val"].device.type == "cpu"
        for arg in node.all_input_nodes
    )
    return node.op == "call_function" and (on_host or from_host)


class Runner:
    """The code of a graph that is cut: Inductor's class of this name."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self._inputs = graph.graph.find_nodes(op="placeholder")
        parts = self._parts(graph)
        self._whole = split_module(
            graph, graph, lambda n: parts.get(n, 0), keep_original_order=True
        )
        cut = {f"submod_{parts[node]}" for node in parts if is_cut(node)}
        names = [node.name for node in self._inputs]
        self.partitions: list[Boxed] = []
        self.maps: list[Any] = []
        for place, node in enumerate(self._whole.graph.find_nodes(op="call_module")):
            if node.target in cut:
                continue
            part: Any = self._whole.get_submodule(node.target)
            mapping = [names.index(a.name) if a.name in names else None for a in node.args]
            self.maps.append(SimpleNamespace(id=place, input_index_mapping=mapping))
            del self._whole._modules[node.target]
            vars(self._whole)[node.target] = partial(self._call, len(self.partitions))
            freed = [i for i, a in enumerate(node.args) if mapping[i] is None and len(a.users) == 1]
            self.partitions.append(partial(boxed, part, freed))

    def _parts(self, graph: torch.fx.GraphModule) -> dict[Node, int]:
        parts: dict[Node, int] = {}
        number, within = 0, False
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                parts[node] = parts[node.args[0]]
                continue
            if is_cut(node) != within:
                number, within = number + 1, not within
            parts[node] = number
        return parts

    def recursively_apply_fns(self, fns: Sequence[Callable[[Boxed], Boxed]]) -> None:
        """Wrap each part."""
        self.partitions = [fn(part) for fn, part in zip(fns, self.partitions, strict=True)]

    def _call(self, number: int, *args: Any) -> Any:
        results = self.partitions[number](list(args))
        return results[0] if len(results) == 1 else tuple(results)

    def call(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the parts, and what lies between them."""
        args = list(inputs)
        inputs.clear()
        return list(self._whole.forward(*args))

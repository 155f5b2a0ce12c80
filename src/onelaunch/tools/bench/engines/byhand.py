"""A CUDA graph by hand, and the limits that bare replays set for everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.call import tree
from onelaunch.tools.bench.engines.engine import Built, Mode, needs_cuda, snippet, warm
from onelaunch.tools.bench.workload import Workload

SETUP = """\
{statics}
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        model({call})
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static_y = model({call})"""


@dataclass(frozen=True)
class ByHand:
    """A captured graph, with inputs copied in and outputs cloned around each replay.

    Attributes:
        compiled: True to capture Inductor's kernels rather than eager's.
        bare: time the replay alone, a limit and not a way to run anything: its inputs stay.
    """

    name: str = "by-hand"
    title: str = "torch.cuda.graph by hand"
    compiled: bool = False
    bare: bool = False
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        return needs_cuda(device)

    def build(self, workload: Workload) -> Built:
        fn = torch.compile(workload.fn) if self.compiled else workload.fn
        graph, inputs, result = capture(fn, workload)
        given = tree.flatten((workload.args, workload.kwargs)).tensors
        pairs = list(zip(inputs, given, strict=True))

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = tree.flatten((args, kwargs)).tensors
            for static, tensor in zip(inputs, tensors, strict=True):
                static.copy_(tensor)
            graph.replay()
            return tree.unflatten(result.tree, [t.clone() for t in result.tensors])

        def least() -> list[Tensor]:
            # What one writes by hand for a known signature: no containers to take apart.
            for static, tensor in pairs:
                static.copy_(tensor)
            graph.replay()
            return [t.clone() for t in result.tensors]

        kept = [fn]  # the graph reads its parameters by address

        def close() -> None:
            graph.reset()
            kept.clear()

        return Built(call, bare=graph.replay if self.bare else least, close=close)

    def code(self, workload: Workload) -> str:
        positional, keyword = workload.names
        names = [*positional, *keyword]
        call = ", ".join([f"static_{n}" for n in positional] + [f"{n}=static_{n}" for n in keyword])
        copies = "\n".join(f"static_{n}.copy_({n})" for n in names)
        return snippet(
            f"{copies}\ngraph.replay()\ny = static_y.clone()",
            SETUP.format(statics="\n".join(f"static_{n} = {n}.clone()" for n in names), call=call),
            "model = torch.compile(model)" if self.compiled else "",
        )


def capture(
    fn: Callable[..., Any], workload: Workload
) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tree.Flat]:
    """Warm up on a side stream and capture, on inputs of the graph's own."""
    args, kwargs = workload.copy_inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm(fn, Workload(fn, args, kwargs))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(*args, **kwargs)
    return graph, tree.flatten((args, kwargs)).tensors, tree.flatten(result)


BY_HAND = ByHand()
LIMITS = (
    ByHand("bare", "bare replay of the same kernels", bare=True),
    ByHand("bare_compiled", "bare replay of Inductor's kernels", compiled=True, bare=True),
)

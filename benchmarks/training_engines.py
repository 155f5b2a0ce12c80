"""The ways to train that `benchmarks.training` times: forward and backward, and whole steps.

All of them train the same networks on the same batches with Adam of the same options, each with
the implementation of Adam that it allows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

import onelaunch as ol
from examples.placement import device
from examples.workloads import WORKLOADS

Batch = tuple[Tensor, Tensor]
Train = Callable[[Tensor, Tensor], Tensor]

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)
EPS = 1e-4  # so that a gradient of nothing but rounding moves no parameter by the learning rate
WARM_CALLS = 3
BATCHES = 3


class Classifier(nn.Module):
    """BERT and two logits of its pooled output."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(768, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bert(tokens).pooler_output)


def network(name: str) -> tuple[nn.Module, list[Batch]]:
    """A network in train mode, and batches of one size. Dropout is off: results are compared."""
    torch.manual_seed(0)
    model, (x,) = WORKLOADS[name]()
    if name == "bert":
        model = Classifier(model).to(x.device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if name == "bert":
        model.bert.config.attention_probs_dropout_prob = 0.0
    model.train()
    with torch.no_grad():
        classes = copy.deepcopy(model)(x).shape[1]
    batches: list[Batch] = []
    for _ in range(BATCHES):
        other = torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 30_000)
        batches.append((other, torch.randint(classes, (len(x),), device=x.device)))
    return model, batches


@dataclass
class Training:
    """An engine at work.

    Attributes:
        call: takes a batch, trains on it, returns the loss.
        model: whose parameters it trains.
        optimizer: its own, None where it does forward and backward only.
        bare: what is timed instead of a call, where that is less.
        notes: what a reader of its row should know.
    """

    call: Train
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    bare: Callable[[], object] | None = None
    notes: Callable[[], list[str]] = list

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What its optimizer knows of a parameter."""
        return self.optimizer.state.get(parameter, {}) if self.optimizer else {}


@dataclass(frozen=True)
class Engine:
    """A way to train.

    Attributes:
        build: makes it ready, warm-up included, on a copy of the network that is its own.
        kind: what it is judged as.
        graphs: whether it needs CUDA graphs of torch's own.
    """

    name: str
    title: str
    build: Callable[[nn.Module, Sequence[Batch]], Training]
    kind: str = "incumbent"
    graphs: bool = False

    def missing(self) -> str | None:
        return "needs an NVIDIA GPU" if self.graphs and device().type != "cuda" else None


def adam(model: nn.Module, **options: Any) -> Adam:
    """Adam on the parameters. Without CUDA only the fused one keeps its numbers in tensors."""
    if device().type != "cuda":
        options = {"fused": True}
    return Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, **options)


def whole_step(
    model: Callable[[Tensor], Tensor], optimizer: Adam, update: Callable[[], Any] | None = None
) -> Train:
    """The step as one function."""
    update = update or optimizer.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update()
        return loss

    return step


def warm(call: Train, batches: Sequence[Batch], calls: int = WARM_CALLS) -> None:
    for i in range(calls):
        call(*batches[i % len(batches)])


# Whole steps.


def eager_step(**options: Any) -> Callable[[nn.Module, Sequence[Batch]], Training]:
    def build(model: nn.Module, batches: Sequence[Batch]) -> Training:
        optimizer = adam(model, **options)
        step = whole_step(model, optimizer)
        warm(step, batches)
        return Training(step, model, optimizer)

    return build


def compiled_step(mode: str) -> Callable[[nn.Module, Sequence[Batch]], Training]:
    def build(model: nn.Module, batches: Sequence[Batch]) -> Training:
        optimizer = adam(model, capturable=True)
        step: Train = torch.compile(whole_step(model, optimizer), mode=mode)
        warm(step, batches, 5)
        return Training(step, model, optimizer)

    return build


def graphed_model_step(model: nn.Module, batches: Sequence[Batch]) -> Training:
    """`make_graphed_callables` for the model, the loss and a fused Adam outside."""
    fast = torch.cuda.make_graphed_callables(model, (batches[0][0].clone(),))
    optimizer = adam(model, fused=True)
    step = whole_step(fast, optimizer)
    warm(step, batches)
    return Training(step, model, optimizer)


def step_by_hand(*, compiled: bool, bare: bool) -> Callable[[nn.Module, Sequence[Batch]], Training]:
    """The step captured with `torch.cuda.graph`; `bare`: the replay alone is timed, a limit."""

    def build(model: nn.Module, batches: Sequence[Batch]) -> Training:
        options = {"capturable": True} | ({} if compiled else {"fused": True})
        optimizer = adam(model, **options)
        step = whole_step(model, optimizer)
        if compiled:
            step = torch.compile(step)
        x, y = (t.clone() for t in batches[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm(step, [(x, y)], 5)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Not on `stream`: its cuBLAS workspace is memory that the next capture of others frees.
        with torch.cuda.graph(graph):
            loss = step(x, y).detach()

        def call(new_x: Tensor, new_y: Tensor) -> Tensor:
            x.copy_(new_x)
            y.copy_(new_y)
            graph.replay()
            return loss.clone()

        # The graph uses by address what only these objects hold, Inductor's kernels among it.
        call.kept = (step, optimizer)  # type: ignore[attr-defined]
        return Training(call, model, optimizer, graph.replay if bare else None)

    return build


def our_step(compiled: bool) -> Callable[[nn.Module, Sequence[Batch]], Training]:
    def build(model: nn.Module, batches: Sequence[Batch]) -> Training:
        options = {"capturable": True} | ({} if compiled else {"fused": True})
        optimizer = adam(model, **options)
        fast = ol.graph(whole_step(model, optimizer), compile=compiled)
        return _ours(fast, fast, model, optimizer, batches)

    return build


# Forward and backward through autograd. The gradients are dropped before each forward, as
# `zero_grad` does. The sum stands for the loss, so that little but the network is timed.


def forward_backward(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> Train:
    parameters = list(model.parameters())

    def call(x: Tensor, y: Tensor) -> Tensor:
        for p in parameters:
            p.grad = None
        loss = forward(x).sum()
        loss.backward()
        return loss

    return call


def pair(
    change: Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]],
) -> Callable[[nn.Module, Sequence[Batch]], Training]:
    def build(model: nn.Module, batches: Sequence[Batch]) -> Training:
        call = forward_backward(model, change(model, batches[0][0]))
        warm(call, batches, 5)
        return Training(call, model)

    return build


def our_pair(**options: Any) -> Callable[[nn.Module, Sequence[Batch]], Training]:
    def build(model: nn.Module, batches: Sequence[Batch]) -> Training:
        fast: Any = ol.graph(model, **options)
        return _ours(fast, forward_backward(model, fast), model, None, batches)

    return build


def _ours(
    fast: Any, call: Train, model: nn.Module, optimizer: Adam | None, batches: Sequence[Batch]
) -> Training:
    """Warm up and capture; a call that quietly runs eagerly must not be timed as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ol.GraphWarning)
        warm(call, batches, 8)
    if not fast.recordings:
        raise RuntimeError("nothing was recorded")
    return Training(call, model, optimizer, notes=lambda: _notes(fast))


def _notes(fast: Any) -> list[str]:
    nodes = ", ".join(str(recording.nodes) for recording in fast.recordings)
    return [f"recordings of {nodes} nodes"]


PAIR = (
    Engine("eager", "eager", pair(lambda model, x: model)),
    Engine(
        "make_graphed_callables",
        "torch.cuda.make_graphed_callables",
        pair(lambda model, x: torch.cuda.make_graphed_callables(model, (x.clone(),))),
        graphs=True,
    ),
    Engine("onelaunch", "onelaunch", our_pair(), "ours"),
    Engine("onelaunch-direct", "onelaunch gradients=direct", our_pair(gradients="direct"), "ours"),
    Engine("compile", "torch.compile", pair(lambda model, x: torch.compile(model))),
    Engine(
        "reduce-overhead",
        "torch.compile reduce-overhead",
        pair(lambda model, x: torch.compile(model, mode="reduce-overhead")),
        graphs=True,
    ),
)
STEP = (
    Engine("eager", "eager", eager_step()),
    Engine("eager-fused", "eager, fused Adam", eager_step(fused=True)),
    Engine(
        "make_graphed_callables",
        "torch.cuda.make_graphed_callables, fused Adam",
        graphed_model_step,
        graphs=True,
    ),
    Engine(
        "by-hand", "torch.cuda.graph by hand", step_by_hand(compiled=False, bare=False), graphs=True
    ),
    Engine("bare", "bare replay", step_by_hand(compiled=False, bare=True), "limit", True),
    Engine("onelaunch", "onelaunch", our_step(False), "ours"),
    Engine("compile", "torch.compile", compiled_step("default")),
    Engine("onelaunch-compile", "onelaunch compile=True", our_step(True), "ours", graphs=True),
    Engine(
        "reduce-overhead",
        "torch.compile reduce-overhead",
        compiled_step("reduce-overhead"),
        graphs=True,
    ),
    Engine(
        "bare_compiled",
        "bare replay of Inductor's kernels",
        step_by_hand(compiled=True, bare=True),
        "limit",
        True,
    ),
)
PARTS = {"pair": PAIR, "step": STEP}

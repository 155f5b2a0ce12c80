"""Hooks that run inside a step: on an accelerator in threads of autograd's, not the caller's."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import onelaunch as ol
from onelaunch.optimizers.capturable import watching_steps

from .drop_in import assert_same, compare, on_accelerators
from .steps import Randomness, Training, as_eager, batch, own, small_model

Make = Callable[[Any], Optimizer]
O = torch.optim  # noqa: E741


def stepping_in_backward(device: torch.device, make: Make) -> Training:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    model = small_model(device, nn.Dropout(0.5))
    optimizers = {p: make([p]) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return Training(model, list(optimizers.values()), step)


def decaying(i: int, job: Training) -> None:
    for n, optimizer in enumerate(job.optimizers):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + n + 1)


@pytest.mark.filterwarnings("ignore:.*OL308")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: O.SGD(p, lr=0.1),
        lambda p: O.SGD(p, lr=0.1, momentum=0.9),
        lambda p: O.Adam(p, lr=0.1, fused=True),
    ],
    ids=["SGD", "momentum", "Adam"],
)
def test_an_optimizer_step_in_the_backward(device: torch.device, make: Make) -> None:
    as_eager(lambda: stepping_in_backward(device, make), device, calls=10, between=decaying)


@pytest.mark.filterwarnings("ignore:.*OL308")
def test_many_optimizers_whose_numbers_are_constants(device: torch.device) -> None:
    """All are learned of in one more capture, however many there are."""

    def update(self: Any, group: Any, p: Any) -> None:
        p.add_(p.grad * math.sqrt(group["beta"]), alpha=-group["lr"])

    def job() -> Training:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 3)).to(device)
        for n, p in enumerate(model.parameters()):
            nn.init.constant_(p, 0.1 * n)
        made = [own(update, lr=0.1, beta=0.25)([p]) for p in model.parameters()]

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return Training(model, made, step)

    as_eager(job, device, calls=8, between=decaying)


@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
def test_an_optimizer_that_cannot_be_captured_steps_in_the_backward(
    device: torch.device, on_refusal: Any
) -> None:
    def job() -> Training:
        return stepping_in_backward(device, lambda p: O.Adam(p, lr=0.1))

    if on_refusal == "eager":
        with pytest.warns(ol.GraphWarning, match="OL120"):
            as_eager(job, device, recordings=0, min_replays=0, on_refusal="eager")
        return
    made, eager = job(), job()
    fast = ol.graph(made.step)
    before = [p.detach().clone() for p in made.model.parameters()]
    for i in range(2):
        with pytest.raises(ol.CaptureError, match=r"OL120.*Adam counts its steps on the host"):
            fast(*batch(i, device))
        assert_same([p.detach() for p in made.model.parameters()], before)
        assert not any(optimizer.state for optimizer in made.optimizers)
    made.model.zero_grad()
    for one in (made, eager):  # eager goes on
        torch.manual_seed(3)
        one.step(*batch(2, device))
    assert_same(dict(made.model.state_dict()), dict(eager.model.state_dict()))


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t.item(),
    "float": float,
    "truth": lambda t: bool(t > 1),
    "print": repr,
    "tolist": lambda t: t.tolist(),
    "copy": lambda t: t.cpu(),
    "division": lambda t: 1 / t.item(),
}

HOOKS: dict[str, Callable[[nn.Parameter, Callable[[], object]], None]] = {
    "gradient": lambda p, do: p.register_hook(lambda g: (do(), None)[1]),
    "accumulated": lambda p, do: p.register_post_accumulate_grad_hook(lambda p: (do(), None)[1]),
    "node": lambda p, do: node_of(p).register_hook(lambda *_: (do(), None)[1]),
}


def kept_on_cuda(hook: str, device: torch.device) -> bool:
    return hook == "node" and device.type == "cuda"


def node_of(p: nn.Parameter) -> Any:
    """What accumulates a parameter's gradient; kept, for a hook of it goes with it."""
    node = p.view_as(p).grad_fn.next_functions[0][0]  # pyright: ignore
    vars(p)["node"] = node
    return node


def observed(device: torch.device, hook: str, read: Callable[[Tensor], object]) -> Training:
    """A step in which a hook looks at a gradient."""
    model = small_model(device, nn.Dropout(0.5))
    optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    last = next(model.parameters())  # whose gradient is the last to come

    def look() -> None:
        read(last.detach().square().sum())

    HOOKS[hook](last, look)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


def state_of(job: Training) -> list[Any]:
    return [
        [p.detach().clone() for p in job.model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in job.model.parameters()],
        [s["momentum_buffer"].clone() for s in job.optimizers[0].state.values()],
    ]


@on_accelerators
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", READS)
def test_a_read_in_a_hook_is_refused(device: torch.device, hook: str, name: str) -> None:
    """It comes out of the backward, from a thread of the engine's. A node with a hook is kept from
    before, and on CUDA works on the stream of then, where no capture can follow it (OL109)."""
    job = observed(device, hook, READS[name])
    fast = ol.graph(job.step)
    for i in range(3):
        fast(*batch(i, device))
    for i in range(3, 6):  # after a refusal as before it
        before, random = state_of(job), torch.get_rng_state()
        with pytest.raises(ol.CaptureError) as caught:
            fast(*batch(i, device))
        by_cuda = device.type == "cuda" and name == "print"
        codes = ["OL109"] if by_cuda or kept_on_cuda(hook, device) else []
        assert caught.value.code in ("OL101", "OL103", *codes)
        assert "test_step_hooks.py" in str(caught.value.where)
        assert_same(state_of(job), before)
        assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_read_in_a_hook_runs_eagerly(device: torch.device, hook: str) -> None:
    code = "OL10[19]" if kept_on_cuda(hook, device) else "OL101"
    with pytest.warns(ol.GraphWarning, match=code):
        as_eager(
            lambda: observed(device, hook, READS["item"]),
            device,
            recordings=0,
            min_replays=0,
            on_refusal="eager",
        )


@pytest.mark.filterwarnings("ignore:.*OL308")
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_of_ones_own_in_a_hook(device: torch.device, hook: str, graphed: bool) -> None:
    """It comes out of the call, of a warm-up's and of a capture's, and nothing else is harmed."""
    armed = [False]

    def read(t: Tensor) -> None:
        if armed[0]:
            raise ValueError("one's own")

    if graphed and kept_on_cuda(hook, device):
        return  # refused: above
    job, eager = observed(device, hook, read), observed(device, hook, lambda t: None)
    run: Any = ol.graph(job.step) if graphed else job.step
    random = Randomness(device), Randomness(device)
    for i in range(6):
        if i in (1, 3):
            armed[0], before = True, [p.detach().clone() for p in job.model.parameters()]
            with pytest.raises(ValueError, match="one's own"):
                run(*batch(i, device))
            armed[0] = False
            assert_same([p.detach() for p in job.model.parameters()], before)
        with random[0]:
            got = run(*batch(i, device))
        with random[1]:
            assert_same(got, eager.step(*batch(i, device)), f"call {i}")


def edge_of(t: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(t).node


def tripled(*gradients: Any) -> Any:
    return tuple(None if g is None else g * 3 for g in gradients[0])


COMING: dict[str, Callable[[Tensor, Tensor, list[Any]], Any]] = {
    "tensor": lambda w, v, kept: w.register_hook(lambda g: g * 3),
    "accumulated": lambda w, v, kept: w.register_post_accumulate_grad_hook(
        lambda p: (p.grad.mul_(3), None)[1]  # pyright: ignore
    ),
    "node": lambda w, v, kept: (kept.append(edge_of(w)), kept[-1].register_prehook(tripled))[1],
    "after a node": lambda w, v, kept: (
        kept.append(edge_of(w)),
        kept[-1].register_hook(lambda *_: (w.grad.mul_(3), None)[1]),  # pyright: ignore
    )[1],
    "view": lambda w, v, kept: v.register_hook(lambda g: g * 3),
    "node of a view": lambda w, v, kept: v.grad_fn.register_hook(tripled),  # pyright: ignore
    "before a view": lambda w, v, kept: v.grad_fn.register_prehook(tripled),  # pyright: ignore
    "inside": lambda w, v, kept: kept[0].register_hook(lambda g: g * 3),
}


@pytest.mark.filterwarnings("ignore:.*OL308")
@pytest.mark.parametrize("name", COMING)
@pytest.mark.parametrize("how", ["backward", "grad", "forward"])
def test_a_hook_comes_and_goes(device: torch.device, name: str, how: str) -> None:
    """On a parameter, on what accumulates its gradient, and in the graph of a view that is kept."""

    def world(graph: Callable[[Any], Any]) -> Callable[[int], Any]:
        w = nn.Parameter(torch.arange(1.0, 4.0, device=device))
        inside = w.view(3, 1)
        v, kept, handles = inside.expand(3, 2), list[Any]([inside]), list[Any]()

        def forward(x: Tensor) -> Tensor:
            return (x @ v * w[:2]).sum()

        def step(x: Tensor) -> Any:
            if how == "grad":
                return torch.autograd.grad(forward(x), [w])
            w.grad = None
            forward(x).backward()
            return w.grad

        run = graph(forward if how == "forward" else step)

        def call(i: int) -> Any:
            if i == 5:
                handles.append(COMING[name](w, v, kept))
            if i == 9 and name != "inside":  # of which nothing tells
                handles.pop().remove()
                del kept[1:]
            x = torch.full((2, 3), 0.1 * (i + 1), device=device)
            if how != "forward":
                return run(x)
            w.grad = None
            run(x).backward()
            return w.grad

        return call

    if device.type == "cuda" and how != "forward":
        return  # the graph of a view works on the stream of then, where no capture follows it
    made: list[Any] = []
    eager = world(lambda f: f)
    fast = world(lambda f: made.append(ol.graph(f, warmup=1)) or made[0])
    compare(fast, eager, lambda i: (i,), 13, torch.enable_grad)
    assert sum(recording.replays for recording in made[0].recordings) >= 8


def gradient_step(w: Tensor) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        w.grad = None
        (w * x).sum().backward()
        return w.grad

    return step


@pytest.mark.filterwarnings("ignore:.*OL308")
@pytest.mark.parametrize("name", ["node", "after a node"])
@pytest.mark.parametrize("device", ["cpu", "tape"], indirect=True)
def test_a_hook_goes_with_the_node_that_nobody_holds(device: torch.device, name: str) -> None:
    """On CUDA a step with a hook on a node is refused: below."""

    def world(graph: Callable[[Any], Any]) -> Callable[[int], Any]:
        w, kept = nn.Parameter(torch.ones(3, device=device)), list[Any]()
        run = graph(gradient_step(w))

        def call(i: int) -> Any:
            if i == 4:
                COMING[name](w, w, kept)
            if i == 9:
                kept.clear()
            return run(torch.full((3,), 0.1 * (i + 1), device=device))

        return call

    made: list[Any] = []
    fast = world(lambda f: made.append(ol.graph(f, warmup=1)) or made[0])
    eager = world(lambda f: f)
    compare(fast, eager, lambda i: (i,), 14, torch.enable_grad)
    assert sum(recording.replays for recording in made[0].recordings) >= 7


@pytest.mark.filterwarnings("ignore:.*OL30[89]")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_a_parameter_comes_and_goes(device: torch.device, hook: str) -> None:
    """The same on CUDA, where a node with a hook is refused."""

    def world(graph: Callable[[Any], Any]) -> Callable[[int], Any]:
        w = nn.Parameter(torch.ones(3, device=device))
        kept: list[Any] = []
        run = graph(gradient_step(w))

        def call(i: int) -> Any:
            if i == 5:
                HOOKS[hook](w, lambda: kept.append(i))
            return run(torch.full((3,), 0.1 * i, device=device)), len(kept) > 0

        return call

    fast, eager = world(lambda f: ol.graph(f, warmup=1)), world(lambda f: f)
    for i in range(9):
        if i == 6 and kept_on_cuda(hook, device):
            with pytest.raises(ol.CaptureError, match="OL109"):
                fast(i)
            return
        assert_same(fast(i), eager(i), f"call {i}")


def test_a_hook_that_counts_its_backwards_is_named(device: torch.device) -> None:
    model = small_model(device)
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda g: None, mode="any"
    )

    def step(x: Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()

    fast = ol.graph(step, warmup=1)
    for i in range(2):  # the second may be the only one that counts
        fast(batch(i, device)[0])
    with pytest.raises(ol.CaptureError, match=r"OL118.*a hook of ") as caught:
        fast(batch(2, device)[0])
    assert "lambda g: None" in str(caught.value.where)
    assert "register_multi_grad_hook" in caught.value.fix


def test_the_steps_that_are_watched(device: torch.device) -> None:
    """Those of a backward in this context, and not those of other threads."""
    model = small_model(device)
    inside, outside = O.SGD(model.parameters(), lr=0.1), O.SGD([torch.ones(1)], lr=0.1)
    own = O.SGD([torch.ones(1)], lr=0.1)
    seen: list[tuple[str, Optimizer]] = []

    def hook(p: Tensor) -> None:
        inside.step()

    next(model.parameters()).register_post_accumulate_grad_hook(hook)

    def elsewhere() -> None:
        thread = threading.Thread(target=outside.step)
        thread.start()
        thread.join()

    def watch(name: str) -> Any:
        return watching_steps(lambda o: seen.append((name, o)))

    with watch("outer"):
        with watch("inner"):
            model(batch(0, device)[0]).sum().backward()
            elsewhere()
        own.step()
    model(batch(0, device)[0]).sum().backward()
    own.step()
    assert [(name, o is inside) for name, o in seen] == [
        ("outer", True),
        ("inner", True),
        ("outer", False),
    ]

"""``gradients="direct"``: the backward adds to `.grad` itself. As in eager, but for what it says.

The tests of gradients, hooks and flights run once more with the option on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import onelaunch as ol

from . import test_autograd_flight, test_autograd_gradients, test_autograd_hooks
from .drop_in import CUDA, replays
from .training import Made, Net, Optimized, Rand, train, trained

_OTHERWISE = {
    # bit for bit with several contributions to one gradient
    "test_a_parameter_of_two_modules_and_of_eager_code",
}

for _module in (test_autograd_flight, test_autograd_gradients, test_autograd_hooks):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and _name not in _OTHERWISE:
            globals()[_name] = _test

pytestmark = pytest.mark.parametrize("device", ["tape", CUDA], indirect=True)


@pytest.fixture(autouse=True)
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ol, "graph", functools.partial(ol.graph, gradients="direct"))


def test_parameters_are_no_inputs_of_the_node(device: torch.device, rand: Rand) -> None:
    model = Net(device)
    fast = ol.graph(model, warmup=1)
    for i in range(3):
        y = fast(rand(i, 5, 4))
        y.sum().backward()
    assert len(y.grad_fn.next_functions) == 1  # the anchor
    assert all(p.grad is not None for p in model.parameters())


CALLS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "some": lambda f, p, x: torch.autograd.grad(f(x).square().sum(), p[:1]),
    "a chain": lambda f, p, x: torch.autograd.grad(f(f(x)).square().sum(), p),
    "beside eager code": lambda f, p, x: torch.autograd.grad(f(x).sum() + p[0].square().sum(), p),
    "an edge": lambda f, p, x: torch.autograd.grad(
        f(x).sum(), [torch.autograd.graph.get_gradient_edge(p[0])]
    ),
    "in a batch": lambda f, p, x: torch.autograd.grad(
        f(x), p, torch.eye(8, device=x.device).view(8, 2, 4), is_grads_batched=True
    ),
    "no use": lambda f, p, x: torch.autograd.grad(
        f(x).sum(), [p[0], torch.ones(1, device=x.device, requires_grad=True)], allow_unused=True
    ),
    "inputs": lambda f, p, x: f(x).square().sum().backward(inputs=p[:1]),
    "inputs of a chain": lambda f, p, x: f(f(x)).square().sum().backward(inputs=p[1:]),
    "inputs beside": lambda f, p, x: (f(x).sum() + p[1].sum()).backward(inputs=p[:1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_parameters_by_name(device: torch.device, rand: Rand, name: str) -> None:
    """Those that a call asks for get their gradient, and no others."""
    torch.manual_seed(3)
    layer, other = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
    other.load_state_dict(layer.state_dict())
    fast = ol.graph(layer, warmup=1, max_in_flight=2)
    for i in range(6):
        found: list[Any] = []
        for f, module in ((other, other), (fast, layer)):
            if i % 2:
                module.zero_grad()
            p = list(module.parameters())
            found.append([CALLS[name](f, p, rand(i, 2, 4)), [q.grad for q in p]])
        torch.testing.assert_close(found[1], found[0])
    assert replays(fast) >= 5


def test_a_parameter_of_no_use_raises(device: torch.device, rand: Rand) -> None:
    model, others = Net(device), Net(device)
    fast, rest = ol.graph(model, warmup=1), ol.graph(others, warmup=1)
    for i in range(3):
        fast(rand(i, 5, 4)).sum().backward()
        rest(rand(i, 5, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(fast(rand(9, 5, 4)).sum(), list(others.parameters()))


@pytest.mark.parametrize("kind", ["tensor", "node", "several"])
def test_a_hook_put_on_just_before_a_gradient_is_asked_for(
    device: torch.device, rand: Rand, kind: str
) -> None:
    edge, several = torch.autograd.graph.get_gradient_edge, torch.autograd.graph

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        loss, weight, seen = model(rand(i, 5, 4)).square().mean(), model.out.weight, list[Any]()
        if kind == "tensor":
            handle = weight.register_hook(lambda g: g * 3)
            found: Any = torch.autograd.grad(loss, [weight])
        elif kind == "node":
            node = edge(weight).node
            handle: Any = node.register_prehook(lambda gs: (gs[0] * 3,))  # pyright: ignore
            found = loss.backward()
        else:
            handle = several.register_multi_grad_hook(list(model.parameters()), seen.append)
            found = loss.backward()
        handle.remove()
        return found, seen

    train(Net(device), program, steps=8, recordings=None)


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_a_backward_to_an_input_alone_leaves_parameters(
    device: torch.device, rand: Rand, how: str
) -> None:
    def program(model: Any, i: int) -> Tensor | None:
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        loss = model(x).square().mean()
        if how == "grad":
            (found,) = torch.autograd.grad(loss, [x])
        else:
            loss.backward(inputs=[x])
            found = x.grad
        assert all(p.grad is None for p in model.parameters())
        return found

    train(Net(device), program)


def test_several_contributions_to_one_gradient(device: torch.device, rand: Rand) -> None:
    """Right, and summed in another order than eager's engine does."""
    torch.manual_seed(3)
    layer, other = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
    other.load_state_dict(layer.state_dict())
    fast = ol.graph(layer, warmup=1)
    for i in range(6):
        for f, weight in ((fast, layer.weight), (other, other.weight)):
            x = rand(i, 5, 4)
            (f(f(x)).square().mean() + weight.square().sum() + (x @ weight).sum()).backward()
        torch.testing.assert_close(layer.weight.grad, other.weight.grad)
        torch.testing.assert_close(layer.bias.grad, other.bias.grad)
    assert replays(fast) >= 8


def test_a_hook_that_comes_and_goes(device: torch.device, rand: Rand) -> None:
    seen: list[tuple[str, int]] = []

    def program(model: Any, i: int) -> None:
        model.zero_grad()
        handle = None
        if i in (3, 5):
            name = "graphed" if type(model) is not Net else "eager"

            def double(g: Tensor) -> Tensor:
                seen.append((name, i))
                return g * 2

            handle = model.out.weight.register_hook(double)
        model(rand(i, 5, 4)).square().mean().backward()
        if handle is not None:
            handle.remove()

    train(Net(device), program, steps=8, recordings=None)
    assert [i for name, i in seen if name == "graphed"] == [3, 5]
    assert [i for name, i in seen if name == "eager"] == [3, 5]


@pytest.mark.parametrize("kind", ["hook", "last", "both"])
@pytest.mark.parametrize("twice", [False, True])
def test_a_hook_between_forward_and_backward(
    device: torch.device, rand: Rand, kind: str, twice: bool
) -> None:
    seen: list[float] = []

    def program(model: Any, i: int) -> list[float]:
        model.zero_grad()
        first, rest = model(rand(i, 5, 4)), model(rand(i + 50, 5, 4)) if twice else 0
        loss = first.square().mean() + torch.as_tensor(rest).sum()
        handles: list[Any] = []
        seen.clear()
        weight = model.out.weight

        def double(g: Tensor) -> Tensor:
            seen.append(float(g.norm()))
            return g.clamp(-0.01, 0.01) * 2

        def last(p: Tensor) -> None:
            assert p.grad is not None
            seen.append(float(p.grad.norm()))

        if i % 2 and kind != "last":
            handles.append(weight.register_hook(double))
        if i % 2 and kind != "hook":
            handles.append(weight.register_post_accumulate_grad_hook(last))
        loss.backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == len(handles)
        return list(seen)

    train(Net(device), program, steps=8, recordings=None, max_in_flight=2)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_frozen_between_forward_and_backward(
    device: torch.device, rand: Rand, hook: bool, again: bool
) -> None:
    """The engine runs the hooks, and gives a leaf that requires no grad any more no gradient."""
    seen: list[float] = []

    def program(model: Any, i: int) -> list[float]:
        model.zero_grad()
        loss = model(rand(i, 5, 4)).square().mean()
        weight = model.out.weight
        seen.clear()
        handle = weight.register_hook(lambda g: seen.append(float(g.norm()))) if hook else None
        if i in (2, 3, 5):
            weight.requires_grad_(False)
            model.inner.bias.requires_grad_(False)
            if again:
                weight.requires_grad_(True)
        loss.backward()
        if handle is not None:
            handle.remove()
        weight.requires_grad_(True)
        model.inner.bias.requires_grad_(True)
        return list(seen)

    train(Net(device), program, steps=8, recordings=None)


def test_a_leaf_that_became_a_result(device: torch.device, rand: Rand) -> None:
    model = Net(device)
    fast = trained(model, rand)
    loss = fast(rand(4, 5, 4)).sum()
    model.out.bias.requires_grad_(False).mul_(model.inner.bias[:3])
    with pytest.raises(RuntimeError, match="moved into the graph interior"):
        loss.backward()


def test_a_hook_that_would_not_see_the_sum(device: torch.device, rand: Rand) -> None:
    model = Net(device)
    fast = trained(model, rand)
    loss = fast(rand(4, 5, 4)).sum() + model.out.weight.sum()
    model.out.weight.register_hook(lambda g: g * 2)
    with pytest.raises(ol.GraphError, match="OL112") as caught:
        loss.backward()
    assert "model.out.weight.register_hook(lambda" in str(caught.value.where)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_parameters_of_both_kinds(
    device: torch.device, rand: Rand, mode: Literal["all", "any"]
) -> None:
    """Two runs of the engine would each call it."""
    model = Net(device)
    model.out.bias.register_post_accumulate_grad_hook(lambda p: None)
    fast = trained(model, rand)
    loss = fast(rand(4, 5, 4)).sum()
    hook: Any = lambda grads: None  # noqa: E731
    register_multi_grad_hook([*model.parameters()], hook, mode=mode)
    with pytest.raises(ol.GraphError, match="OL112") as caught:
        loss.backward()
    assert "hook: Any = lambda grads" in str(caught.value.where)
    fast(rand(5, 5, 4)).sum().backward()  # now it is there before the forward


def test_a_parameter_that_is_computed_is_reached_by_its_node(
    device: torch.device, rand: Rand
) -> None:
    torch.manual_seed(5)
    scaled = Made(lambda m, x: x @ m.weight * m.scale, inner=nn.Linear(4, 4), scale=torch.ones(4))

    def program(model: Any, i: int) -> None:
        model.zero_grad()
        model.weight = model.inner.weight * 2
        model(rand(i, 5, 4)).square().mean().backward()

    train(scaled.to(device), program, recordings=None)


def test_a_transposed_parameter_gets_a_gradient_of_its_layout(
    device: torch.device, rand: Rand
) -> None:
    transposed = Made(lambda m, x: (x @ m.weight) * 1.5, weight=torch.randn(3, 4).t())

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> tuple[int, ...]:
        optimizer.zero_grad()
        model(rand(i, 5, 4)).square().mean().backward()
        optimizer.step()
        return model.weight.grad.stride()

    train(transposed.to(device), Optimized(lambda p: torch.optim.SGD(p, 0.1), step))


def test_no_several_processes(device: torch.device, rand: Rand, monkeypatch: Any) -> None:
    """DDP's hooks are on nodes where nothing shows them."""
    from onelaunch.capture import distributed

    model = Net(device)
    fast = trained(model, rand)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert distributed.initialized()
    monkeypatch.setattr(distributed, "least_warmup", lambda reached: 0)
    for i in range(4):
        y = fast(rand(i, 5, 4))
        y.sum().backward()
    assert len(y.grad_fn.next_functions) == len(list(model.parameters()))


@pytest.mark.parametrize("of", ["all", "one"])
@pytest.mark.parametrize("inputs", [False, True])
def test_a_hook_on_several_parameters_of_which_one_gets_a_gradient(
    device: torch.device, rand: Rand, of: str, inputs: bool
) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        seen, bias = list[Any](), model.out.bias
        loss = model(rand(i, 5, 4)).square().mean()
        leaves = [bias] if of == "one" else list(model.parameters())
        handle = register_multi_grad_hook(
            leaves, lambda grads: seen.append([g is None for g in grads])
        )
        loss.backward(inputs=[bias] if inputs else None)
        handle.remove()
        assert len(seen) == 1
        return seen

    train(Net(device), program, steps=8, recordings=None, max_in_flight=2)


@pytest.mark.parametrize("asked", ["all", "some"])
def test_a_hook_on_several_parameters_where_gradients_are_asked_for(
    device: torch.device, rand: Rand, asked: str
) -> None:
    """It is called once, in a run of the engine."""

    def program(model: Any, i: int) -> Any:
        seen, leaves = list[Any](), list(model.parameters())
        loss = model(rand(i, 5, 4)).square().mean()
        handle = register_multi_grad_hook(leaves, lambda g: seen.append(type(g)), mode="any")
        doubled = leaves[1].register_hook(lambda g: g * 2)
        found = torch.autograd.grad(loss, leaves[:2] if asked == "some" else leaves)
        handle.remove()
        doubled.remove()
        return found, seen

    train(Net(device), program, steps=8, recordings=None, max_in_flight=2)


@pytest.mark.parametrize("one", [False, True])
def test_a_hook_on_all_of_several_parameters_raises_as_eager(
    device: torch.device, rand: Rand, one: bool
) -> None:
    """Torch has none under `torch.autograd.grad`."""

    def program(model: Any, i: int) -> None:
        leaves = list(model.parameters())
        loss = model(rand(i, 5, 4)).square().mean()
        handle = register_multi_grad_hook(leaves, lambda g: None)
        with pytest.raises(RuntimeError, match="currently running"):
            torch.autograd.grad(loss, leaves[:1] if one else leaves)
        handle.remove()

    train(Net(device), program, steps=8, recordings=None, max_in_flight=8)


@pytest.mark.parametrize("kind", ["one", "any"])
def test_a_hook_that_would_not_see_the_sum_asked_for(
    device: torch.device, rand: Rand, kind: str
) -> None:
    model = Net(device)
    weight, bias = model.out.weight, model.out.bias
    if kind == "any":  # then the engine has its gradient
        bias.register_post_accumulate_grad_hook(lambda p: None)
    fast = trained(model, rand)
    loss = fast(rand(4, 5, 4)).sum()
    if kind == "any":
        register_multi_grad_hook([weight, bias], lambda g: None, mode="any")
    else:
        loss = loss + weight.sum()
        weight.register_hook(lambda g: g * 2)
    with pytest.raises(ol.GraphError, match="OL112"):
        torch.autograd.grad(loss, [weight, bias])

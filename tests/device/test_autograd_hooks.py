"""Hooks and views: what runs around a recording, and what is refused inside."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, gradients_alike, replays
from .training import Made, Net, Rand, loss_of, train, trained


def test_hooks_on_results_arguments_and_parameters(device: torch.device, rand: Rand) -> None:
    seen: dict[int, list[Tensor]] = {}

    def program(model: Any, i: int) -> list[Tensor]:
        mine = seen.setdefault(id(next(model.parameters())), [])
        if i == 0:
            model.out.weight.register_hook(lambda g: (mine.append(g.clone()), g * 2)[1])
            model.out.bias.register_post_accumulate_grad_hook(lambda p: mine.append(p.grad.clone()))
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        x.register_hook(lambda g: (mine.append(g.clone()), None)[1])
        y = model(x)
        y.register_hook(lambda g: g * 3)
        loss_of(y).backward()
        count = len(mine)
        assert count == 3 * (i + 1)
        return sorted(mine[-3:], key=lambda t: t.numel())

    train(Net(device), program)


def test_module_hooks_on_the_graphed_module(device: torch.device, rand: Rand) -> None:
    calls: dict[int, list[str]] = {}

    def program(model: Any, i: int) -> Any:
        mine = calls.setdefault(id(next(model.parameters())), [])
        if i == 0:
            model.register_forward_pre_hook(lambda m, a: (mine.append("before"), None)[1])
            model.register_forward_hook(lambda m, a, y: (mine.append("after"), y * 2)[1])
            model.register_full_backward_hook(
                lambda m, gi, go: (mine.append("back"), tuple(g * 2 for g in gi))[1]
            )
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        loss_of(model(x)).backward()
        assert mine[-3:] == ["before", "after", "back"]
        return x.grad

    train(Net(device), program)


def test_a_backward_hook_on_a_submodule_is_refused_by_name(
    device: torch.device, rand: Rand
) -> None:
    model = Net(device)
    model.inner.register_full_backward_hook(lambda m, gi, go: None)
    fast = ol.graph(model, warmup=1)
    fast(rand(0, 5, 4).requires_grad_()).sum().backward()
    with pytest.raises(ol.CaptureError, match="`inner` \\(Linear\\)") as caught:
        fast(rand(1, 5, 4).requires_grad_())
    assert caught.value.code == "OL112"
    assert "model.inner.register_full_backward_hook(lambda" in str(caught.value.where)


def test_a_backward_hook_that_comes_after_the_capture_is_refused(
    device: torch.device, rand: Rand
) -> None:
    model = Net(device)
    fast = trained(model, rand)
    model.out.register_full_backward_hook(lambda module, given, got: None)
    fast(rand(3, 5, 4)).sum().backward()  # a warm-up
    with pytest.raises(ol.CaptureError, match="`out`") as caught:
        fast(rand(4, 5, 4))
    assert caught.value.code == "OL112"


@pytest.mark.parametrize("method", ["register_hook", "retain_grad"])
def test_a_tensor_hook_inside_is_refused(device: torch.device, rand: Rand, method: str) -> None:
    def f(x: Tensor) -> Tensor:
        h = x * 2
        if method == "register_hook":
            h.register_hook(lambda g: g * 2)
        else:
            h.retain_grad()
        return h.sum()

    fast = ol.graph(f, warmup=1)
    fast(rand(0, 4).requires_grad_()).backward()
    with pytest.raises(ol.CaptureError, match=method) as caught:
        fast(rand(1, 4).requires_grad_())
    assert caught.value.code == "OL112"
    assert __file__.rpartition("/")[2] in str(caught.value.where)


@pytest.mark.parametrize("kind", ["itself", "view", "slice", "parameter", "view of a parameter"])
def test_results_that_are_the_callers_memory(device: torch.device, rand: Rand, kind: str) -> None:
    def aliasing(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        other = {
            "itself": x,
            "view": x.t(),
            "slice": x[1:, ::2],
            "parameter": m.weight,
            "view of a parameter": m.weight.t()[1:],
        }
        return x @ m.weight, other[kind]

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        h = x * 3
        y, alias = model(h)
        if kind == "itself":
            assert alias is h
        elif "parameter" not in kind:
            assert alias._base is h
        ((y.square()).sum() + (alias**3).sum()).backward()
        return x.grad

    train(Made(aliasing, weight=torch.ones(4, 4)).to(device), program)


def test_results_that_share_memory(device: torch.device, rand: Rand) -> None:
    """A view of another result is one in the caller's hands, in place changes included."""

    def shared(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = m.linear(x) + 0
        return y, y[0], y.detach()

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        y, row, same = model(rand(i, 5, 4))
        assert row._base is y
        row.mul_(2)
        (y.square().sum() + row.sum()).backward()
        return y.detach(), row.detach(), same

    train(Made(shared, linear=nn.Linear(4, 4)).to(device), program)


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x * 2)


COMPLEX: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "as complex": lambda x: (y := x * 2, torch.view_as_complex(y)),
    "rows as complex": lambda x: (y := x * 2, torch.view_as_complex(y)[1:]),
    "imaginary part": lambda x: (z := pairs(x) * 1, z.imag),
    "conjugate": lambda x: (z := pairs(x) * 1, z.conj()),
    "imaginary part of the conjugate": lambda x: (z := pairs(x) * 1, z.conj().imag),
    "of one that is no result": lambda x: (torch.view_as_complex(y := x * 2), y[..., 1]),
    "of an argument": lambda x: (x, torch.view_as_complex(x)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_and_real_views_of_each_other(rand: Rand, name: str) -> None:
    """A write to the one is in the gradient of the other."""
    f = COMPLEX[name]
    fast = ol.graph(f, warmup=1)
    for i in range(6):
        found: list[Any] = []
        for call in (f, fast):
            leaf = rand(i, 3, 2).requires_grad_()
            x = leaf * 1
            results = call(x)
            if i % 3:
                results[i % 3 - 1].mul_(3)
            sum(t.abs().pow(3).sum() for t in results).backward()
            found.append([*results, x, leaf.grad])
        assert_same(found[1], found[0], f"call {i}")
    assert replays(fast) == 5


def test_in_place_on_a_result_that_is_a_view_inside(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        y = model(rand(i, 5, 4))
        y.relu_()
        y.square().sum().backward()
        return y.detach()

    train(nn.Sequential(nn.Linear(4, 6), nn.Flatten(0)).to(device), program)


def test_a_view_with_a_backward_of_its_own(device: torch.device, rand: Rand) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            return -g

    f: Any = lambda x: (Reverse.apply(x), x * 2)  # noqa: E731
    fast = ol.graph(f, warmup=1)
    gradients_alike(lambda x: torch.cat(fast(x)), lambda x: torch.cat(f(x)), rand, 4)
    assert replays(fast) >= 4


def test_a_custom_function_inside(device: torch.device, rand: Rand) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            ctx.save_for_backward(x)
            ctx.twice = x * 2
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            (x,) = ctx.saved_tensors
            return g * (ctx.twice + x) / 1.5

    fast = ol.graph(lambda x: Square.apply(x).sum(), warmup=1)
    gradients_alike(fast, lambda x: Square.apply(x).sum(), rand, 4)
    assert replays(fast) >= 4


def test_a_custom_function_with_a_variable(device: torch.device, rand: Rand) -> None:
    """Its context is no leaf of the graph, whatever it calls what it keeps."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            ctx.variable = x.detach()
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            return g * ctx.variable * 2

    inner = torch.nn.Linear(4, 4).to(device)
    fast = ol.graph(lambda x: Scaled.apply(inner(x).exp()).sum(), warmup=1)
    for i in range(5):
        x = rand(i, 4).requires_grad_()
        inner.zero_grad()
        fast(x).backward()
        found = [x.grad, *(p.grad for p in inner.parameters())]
        y = rand(i, 4).requires_grad_()
        wanted = torch.autograd.grad((inner(y).exp() ** 2).sum(), [y, *inner.parameters()])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
    assert replays(fast) >= 4


def test_a_backward_that_reads_on_the_host_is_refused(device: torch.device, rand: Rand) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            return g * 2 if g.sum().item() > -1e9 else g

    def losses(fast: Any) -> None:
        for i in range(4):
            x = rand(i, 4).requires_grad_()
            fast(x).backward()
            assert_same(x.grad, torch.full((4,), 2.0, device=device))

    with pytest.raises(ol.CaptureError) as caught:
        losses(ol.graph(lambda x: Reads.apply(x).sum(), warmup=1))
    assert caught.value.code in ("OL101", "OL109")
    with pytest.warns(ol.GraphWarning, match="OL306"):
        losses(ol.graph(lambda x: Reads.apply(x).sum(), warmup=1, on_refusal="eager"))


def test_an_argument_that_requires_grad_written_in_place(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x.mul_(2).sum(), warmup=1)
    fast(rand(0, 4).requires_grad_() * 1).backward()
    with pytest.raises(ol.CaptureError, match="OL113"):
        fast(rand(1, 4).requires_grad_() * 1)


@pytest.mark.parametrize("kind", ["chunk", "last chunk", "unbind", "slice", "whole"])
def test_an_argument_that_is_a_chunk_is_written(rand: Rand, kind: str) -> None:
    """Torch gives nobody the node of a chunk once it is written, which is after it was read."""
    of: dict[str, Callable[[Tensor], Tensor]] = {
        "chunk": lambda x: x.chunk(2)[0],
        "last chunk": lambda x: x.chunk(2)[1],
        "unbind": lambda x: x.unbind()[0],
        "slice": lambda x: x[:2],
        "whole": lambda x: x,
    }

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = a * 2
        with torch.no_grad():
            a.add_(1)
        return y, (b * b).sin()

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        results: list[Any] = []
        for call in (f, fast):
            x, b = (rand(i, 4, 3).requires_grad_() for _ in range(2))
            base = x * 1
            y, z = call(of[kind](base), b)
            (loss_of(y) + loss_of(z)).backward()
            results.append([y, z, base, x.grad, b.grad])
        assert_same(results[1], results[0], f"call {i}")
    assert replays(fast) == 4


def test_an_argument_that_comes_to_require_grad(device: torch.device, rand: Rand) -> None:
    def f(cache: Tensor, x: Tensor) -> Tensor:
        cache[0] = x
        return cache.sum()

    fast = ol.graph(f, warmup=1)
    fast(rand(9, 2, 4), rand(0, 4).requires_grad_()).backward()
    with pytest.raises(ol.CaptureError, match="OL113"):
        fast(rand(9, 2, 4), rand(1, 4).requires_grad_())


INTO: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "copied into": lambda m, x, y: y.copy_(m(x)),
    "a view of it": lambda m, x, y: y.copy_(m(x)).t(),
    "added to": lambda m, x, y: (y.add_(m(x)), None)[1],
}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", INTO)
def test_an_argument_that_comes_to_require_grad_is_refused(
    device: torch.device, rand: Rand, name: str, compile: bool
) -> None:
    """A replay writes the values, and the caller's tensor would have no gradient function."""
    model = nn.Linear(4, 4).to(device)
    fast = ol.graph(functools.partial(INTO[name], model), compile=compile, warmup=1)
    refused: list[ol.CaptureError] = []
    for i in range(6):
        x, y = rand(i, 4, 4), rand(i + 50, 4, 4)
        try:
            fast(x, y)
        except ol.CaptureError as error:
            refused.append(error)
        else:
            assert y.grad_fn is not None, i
    assert refused or not fast.recordings  # a CPU records nothing that is compiled
    assert {error.code for error in refused} <= {"OL113"}
    with torch.no_grad():  # as the fix says
        for i in range(6):
            x, y = rand(i, 4, 4), rand(i + 50, 4, 4)
            expected = y.clone()
            INTO[name](model, x, expected)
            fast(x, y)
            torch.testing.assert_close(y, expected)
    assert replays(fast) >= 2


def test_a_saved_tensor_that_is_written_before_any_backward(rand: Rand) -> None:
    """Whether a backward can run is asked of each result; eager asks when it runs."""
    model = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        y = model(x)
        x.add_(1)
        return y

    model.to(rand(0, 1).device)
    fast = ol.graph(forward, warmup=1)
    for i in range(6):
        x, given = rand(i, 2, 4), rand(i, 2, 4)
        got, expected = fast(x), forward(given)
        assert torch.equal(got, expected)
        assert torch.equal(x, given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            got.sum().backward()


def test_no_hook_of_a_parameter_runs_in_a_capture(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 2).to(device)
    count = [0]

    def hook(g: Tensor) -> None:
        count[0] += 1

    model.weight.register_hook(hook)
    fast = ol.graph(model, warmup=1)
    for i in range(5):
        fast(rand(i, 3, 4)).sum().backward()
        assert count[0] == i + 1


def test_a_parameter_in_a_tuple(device: torch.device, rand: Rand) -> None:
    """A tuple cannot be written, so another one stands for it."""
    weights = (nn.Parameter(rand(60, 4)), nn.Parameter(rand(61, 4)))
    others = copy.deepcopy(weights)

    def f(x: Tensor) -> Tensor:
        return (x * weights[0] * weights[1]).sum()

    fast = ol.graph(f, warmup=1)
    for i in range(6):
        x = rand(i, 4)
        fast(x).backward()
        (x * others[0] * others[1]).sum().backward()
        for w, v in zip(weights, others, strict=True):
            assert_same(w.grad, v.grad)
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.1)
                v.sub_(v.grad, alpha=0.1)
    assert replays(fast) > 0


def test_a_parameter_that_nothing_leads_to_is_refused(device: torch.device, rand: Rand) -> None:
    weight = nn.Parameter(rand(60, 4))
    fast = ol.graph(functools.partial(torch.mul, weight), warmup=1)
    fast(rand(0, 4)).sum().backward()
    with pytest.raises(ol.CaptureError, match="OL114"):
        fast(rand(1, 4))

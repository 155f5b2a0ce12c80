"""Which gradients there are, and what they are: as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, replays
from .training import Made, Net, Optimized, Rand, Two, loss_of, train


def curved(device: torch.device) -> nn.Module:
    torch.manual_seed(13)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh()).to(device)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_ordinary_loop(device: torch.device, rand: Rand, set_to_none: bool) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model(rand(i, 5, 4)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    program = Optimized(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), step)
    train(Net(device, dropout=0.4), program, steps=8)


@pytest.mark.parametrize("count", [2, 5])
def test_gradients_accumulate_over_backwards(device: torch.device, rand: Rand, count: int) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
        optimizer.zero_grad()
        for k in range(count):
            loss_of(model(rand(10 * i + k, 5, 4))).backward()
        optimizer.step()
        return [p.grad for p in model.parameters()]  # kept: compared again after all steps

    train(Net(device), Optimized(lambda p: torch.optim.SGD(p, 0.1), step), steps=7)


def test_gradients_written_in_place_by_the_caller(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> list[Tensor]:
        model.zero_grad()
        loss_of(model(rand(i, 5, 4))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return [p.grad.clone() for p in model.parameters()]

    train(Net(device), program)


def test_the_gradient_of_an_input(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> list[Tensor]:
        x = rand(i, 5, 4).requires_grad_()
        h = x * 2
        h.retain_grad()
        loss_of(model(h)).backward()
        assert x.grad is not None
        assert h.grad is not None
        return [x.grad, h.grad]

    train(Net(device), program)


def test_two_modules_in_a_chain(device: torch.device, rand: Rand) -> None:
    first, expected = Net(device), Net(device)
    second, other = nn.Linear(3, 2).to(device), nn.Linear(3, 2).to(device)
    other.load_state_dict(second.state_dict())
    fast, faster = ol.graph(first, warmup=1), ol.graph(second, warmup=1)
    for i in range(6):
        for a, b in ((fast, faster), (expected, other)):
            a.zero_grad()
            b.zero_grad()
            loss_of(torch.tanh(b(a(rand(i, 5, 4)) * 2))).backward()
        for m, n in ((first, expected), (second, other)):
            for p, q in zip(m.parameters(), n.parameters(), strict=True):
                assert_same(p.grad, q.grad)
    assert replays(fast) >= 4
    assert replays(faster) >= 4


def test_an_unused_parameter_and_an_unused_result(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Tensor:
        model.zero_grad()
        y, _ = model(rand(i, 5, 4))
        loss_of(y).backward()
        assert model.second.weight.grad is None
        assert model.unused.weight.grad is None
        return y.detach()

    train(Two(device), program)


def test_now_one_result_and_now_the_other(device: torch.device, rand: Rand) -> None:
    """AdamW moves a parameter whose gradient is zero, and not one whose gradient is None."""

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Any:
        optimizer.zero_grad()
        y, z = model(rand(i, 5, 4))
        losses = (loss_of(y), loss_of(z), loss_of(y) + loss_of(z))
        losses[i % 3].backward()
        optimizer.step()
        return [p.grad is None for p in model.parameters()]

    program = Optimized(lambda p: torch.optim.AdamW(p, 0.1, foreach=False), step)
    train(Two(device), program, steps=12)


def test_results_that_need_no_grad(device: torch.device, rand: Rand) -> None:
    def several(m: Any, x: Tensor) -> dict[str, Any]:
        y = m.linear(x)
        return {"y": y, "best": y.argmax(-1), "mean": y.detach().mean(), "n": 3}

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        out = model(rand(i, 5, 4))
        loss_of(out["y"]).backward()
        return {**out, "y": out["y"].detach()}

    train(Made(several, linear=nn.Linear(4, 3)).to(device), program)


DETACHED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "of a result": lambda h, w: (h, h.detach()[1:], h.detach().t(), h.detach()),
    "before it": lambda h, w: (h.detach().chunk(2)[0], h),
    "of a view": lambda h, w: (h.t(), h.detach()[1:]),
    "of state": lambda h, w: (h, w.detach()[1:], w.detach().chunk(2)[1]),
}
"""name -> results of a matrix that requires grad, and of a weight."""


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", DETACHED)
def test_views_of_what_is_detached(device: torch.device, rand: Rand, name: str, grad: bool) -> None:
    """They need no grad, though their memory is that of what does."""
    w = nn.Parameter(rand(99, 4, 4))

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return DETACHED[name](x @ w, w)

    fast = ol.graph(f, warmup=1)
    for i in range(6):
        found: list[list[Tensor]] = []
        for run in (f, fast):
            x = rand(i, 4, 4).requires_grad_()
            with torch.set_grad_enabled(grad):
                made = run(x)
            found.append([t.detach() for t in made])
            assert [t.requires_grad for t in made] == [
                grad and t.requires_grad for t in DETACHED[name](x @ w, w)
            ]
            if grad:
                sum(t.square().sum() for t in made).backward()
                assert x.grad is not None
                found[-1].append(x.grad)
        assert_same(found[1], found[0])
    assert replays(fast) >= 3


@pytest.mark.parametrize("stored", [False, True])
def test_parameters_of_one_storage(device: torch.device, rand: Rand, stored: bool) -> None:
    """A view of the second is no view of the first."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = rand(99, 20)
            self.a = nn.Parameter(flat[:8].view(2, 4))
            self.b = nn.Parameter(flat[8:].view(3, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x @ self.a.t()
            if stored:
                self.last = self.b.t()
                return (y,)
            return self.b.t(), y

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        made = model(rand(i, 5, 4))
        made = (*made, model.last) if stored else made
        sum(loss_of(t) for t in made).backward()
        return [t.detach() for t in made]

    train(Flat(), program)


def test_retain_graph_and_a_second_backward(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        loss = loss_of(model(rand(i, 5, 4)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, list(model.parameters()))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return first

    train(Net(device), program)


def test_gradients_of_some_alone(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        x = rand(i, 5, 4).requires_grad_()
        y = model(x)
        chosen = [x, model.out.weight]
        grads = torch.autograd.grad(y, chosen, torch.ones_like(y), retain_graph=i % 2 > 0)
        assert x.grad is model.inner.weight.grad is None
        if i % 2 == 0:
            y = model(x)
        loss_of(y).backward(inputs=[model.out.bias])
        assert x.grad is model.inner.weight.grad is None
        return grads

    train(Net(device), program, recordings=None, steps=8)


LAYOUTS: dict[str, Callable[[Tensor, int, Rand], Tensor | None]] = {
    "sum": lambda y, i, rand: torch.ones((), device=y.device).expand_as(y),
    "sliced": lambda y, i, rand: rand(i, len(y), 12)[:, ::4],
    "transposed": lambda y, i, rand: rand(i, 3, len(y)).t(),
    "scalar": lambda y, i, rand: None,
    # As the stages of `torchdiffeq`'s dopri8 get, which it writes into one tensor: their bytes are
    # too many for a copy of all, gaps included.
    "mostly gaps": lambda y, i, rand: rand(i, len(y), 3, 14)[..., 2],
    "varies": lambda y, i, rand: rand(i, 1, 3).expand_as(y) if i % 2 else rand(i, *y.shape),
}
"""name -> the gradient that a backward begins with; None for one of a mean."""


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_of_every_layout(device: torch.device, rand: Rand, kind: str) -> None:
    def program(model: Any, i: int) -> None:
        model.zero_grad()
        y = model(rand(i, 40 if kind == "mostly gaps" else 5, 4))
        gradient = LAYOUTS[kind](y, i, rand)
        y.mean().backward() if gradient is None else y.backward(gradient)

    train(Net(device), program, steps=10 if kind in ("mostly gaps", "varies") else 6)


def test_a_gradient_that_is_passed_on_is_nobody_elses(device: torch.device, rand: Rand) -> None:
    """`a + b` hands the same gradient to both: accumulated, each must have its own memory."""

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        (model(rand(i, 3)) * rand(i + 50, 3)).sum().backward()
        model.a.grad.mul_(2)
        return model.a.grad, model.b.grad

    total = Made(lambda m, x: m.a + m.b + x, a=torch.ones(3), b=torch.ones(3))
    train(total.to(device), program)


@pytest.mark.parametrize("gradients", ["autograd", "direct"])
@pytest.mark.parametrize("how", ["grad", "jacobian", "vmap", "vmap, not over it"])
def test_gradients_in_batches(device: torch.device, rand: Rand, how: str, gradients: str) -> None:
    """Beside ordinary ones of the same sizes, of which there is a recording."""

    def program(model: Any, i: int) -> Any:
        if how == "jacobian":
            return torch.autograd.functional.jacobian(model, rand(i, 4), vectorize=True)
        x = rand(i, 4).requires_grad_()
        y = model(x)
        (plain,) = torch.autograd.grad(y, x, rand(i + 20, 3), retain_graph=True)
        each = torch.eye(3, device=device)
        if how.startswith("vmap"):

            def one(g: Tensor) -> Tensor:
                weight = each[0] if "not" in how else g
                (found,) = torch.autograd.grad(y, x, weight, retain_graph=True)
                return found * g[0]

            return plain, torch.func.vmap(one)(each)
        return plain, *torch.autograd.grad(y, x, each, is_grads_batched=True)

    train(curved(device), program, steps=8, gradients=gradients)


def test_gradients_of_parameters_in_batches(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        y, each = model(rand(i, 4)), torch.eye(3, device=device)
        return torch.autograd.grad(y, list(model.parameters()), each, is_grads_batched=True)

    train(curved(device), program)


def test_double_backward_is_refused_with_the_reason(device: torch.device, rand: Rand) -> None:
    model = Net(device)
    fast = ol.graph(model, warmup=1)
    for i in range(4):
        x = rand(i, 5, 4).requires_grad_()
        y = fast(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        if i > 0:
            with pytest.raises(RuntimeError, match="OL202"):
                g.square().sum().backward()
    assert replays(fast) >= 3


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("vectorize", [False, True])
def test_a_hessian_is_refused_and_not_zero(
    device: torch.device, rand: Rand, frozen: bool, vectorize: bool
) -> None:
    """It is asked of the input alone, and takes what no way leads to for zero."""
    fast = ol.graph(curved(device).requires_grad_(not frozen), warmup=1)
    for i in range(5):
        if not fast.recordings:
            fast(rand(i, 4).requires_grad_()).sum().backward()
            continue
        with pytest.raises(ol.GraphError, match="OL202"):
            torch.autograd.functional.hessian(
                lambda x: fast(x * 2).sum(), rand(i, 4), vectorize=vectorize
            )
    assert replays(fast) >= 3


def test_double_backward_of_gradients_in_batches_is_refused(
    device: torch.device, rand: Rand
) -> None:
    fast = ol.graph(curved(device), warmup=1)
    each = torch.eye(3, device=device)
    for i in range(4):
        y = fast(x := rand(i, 4).requires_grad_())
        if replays(fast):
            with pytest.raises(ol.GraphError, match="OL202"):
                torch.autograd.grad(y, x, each, is_grads_batched=True, create_graph=True)
    assert replays(fast) >= 2


def test_a_parameter_of_two_modules_and_of_eager_code(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        torch.manual_seed(4)
        a = nn.Linear(4, 4, device=device)
        b = nn.Sequential(nn.Tanh(), a, nn.ReLU()).to(device)
        return a, b

    (a, b), (c, d) = world(), world()
    fast_a, fast_b = ol.graph(a, warmup=1), ol.graph(b, warmup=1)
    for i in range(6):
        for one, two, weight in ((fast_a, fast_b, a.weight), (c, d, c.weight)):
            one.zero_grad()
            x = rand(i, 5, 4)
            loss_of(two(one(x)) + one(x) @ weight).backward()
        assert_same(a.weight.grad, c.weight.grad)
        assert_same(a.bias.grad, c.bias.grad)
    assert replays(fast_a) > 0
    assert replays(fast_b) > 0


def test_shared_parameters_inside(device: torch.device, rand: Rand) -> None:
    enter, leave = (nn.Linear(4, 4, bias=False, device=device) for _ in range(2))
    leave.weight = enter.weight
    model = Made(lambda m, x: m.leave(torch.tanh(m.enter(x))), enter=enter, leave=leave)

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model(rand(i, 5, 4))).backward()
        optimizer.step()

    fast = train(model, Optimized(lambda p: torch.optim.SGD(p, 0.1), step))
    assert fast.leave.weight is fast.enter.weight


def test_frozen_and_unfrozen_between_steps(device: torch.device, rand: Rand) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Any:
        model.inner.requires_grad_(i // 4 % 2 == 0)
        optimizer.zero_grad()
        loss_of(model(rand(i, 5, 4))).backward()
        optimizer.step()
        return model.inner.weight.grad is None

    train(Net(device), Optimized(lambda p: torch.optim.SGD(p, 0.1), step), steps=16, recordings=2)


def test_everything_frozen_records_inference(device: torch.device, rand: Rand) -> None:
    model = Net(device).requires_grad_(False).eval()
    fast = ol.graph(model, warmup=1)
    for i in range(4):
        assert not fast(rand(i, 5, 4)).requires_grad
    assert replays(fast) >= 2


def test_a_backward_reads_numbers_that_the_forward_computed(
    device: torch.device, rand: Rand
) -> None:
    """Of an argument, and of a parameter without dimensions: another in each call."""

    def made() -> tuple[nn.Parameter, Callable[[Tensor, Tensor], Tensor]]:
        scale = nn.Parameter(torch.ones((), device=device))
        return scale, lambda x, times: x * scale.exp() * (times[1] - times[0])

    (scale, f), (other, eager) = made(), made()
    fast = ol.graph(f, warmup=1)
    for i in range(7):
        for run, weight in ((fast, scale), (eager, other)):
            run(rand(i, 3, 4), rand(50 + i, 2)).square().sum().backward()
            with torch.no_grad():
                weight -= 0.01 * weight.grad
            weight.grad = None
        assert_same(scale.detach(), other.detach())
    assert replays(fast) >= 5


@pytest.mark.parametrize("gradients", ["autograd", "direct"])
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_of_another_dtype_than_their_parameters(
    device: torch.device, rand: Rand, dtype: torch.dtype | None, gradients: str
) -> None:
    """`p.grad_dtype`: bfloat16 parameters that add up gradients in float32."""
    models = [curved(device).bfloat16() for _ in range(2)]
    for p in (p for model in models for p in model.parameters()):
        p.grad_dtype = dtype
    fast = ol.graph(models[1], warmup=1, gradients=gradients)
    for i in range(6):
        for model in (models[0], fast):
            loss_of(model(rand(i, 5, 4).bfloat16())).backward()
        grads = [[p.grad for p in model.parameters()] for model in models]
        assert_same(grads[1], grads[0])
    assert replays(fast)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("unfolded", [True, False])
def test_views_of_an_argument_that_overlaps_itself(
    device: torch.device, rand: Rand, leaf: bool, together: bool, unfolded: bool
) -> None:
    """Each element of the argument has a gradient of its own, though several have one address."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (x[0], x[1:, 2], x * 2) if together else (x[0], x[1:, 2])

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        found: list[Tensor | None] = []
        for g in (f, fast):
            x = rand(i, 1, 6).requires_grad_(not leaf)
            x = x[0].unfold(0, 3, 1) if unfolded else x.expand(4, 6)
            x = x.detach().requires_grad_() if leaf else x
            x.retain_grad()
            results = g(x)
            torch.stack([y.square().sum() for y in results]).sum().backward()
            found.append(x.grad)
        assert_same(found[1], found[0])
    assert replays(fast) >= 2

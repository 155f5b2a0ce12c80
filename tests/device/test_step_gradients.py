"""`.grad` around a whole step: set, dropped, kept, accumulated, inside and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, compare, replays
from .steps import (
    Training,
    as_eager,
    assert_same_training,
    batch,
    small_model,
    training,
    training_of,
)

SGD = torch.optim.SGD


def sgd(params: Any) -> torch.optim.Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def changed(device: torch.device, step: Callable[..., Any]) -> Training:
    """Another step in the place of the standard one, given the job too."""
    made = training(device, sgd)
    made.step = lambda x, y: step(made, x, y)
    return made


def loss_of(job: Training, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(job.model(x), y)


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_the_loss_cannot_be_used_again(device: torch.device, outputs: Any) -> None:
    fast = ol.graph(training(device, sgd).step, outputs=outputs)
    for i in range(6):
        loss = fast(*batch(i, device))
        assert loss.requires_grad
        assert not loss.is_leaf
        assert loss.grad_fn is not None
        assert loss.item() == loss.detach().item()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            (loss * 2 + 1).backward()
        assert_same(loss.detach().clone(), loss.detach())
    assert replays(fast) == 3


def of_several_losses(job: Training, x: Tensor, y: Tensor) -> Any:
    job.optimizers[0].zero_grad()
    out = job.model(x)
    parts = {"mse": nn.functional.mse_loss(out, y), "l1": nn.functional.l1_loss(out, y)}
    sum(parts.values()).backward()
    job.optimizers[0].step()
    return {**parts, "out": out, "norm": out.detach().norm()}


def of_microbatches(count: int) -> Callable[..., Tensor]:
    def step(job: Training, x: Tensor, y: Tensor) -> Tensor:
        job.optimizers[0].zero_grad()
        total = torch.zeros((), device=x.device)
        for a, b in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = loss_of(job, a, b) / count
            loss.backward()
            total = total + loss.detach()
        job.optimizers[0].step()
        return total

    return step


def clipped_by(norm: float) -> Callable[..., Any]:
    def step(job: Training, x: Tensor, y: Tensor) -> Any:
        job.optimizers[0].zero_grad()
        loss = loss_of(job, x, y)
        loss.backward()
        total = nn.utils.clip_grad_norm_(job.model.parameters(), 0.1, norm_type=norm)
        nn.utils.clip_grad_value_(job.model.parameters(), 0.05)
        job.optimizers[0].step()
        return loss, total

    return step


STEPS: dict[str, Callable[..., Any]] = {
    "a dictionary of losses": of_several_losses,
    "two microbatches": of_microbatches(2),
    "four microbatches": of_microbatches(4),
    "clipped": clipped_by(2.0),
    "clipped by the largest": clipped_by(float("inf")),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step(device: torch.device, name: str) -> None:
    as_eager(lambda: changed(device, STEPS[name]), device, rows=lambda i: 8)


def test_a_graph_that_can_still_be_used_stays_usable(device: torch.device) -> None:
    """`retain_graph=True`: the loss is no spent one, so its backward must work."""
    job = training(device, sgd)

    def step(x: Tensor, y: Tensor) -> Tensor:
        job.optimizers[0].zero_grad()
        loss = loss_of(job, x, y)
        loss.backward(retain_graph=True)
        return loss

    fast = ol.graph(step)
    for i in range(3):
        fast(*batch(i, device))
    with pytest.warns(ol.GraphWarning, match="OL303"):  # at the call that captures
        fast(*batch(3, device))
    for i in range(4):
        loss = fast(*batch(i, device))
        once = [p.grad.clone() for p in job.model.parameters()]
        loss.backward()
        for p, g in zip(job.model.parameters(), once, strict=True):
            assert_same(p.grad, g * 2)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside", "at the end"])
def test_zero_grad(device: torch.device, to_none: bool, where: str) -> None:
    def step(job: Training, x: Tensor, y: Tensor) -> Tensor:
        if where == "inside":
            job.optimizers[0].zero_grad(set_to_none=to_none)
        loss = loss_of(job, x, y)
        loss.backward()
        job.optimizers[0].step()
        if where == "at the end":
            job.optimizers[0].zero_grad(set_to_none=to_none)
        return loss

    def between(i: int, job: Training) -> None:
        if where == "outside":
            job.optimizers[0].zero_grad(set_to_none=to_none)

    as_eager(lambda: changed(device, step), device, calls=9, between=between)


def test_gradients_read_after_a_change_of_batch_size(device: torch.device) -> None:
    fast, job = as_eager(
        lambda: training(device, sgd),
        device,
        calls=20,
        rows=lambda i: 5 + (i // 2) % 3,
        recordings=3,
        min_replays=11,
    )
    seen: list[set[int]] = []
    for rows in (5, 6, 7, 5, 6, 7):
        fast(*batch(0, device, rows))
        seen.append({p.grad.data_ptr() for p in job.model.parameters()})
    assert seen[:3] == seen[3:]  # each recording writes its own, without a copy
    assert len(seen[0] | seen[1] | seen[2]) == 3 * len(seen[0])


def test_a_gradient_that_was_kept(device: torch.device) -> None:
    """The memory is the recording's: clone what is to outlast its next replay."""
    job = training(device, sgd)
    fast = ol.graph(job.step)
    for i in range(5):
        fast(*batch(i, device))
    weight = job.model[0].weight
    kept, copy = weight.grad, weight.grad.clone()
    fast(*batch(6, device))
    assert weight.grad is kept
    assert not torch.equal(kept, copy)


def test_a_gradient_that_is_also_a_result_is_fresh(device: torch.device) -> None:
    def step(job: Training, x: Tensor, y: Tensor) -> Any:
        job.optimizers[0].zero_grad()
        loss = loss_of(job, x, y)
        loss.backward()
        return loss, job.model[0].weight.grad

    eager, job = (changed(device, step) for _ in range(2))
    fast = ol.graph(job.step)
    kept: list[Any] = []
    for i in range(7):
        got, expected = fast(*batch(i, device)), eager.step(*batch(i, device))
        assert got[1] is job.model[0].weight.grad
        kept.append((got, expected))
    for got, expected in kept:
        assert_same(got, expected)


def accumulate(job: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(job, x, y)
    loss.backward()
    return loss


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_outside(device: torch.device, to_none: bool) -> None:
    """Forward and backward recorded; the optimizer steps at every fourth call, eagerly."""

    def between(i: int, job: Training) -> None:
        if i and i % 4 == 0:
            job.optimizers[0].step()
            job.optimizers[0].zero_grad(set_to_none=to_none)

    fast, _ = as_eager(
        lambda: changed(device, accumulate),
        device,
        calls=40,
        between=between,
        recordings=2 if to_none else 1,
        min_replays=20,
    )
    before = replays(fast)
    for i in range(1, 5):
        fast(*batch(i, device))
    assert replays(fast) == before + 4


def test_the_step_itself_at_every_fourth_call(device: torch.device) -> None:
    """Two callables, one that accumulates and one that accumulates and steps."""
    eager, job = (training(device, sgd) for _ in range(2))

    def pair(job: Training) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def finish(x: Tensor, y: Tensor) -> Tensor:
            loss = accumulate(job, x, y)
            job.optimizers[0].step()
            job.optimizers[0].zero_grad()
            return loss

        return lambda x, y: accumulate(job, x, y), finish

    steps, fast = pair(eager), [ol.graph(f) for f in pair(job)]
    for i in range(48):
        which = i % 4 == 3
        assert_same(fast[which](*batch(i, device)), steps[which](*batch(i, device)), f"call {i}")
        assert_same_training(job, eager, f"call {i}")
    assert replays(fast[0]) >= 12
    assert replays(fast[1]) >= 5


@pytest.mark.parametrize("before", [False, True], ids=["first", "after_another"])
@pytest.mark.parametrize("last", [False, True])
def test_a_hook_of_a_parameter_comes_and_goes(
    device: torch.device, last: bool, before: bool
) -> None:
    """A parameter keeps the dict of a hook that was taken off, and the next one comes into it."""
    handles: dict[int, Any] = {}

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def between(i: int, t: Training) -> None:
        weight = next(t.model.parameters())
        hook = weight.register_post_accumulate_grad_hook if last else weight.register_hook
        if i == 0 and before:
            hook(halve if last else lambda g: g * 2).remove()
        elif i == 4:
            handles[id(t)] = hook(halve if last else lambda g: g * 2)
        elif i == 8:
            handles[id(t)].remove()

    with pytest.warns(ol.GraphWarning, match="OL308"):
        as_eager(
            lambda: training(device, lambda p: torch.optim.SGD(p, 0.1)),
            device,
            calls=12,
            between=between,
            recordings=2,
            min_replays=4,
        )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_backward_hook_of_a_submodule_comes(device: torch.device, everywhere: bool) -> None:
    handles: list[Any] = []

    def double(module: nn.Module, given: Any, _: Any) -> Any:
        return tuple(None if g is None else g * 2 for g in given)

    def between(i: int, t: Training) -> None:
        last = t.model[-1] if isinstance(t.model, nn.Sequential) else t.model
        if i == 4 and everywhere and not handles:
            handles.append(nn.modules.module.register_module_full_backward_hook(double))
        elif i == 4 and not everywhere:
            last.register_full_backward_hook(double)

    try:
        with pytest.warns(ol.GraphWarning, match="OL308"):
            as_eager(
                lambda: training(device, lambda p: torch.optim.SGD(p, 0.1), nn.Tanh()),
                device,
                calls=10,
                between=between,
                recordings=None,
                min_replays=4,
            )
    finally:
        for handle in handles:
            handle.remove()


def test_a_frozen_layer_and_an_unused_one(device: torch.device) -> None:
    def job() -> Training:
        model: Any = small_model(device)
        model[0].weight.requires_grad_(False)
        model.unused = nn.Linear(2, 2, device=device)
        model.forward = nn.Sequential(*list(model)[:3]).forward
        return training_of(model, SGD(model.parameters(), lr=0.1, weight_decay=0.1))

    _, graphed = as_eager(job, device)
    assert graphed.model.unused.weight.grad is None


def test_a_layer_frozen_and_unfrozen_between(device: torch.device) -> None:
    def between(i: int, job: Training) -> None:
        if i in (5, 12):
            job.model[0].requires_grad_(i == 12)
            job.model[0].weight.grad = job.model[0].bias.grad = None

    as_eager(
        lambda: training(device, sgd),
        device,
        calls=20,
        between=between,
        recordings=None,
        min_replays=8,
    )


def test_gradients_of_an_input(device: torch.device) -> None:
    """An adversarial step: the input's own gradient is used inside."""
    model = small_model(device)

    def attack(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = nn.functional.mse_loss(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x)
        return (x + 0.1 * gradient.sign()).detach()

    fast = ol.graph(attack)
    compare(fast, attack, lambda i: batch(i, device), 6, torch.enable_grad)
    assert replays(fast) == 3


def scaled_loss(w: Tensor, x: Tensor) -> Tensor:
    loss = (w * x).sum()
    loss.backward()
    return loss.detach()


def loss_from_zeroed(w: Tensor, x: Tensor) -> Tensor:
    assert w.grad is not None
    w.grad.zero_()
    return scaled_loss(w, x)


def without(w: Tensor, x: Tensor) -> Tensor:
    w.grad = None
    return scaled_loss(w.detach().requires_grad_(), x)


def clipped(w: Tensor, x: Tensor) -> Tensor:
    nn.utils.clip_grad_norm_([w], 0.1)
    return (w.detach() * x).sum()


def loss_of_input(w: Tensor, x: Tensor) -> Tensor:
    x.requires_grad_()
    return scaled_loss(w.detach(), x)


def through(w: Tensor) -> Tensor:
    return w * 2


@pytest.mark.parametrize(
    ("step", "argument"),
    [
        (scaled_loss, lambda w: w),
        (scaled_loss, nn.Parameter),
        (scaled_loss, through),  # what made it would go without a gradient
        (loss_from_zeroed, lambda w: w),
        (loss_of_input, lambda w: w),
        (without, lambda w: w),
        (clipped, lambda w: w),
    ],
)
def test_the_gradient_of_an_argument_is_refused(
    device: torch.device, step: Callable[..., Tensor], argument: Callable[[Tensor], Tensor]
) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    fast: Any = ol.graph(step)
    for i in range(4):
        leaf.grad = torch.zeros(3, device=device)
        if i < 3:
            fast(argument(leaf), torch.full((3,), float(i), device=device))
    with pytest.raises(ol.CaptureError) as caught:  # noqa: PT012
        for _ in range(2):  # the first may be one more warm-up
            fast(argument(leaf), torch.ones(3, device=device))
            leaf.grad = torch.zeros(3, device=device)
    assert caught.value.code == "OL115"
    assert "args[" in caught.value.what


def test_an_argument_that_gets_a_gradient_after_the_capture(device: torch.device) -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        return w.detach() * x if w.grad is None else w.detach() * x + w.grad

    fast: Any = ol.graph(step)
    w, x = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device)
    compare(fast, step, lambda _: (w, x), 5, torch.enable_grad)
    assert replays(fast) == 2
    w.grad = torch.ones(3, device=device)
    compare(fast, step, lambda _: (w, x), 3, torch.enable_grad)
    with pytest.raises(ol.CaptureError, match="OL115"):
        fast(w, x)
    w.grad = None
    compare(fast, step, lambda _: (w, x), 4, torch.enable_grad)


def test_a_gradient_of_an_argument_that_is_used_up(device: torch.device) -> None:
    """Parameters handed in, and a step written by hand that leaves no gradient behind."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        loss = scaled_loss(w, x)
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
        return loss

    fast: Any = ol.graph(step)
    mine, theirs = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    for i in range(7):
        x = torch.full((3,), float(i), device=device)
        assert_same([fast(mine, x), mine], [step(theirs, x), theirs])
        assert mine.grad is None
    assert replays(fast) == 4


def test_an_optimizer_beside_that_eager_code_uses(device: torch.device) -> None:
    """Whole steps, and eager ones in between, over the same parameters."""
    eager, job = (training(device, sgd) for _ in range(2))
    fast = ol.graph(job.step)
    for i in range(14):
        run = job.step if i % 5 == 4 else fast
        assert_same(run(*batch(i, device)), eager.step(*batch(i, device)))
        assert_same_training(job, eager, f"call {i}")
    assert replays(fast) >= 8


def test_static_results_and_state_behind_lasting_gradients(device: torch.device) -> None:
    """Gradients in the recording's memory are no results that are handed out."""

    def keeping(job: Training, x: Tensor, y: Tensor) -> Tensor:
        job.optimizers[0].zero_grad()
        out = job.model(x)
        job.others["twice"], job.others["thrice"] = out.detach() * 2, out.detach() * 3
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
        job.optimizers[0].step()
        return loss

    eager, job = (changed(device, keeping) for _ in range(2))
    fast = ol.graph(job.step, outputs="static")
    for i in range(8):
        expected, got = eager.step(*batch(i, device)), fast(*batch(i, device))
        assert_same(got.detach().clone(), expected.detach())
        assert_same(job.others, eager.others)
    assert replays(fast) == 5

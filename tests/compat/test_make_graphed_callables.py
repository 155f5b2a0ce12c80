"""What programs ask of `torch.cuda.make_graphed_callables`, asked of ours: the behaviours of
torch's and TransformerEngine's own tests, written anew."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from tests.device.drop_in import assert_same, on_cpu_and_cuda, replays
from tests.device.training import Net, Rand, state_of


class Dicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"output": self.linear(inputs["x"]), "unused": inputs["unused"] * 2}


def trains_alike(fast: Any, other: nn.Module, step: Callable[[Any, int], Any]) -> None:
    """Each step gives the same, and leaves the same gradients and state."""
    for i in range(5):
        results = []
        for module in (fast, other):
            module.zero_grad()
            results.append(step(module, i))
        assert_same(results[0], results[1], f"step {i}")
        assert_same(state_of(fast), state_of(other), f"step {i}")


@pytest.mark.parametrize("pooled", [False, True])
def test_modules_and_functions_in_one_tuple(device: torch.device, rand: Rand, pooled: bool) -> None:
    def world() -> Any:
        torch.manual_seed(5)
        first = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.3)).to(device)
        second = nn.Sequential(nn.Linear(6, 3), nn.Tanh()).to(device)
        return first, second, nn.functional.mse_loss

    first, second, loss_fn = world()
    expected = world()
    samples = (
        (rand(0, 5, 4),),
        (rand(0, 5, 6).requires_grad_(),),
        (rand(0, 5, 3).requires_grad_(), rand(1, 5, 3)),
    )
    pool = ol.Pool() if pooled else None
    graphed = ol.make_graphed_callables((first, second, loss_fn), samples, pool=pool)
    assert graphed[0] is first
    of = [
        torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1, momentum=0.9)
        for a, b in ((first, second), expected[:2])
    ]
    for i in range(6):
        losses: list[Tensor] = []
        for (a, b, loss), optimizer in zip((graphed, expected), of, strict=True):
            torch.manual_seed(i)
            optimizer.zero_grad()
            losses.append(loss(b(a(rand(i, 5, 4))), rand(i + 50, 5, 3)))
            losses[-1].backward()
            optimizer.step()
        assert_same(losses[0].detach(), losses[1].detach())
        assert_same(state_of(first), state_of(expected[0]))
        assert_same(state_of(second), state_of(expected[1]))


def test_the_capture_leaves_everything_as_it_was(device: torch.device, rand: Rand) -> None:
    model = Net(device, dropout=0.5)
    before = copy.deepcopy(state_of(model))
    state = torch.get_rng_state()
    ol.make_graphed_callables(model, (rand(0, 5, 4),))
    assert_same(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_dict_inputs_and_an_unused_one(device: torch.device, rand: Rand) -> None:
    model = Dicts().to(device)
    other = copy.deepcopy(model)
    sample = ({"x": rand(0, 5, 4), "unused": rand(1, 5, 4)},)
    fast = ol.make_graphed_callables(model, sample, allow_unused_input=True)

    def step(m: Any, i: int) -> Any:
        out = m({"x": rand(i, 5, 4), "unused": rand(i + 1, 5, 4)})
        out["output"].sum().backward()
        return {key: t.detach() for key, t in out.items()}

    trains_alike(fast, other, step)


def test_an_unused_input_raises_unless_it_is_allowed(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    sample = (rand(0, 4).requires_grad_(), rand(1, 4).requires_grad_())
    with pytest.raises(RuntimeError, match="allow_unused_input=True"):
        ol.make_graphed_callables(f, sample)
    fast = ol.make_graphed_callables(f, sample, allow_unused_input=True)
    for i in range(3):
        x, y = rand(i, 4).requires_grad_(), rand(i, 4).requires_grad_()
        fast(x, y).sum().backward()
        assert_same(x.grad, torch.full((4,), 2.0, device=device))
        assert y.grad is None


def test_an_unused_argument_beside_a_parameter_that_is_used(
    device: torch.device, rand: Rand
) -> None:
    weight = rand(9, 4).requires_grad_()
    sample = (rand(0, 4).requires_grad_(), rand(1, 4).requires_grad_())
    with pytest.raises(RuntimeError, match="1 of 2 tensors"):
        ol.make_graphed_callables(lambda x, y: x * weight, sample)


class FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def test_an_argument_that_is_used_and_gets_no_gradient(device: torch.device, rand: Rand) -> None:
    sample = (rand(0, 4).requires_grad_(), rand(1, 4).requires_grad_())
    with pytest.raises(RuntimeError, match="1 of 2 tensors"):
        ol.make_graphed_callables(FirstOnly.apply, sample)
    fast = ol.make_graphed_callables(FirstOnly.apply, sample, allow_unused_input=True)
    for i in range(3):
        x, y = rand(i, 4).requires_grad_(), rand(i + 1, 4).requires_grad_()
        fast(x, y).backward(rand(i, 4))
        assert_same(x.grad, rand(i, 4) * 2)
        assert y.grad is None


@pytest.mark.parametrize("returned", ["view", "argument", "detached"])
def test_results_without_a_backward_of_their_own(
    device: torch.device, rand: Rand, returned: str
) -> None:
    """No argument counts as unused where no result requires grad."""

    def f(x: Tensor) -> Tensor:
        return {"view": x.view(2, 2), "argument": x, "detached": x.detach() * 2}[returned]

    fast = ol.make_graphed_callables(f, (rand(0, 4).requires_grad_(),))
    like_eager(fast, f, rand)


def like_eager(fast: Any, f: Any, rand: Rand) -> None:
    """The same results and gradients of its argument."""
    for i in range(4):
        results = []
        for g in (fast, f):
            x = rand(i, 4).requires_grad_()
            y = g(x * 1)
            if y.requires_grad:
                y.sum().backward()
            results.append((y.detach(), x.grad))
        assert_same(results[0], results[1])


def test_a_module_without_parameters(device: torch.device, rand: Rand) -> None:
    fast = ol.make_graphed_callables(nn.Tanh(), (rand(0, 4).requires_grad_(),))
    like_eager(fast, torch.tanh, rand)


def test_a_sample_whose_own_graph_is_gone(device: torch.device, rand: Rand) -> None:
    """Results of an earlier step will do: nothing goes back beyond a sample."""
    sample = (rand(0, 4).requires_grad_() * 2).exp()
    sample.retain_grad()
    sample.sum().backward()
    ones = sample.grad
    ol.make_graphed_callables(nn.Tanh(), (sample,))
    assert sample.grad is ones


def test_hooks_of_parameters_run_with_the_backwards_alone(device: torch.device, rand: Rand) -> None:
    module = nn.Linear(4, 2).to(device)
    seen: list[Tensor] = []
    module.weight.register_hook(seen.append)
    ol.make_graphed_callables(module, (rand(0, 5, 4),))
    assert not seen
    for i in range(3):
        module(rand(i, 5, 4)).sum().backward()
        assert len(seen) == i + 1


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum().cpu())


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reads.apply(x)


def test_a_backward_that_cannot_be_captured(device: torch.device, rand: Rand) -> None:
    tanh, module = nn.Tanh(), Module()
    sample = (rand(0, 4).requires_grad_(),)
    with pytest.raises(ol.CaptureError, match="OL10"):
        ol.make_graphed_callables((tanh, module), (sample, sample))
    assert "forward" not in vars(tanh) | vars(module)


class Gather(nn.Module):
    """Without parameters, and with an index of its own."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = torch.arange(x.shape[0], device=x.device).view(-1, 1).repeat(1, x.shape[1])
        return {"output": torch.gather(x, 0, rows)}


@pytest.mark.cpu
def test_two_modules_and_three_functions(device: torch.device, rand: Rand) -> None:
    """The stress test of torch's: autocast around it all, an input that is not used, then eval."""

    def world() -> list[Any]:
        torch.manual_seed(5)
        sections = Dicts(), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2)), Gather()
        return [*(m.to(device) for m in sections), torch.relu, nn.functional.mse_loss]

    def step(callables: Any, i: int) -> Tensor:
        first, second, third, relu, loss_fn = callables
        hidden = first({"x": rand(i, 5, 4), "unused": rand(i + 1, 5, 4).requires_grad_()})
        y = relu(third(second(hidden["output"]))["output"])
        loss: Tensor = loss_fn(y, rand(i, 5, 3))
        loss.backward()
        return loss.detach()

    mixed = torch.autocast(device.type, torch.bfloat16, device.type != "tape", cache_enabled=False)
    expected, chosen = world(), world()
    h, y = rand(1, 5, 4).requires_grad_(), rand(2, 5, 3).requires_grad_()
    samples = (
        ({"x": rand(0, 5, 4), "unused": rand(1, 5, 4).requires_grad_()},),
        *((h,), (y,), (y,), (y, rand(3, 5, 3))),
    )
    with mixed:
        graphed = ol.make_graphed_callables(tuple(chosen), samples, allow_unused_input=True)
        for i in range(5):
            results = []
            for callables in (graphed, expected):
                torch.manual_seed(i)
                for module in callables[:2]:
                    module.zero_grad()
                results.append((step(callables, i), *map(state_of, callables[:2])))
            assert_same(results[0], results[1], f"step {i}")
    for module in (graphed[1], expected[1]):
        module.eval()
    assert_same(graphed[1](h).detach(), expected[1](h).detach())


def test_calls_that_name_one_pool(device: torch.device, rand: Rand) -> None:
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)).to(device) for _ in "123"]
    pool = (2, 7)  # as `torch.cuda.graph_pool_handle()` gives one
    graphed = [
        ol.make_graphed_callables(copy.deepcopy(m), (rand(0, 6, 4),), pool=pool) for m in models
    ]
    results = [[], []]
    for kept, group in zip(results, (graphed, models), strict=True):
        for model in group:
            kept.append(model(rand(1, 6, 4)))
            kept[-1].norm().backward()
    for fast, model in zip(graphed, models, strict=True):
        assert_same(state_of(fast), state_of(model))
    assert_same([t.detach() for t in results[0]], [t.detach() for t in results[1]])


def test_more_samples_than_callables(device: torch.device, rand: Rand) -> None:
    fast = ol.make_graphed_callables((torch.sin,), ((rand(0, 4),), (rand(1, 4),)))
    assert_same(fast[0](rand(2, 4)), torch.sin(rand(2, 4)))


def test_keywords_and_values_that_are_no_tensors(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, scale: float, *, bias: Tensor | None = None) -> Tensor:
        return x * scale if bias is None else x * scale + bias

    fast = ol.make_graphed_callables(
        f, (rand(0, 4).requires_grad_(), 3.0), sample_kwargs={"bias": rand(1, 4)}
    )
    for i in range(3):
        x = rand(i, 4).requires_grad_()
        y = fast(x, 3.0, bias=rand(i + 1, 4))
        y.sum().backward()
        assert_same(y.detach(), rand(i, 4) * 3.0 + rand(i + 1, 4))
        assert_same(x.grad, torch.full((4,), 3.0, device=device))


def test_microbatches_before_their_backwards(device: torch.device, rand: Rand) -> None:
    """One forward and one backward, pipelined: each microbatch keeps what it saved."""
    model, other = Net(device).eval(), Net(device).eval()
    fast = ol.make_graphed_callables(model, (rand(0, 5, 4),))

    def step(m: Any, i: int) -> None:
        losses = [m(rand(10 * i + k, 5, 4)).square().mean() for k in range(3)]
        for loss in losses:
            loss.backward()

    trains_alike(fast, other, step)


def test_the_other_of_train_and_eval(device: torch.device, rand: Rand) -> None:
    model, other = Net(device), Net(device)
    fast = ol.make_graphed_callables(model, (rand(0, 5, 4),))
    for i in range(6):
        fast.train(i % 2 == 0)
        other.train(i % 2 == 0)
        with torch.set_grad_enabled(i % 2 == 0):
            assert_same(fast(rand(i, 5, 4)).detach(), other(rand(i, 5, 4)).detach())


def test_a_program_written_for_torchs(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", ol.make_graphed_callables)
    model, other = Net(device), Net(device)
    torch.cuda.make_graphed_callables(model, (rand(0, 5, 4),), num_warmup_iters=11)
    # The module that it was given is graphed.
    trains_alike(model, other, lambda m, i: m(rand(i, 5, 4)).square().mean().backward())
    assert model.forward.recordings[0].replays >= 5


def test_what_torchs_refuses(device: torch.device, rand: Rand) -> None:
    hooked = nn.Linear(4, 2).to(device)
    hooked.register_forward_hook(lambda *_: None)
    trained = nn.BatchNorm1d(4).to(device)
    trained.running_mean.requires_grad_()
    x = rand(0, 5, 4)
    for callables, sample in (
        (hooked, (x,)),
        (trained, (x,)),
        ((nn.Tanh(), nn.Tanh()), ((x,),)),
        (nn.Tanh(), x),
    ):
        with pytest.raises(ol.GraphError) as caught:
            ol.make_graphed_callables(callables, sample)
        assert caught.value.code == "OL401"


@on_cpu_and_cuda
@pytest.mark.parametrize("cache", [False, True])
def test_autocast_with_and_without_its_cache(device: torch.device, rand: Rand, cache: bool) -> None:
    model, other = Net(device), Net(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache):
        if cache:
            with pytest.raises(RuntimeError, match="cache_enabled=False"):
                ol.make_graphed_callables(model, (rand(0, 5, 4),))
            return
        fast = ol.make_graphed_callables(model, (rand(0, 5, 4),))

    def step(m: Any, i: int) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            y = m(rand(i, 5, 4))
        y.float().square().mean().backward()

    trains_alike(fast, other, step)


def _assert_apart(model: nn.Module, copied: nn.Module, device: torch.device, rand: Rand) -> None:
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.fill_(7)
    for i in range(6):
        result = copied(rand(i, 3, 4))
        assert_same(result.detach(), torch.full((3, 2), 7.0).to(device))
        result.sum().backward()
    assert model.weight.grad is None
    assert copied.weight.grad is not None
    assert replays(copied.forward) > 0


def test_a_copy_runs_on_its_own_parameters(device: torch.device, rand: Rand) -> None:
    """As the average of a model's weights is made."""
    model = nn.Linear(4, 2).to(device)
    ol.make_graphed_callables(model, (rand(0, 3, 4),))
    _assert_apart(model, copy.deepcopy(model), device, rand)


@on_cpu_and_cuda
def test_a_pickled_one_runs_on_its_own_parameters(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 2).to(device)
    ol.make_graphed_callables(model, [rand(0, 3, 4)])  # torch takes a list too
    _assert_apart(model, pickle.loads(pickle.dumps(model)), device, rand)

"""What programs ask of `torch.cuda.make_graphed_callables`, asked of ours: the behaviours of
torch's and TransformerEngine's own tests, written anew."""

from __future__ import annotations

import copy
import pickle
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
    for i in range(4):
        results = []
        for m in (fast, other):
            m.zero_grad()
            out = m({"x": rand(i, 5, 4), "unused": rand(i + 1, 5, 4)})
            out["output"].sum().backward()
            results.append({key: t.detach() for key, t in out.items()})
        assert_same(results[0], results[1])
        assert_same(state_of(model), state_of(other))


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


def test_a_module_without_parameters(device: torch.device, rand: Rand) -> None:
    module = nn.Tanh()
    fast = ol.make_graphed_callables(module, (rand(0, 4).requires_grad_(),))
    for i in range(4):
        x, y = rand(i, 4).requires_grad_(), rand(i, 4).requires_grad_()
        fast(x).sum().backward()
        torch.tanh(y).sum().backward()
        assert_same(x.grad, y.grad)


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
    for i in range(4):
        for m in (fast, other):
            m.zero_grad()
            losses = [m(rand(10 * i + k, 5, 4)).square().mean() for k in range(3)]
            for loss in losses:
                loss.backward()
            del losses, loss
        assert_same(state_of(model), state_of(other))


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
    for i in range(5):
        for m in (model, other):  # the module that it was given is graphed
            m.zero_grad()
            m(rand(i, 5, 4)).square().mean().backward()
        assert_same(state_of(model), state_of(other))
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
    for i in range(4):
        for m in (fast, other):
            m.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
                y = m(rand(i, 5, 4))
            y.float().square().mean().backward()
        assert_same(state_of(model), state_of(other))


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

"""Between a forward and its backward: several at once, saved tensors, memory."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from onelaunch.autograd import node as flight

from .drop_in import allocated, assert_same, replays
from .training import Made, Net, Optimized, Rand, loss_of, train


def test_several_forwards_before_their_backwards(device: torch.device, rand: Rand) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> None:
        optimizer.zero_grad()
        losses = [loss_of(model(rand(10 * i + k, 5, 4))) for k in range(3)]
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()

    program = Optimized(lambda p: torch.optim.SGD(p, 0.1), step)
    fast = train(Net(device), program, recordings=None, steps=8)
    assert len(fast.recordings) == 3


def test_a_contrastive_pair_in_one_backward(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> None:
        model.zero_grad()
        a, b = model(rand(i, 5, 4)), model(rand(i + 70, 5, 4))
        (a * b).sum().backward()

    fast = train(Net(device), program, recordings=None)
    assert len(fast.recordings) == 2


def test_an_adversarial_step(device: torch.device, rand: Rand) -> None:
    """The judge sees real and made up; its parameters get gradients in one of the two steps."""

    def world() -> Any:
        torch.manual_seed(8)
        maker, judge = nn.Linear(2, 4).to(device), nn.Linear(4, 1).to(device)
        of = [torch.optim.SGD(m.parameters(), 0.1) for m in (maker, judge)]
        return maker, judge, of

    def step(maker: Any, judge: Any, of: Any, i: int) -> list[Tensor]:
        made = maker(rand(i, 5, 2))
        of[1].zero_grad()
        loss = judge(made.detach()).mean() - judge(rand(i + 50, 5, 4)).mean()
        loss.backward()
        of[1].step()
        of[0].zero_grad()
        other = -judge(made).mean()
        other.backward()
        of[0].step()
        return [loss.detach(), other.detach()]

    (maker, judge, of), (m, j, o) = world(), world()
    fast_maker, fast_judge = ol.graph(maker, warmup=1), ol.graph(judge, warmup=1)
    for i in range(8):
        assert_same(step(fast_maker, fast_judge, of, i), step(m, j, o, i))
        for p, q in zip(judge.parameters(), j.parameters(), strict=True):
            assert_same(p.grad, q.grad)
    assert replays(fast_judge) > 10


def test_more_forwards_than_max_in_flight_run_eagerly(device: torch.device, rand: Rand) -> None:
    model, other = Net(device).eval(), Net(device).eval()
    fast = ol.graph(model, warmup=1, max_in_flight=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            got = [fast(rand(10 * i + k, 5, 4)) for k in range(4)]
            expected = [other(rand(10 * i + k, 5, 4)) for k in range(4)]
            sum(loss_of(y) for y in got).backward()
            sum(loss_of(y) for y in expected).backward()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            del got
    ours = [str(w.message) for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1
    assert "OL305" in ours[0]
    newest, first = fast.recordings
    assert first.why == "first signature"
    assert newest.why == "an earlier forward still waits for its backward"


@pytest.mark.thorough
def test_a_validation_loop_that_forgets_no_grad(device: torch.device, rand: Rand) -> None:
    model, other = Net(device).eval(), Net(device).eval()
    fast = ol.graph(model, warmup=1)
    before = None
    for i in range(30):
        y = fast(rand(i, 5, 4))
        assert_same(y, other(rand(i, 5, 4)))
        if i == 6:
            before = allocated(device)
    assert before is not None
    assert allocated(device) <= before + 4096
    assert len(fast.recordings) <= 2
    assert replays(fast) >= 28


def test_a_parameter_changed_before_the_backward(device: torch.device, rand: Rand) -> None:
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fast = ol.graph(model, warmup=1)
    for i in range(5):
        loss = loss_of(fast(rand(i, 5, 4)))
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        del loss
    assert replays(fast) >= 4


def test_a_result_changed_before_the_backward(device: torch.device, rand: Rand) -> None:
    """tanh saves its result, a sum does not."""
    saving = ol.graph(lambda x: torch.tanh(x), warmup=1)
    plain = ol.graph(lambda x: x * 2 + x, warmup=1)
    for i in range(4):
        x = rand(i, 4).requires_grad_()
        y = saving(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        z = plain(x)
        z.mul_(rand(i + 9, 4))
        z.sum().backward()
        assert_same(x.grad, rand(i + 9, 4) * 2 + rand(i + 9, 4))
        del y, z


class Factor(nn.Module):
    """A result that needs no gradient, which the gradient of another is made of."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept = way, torch.empty(0)

    def forward(self, x: Tensor, by: Tensor) -> tuple[Tensor, ...]:
        factor = by * 2
        y = x * factor
        if self.way == "kept":
            self.kept = factor
        if self.way == "two parts":
            return factor, y, x.tanh()
        return (factor if self.way == "result" else factor[1:].view(-1)), y


@pytest.mark.parametrize("way", ["result", "a view of it", "kept", "two parts"])
def test_a_result_without_a_gradient_changed_before_the_backward(
    device: torch.device, rand: Rand, way: str
) -> None:
    model = Factor(way)
    fast = ol.graph(model, warmup=1)
    for i in range(6):
        x = rand(i, 5, 4).requires_grad_()
        result, y, *others = fast(x, rand(i + 9, 5, 4))
        if i % 2:
            y.sum().backward()
            assert_same(x.grad, rand(i + 9, 5, 4) * 2)
            continue
        (model.kept if way == "kept" else result).mul_(3)
        for other in others:  # which does not depend on it
            other.sum().backward()
            alone = rand(i, 5, 4).requires_grad_()
            alone.tanh().sum().backward()
            assert_same(x.grad, alone.grad)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert replays(fast) >= 3


def test_an_edit_before_a_gradient_of_one_parameter_is_asked_for(
    device: torch.device, rand: Rand
) -> None:
    def program(model: Any, i: int) -> Any:
        x = rand(i, 5, 4)
        loss = model(x).square().mean()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, [model.inner.weight], retain_graph=True)
        return torch.autograd.grad(loss, [model.out.bias])

    train(Net(device), program)


def test_what_the_backward_does_not_read_may_change(device: torch.device, rand: Rand) -> None:
    """The bias of a linear layer is not saved, so eager does not mind a step in between."""

    def program(model: Any, i: int) -> None:
        model.zero_grad()
        loss = loss_of(model(rand(i, 5, 4)))
        with torch.no_grad():
            model.bias.add_(1)
        loss.backward()

    train(nn.Linear(4, 2).to(device), program)


def test_a_parameter_moved_before_the_backward(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    fast = ol.graph(model, warmup=1)
    for i in range(6):
        model.zero_grad()
        loss = loss_of(fast(rand(i, 5, 4)))
        weight, bias = model[2].weight, model[2].bias
        again = nn.functional.linear(torch.tanh(model[0](rand(i, 5, 4))), weight, bias)
        (expected,) = torch.autograd.grad(loss_of(again), weight)
        if i % 2:
            model[2].weight = nn.Parameter(weight.detach().clone())
        loss.backward()
        assert_same(weight.grad, expected)
        weight.grad = None


def test_two_recordings_do_not_share_what_they_save(device: torch.device, rand: Rand) -> None:
    """Shapes of all sizes, forwards and backwards in every order, one pool."""
    pool = ol.Pool()
    model, other = Net(device).eval(), Net(device).eval()
    wide, second = nn.Linear(4, 64).to(device), nn.Linear(4, 64).to(device)
    second.load_state_dict(wide.state_dict())
    fast, fast_wide = ol.graph(model, warmup=1, pool=pool), ol.graph(wide, warmup=1, pool=pool)
    for i in range(5):
        for a, b in ((fast, fast_wide), (other, second)):
            a.zero_grad()
            b.zero_grad()
            first = loss_of(a(rand(i, 5, 4)))
            wide_loss = loss_of(torch.tanh(b(rand(i, 50, 4))))
            third = loss_of(a(rand(i, 17, 4)))
            first.backward()
            third.backward()
            wide_loss.backward()
        for m, n in ((model, other), (wide, second)):
            for p, q in zip(m.parameters(), n.parameters(), strict=True):
                assert_same(p.grad, q.grad)


def test_reset_while_a_forward_is_in_flight(device: torch.device, rand: Rand) -> None:
    model, other = Net(device), Net(device)
    fast = ol.graph(model, warmup=1)
    for i in range(8):
        for m in (fast, other):
            m.zero_grad()
            loss = loss_of(m(rand(i, 5, 4)))
            if m is fast and i % 3 == 2:
                fast.reset()
            loss.backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(p.grad, q.grad)


class Meets(nn.Linear):
    """Two forwards that overlap: the one given a lock begins first, and ends in the other."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(4, 4, device=device)
        self.begun, self.inside, self.ended = (threading.Event() for _ in range(3))

    def forward(self, x: Tensor, lock: object = None) -> Tensor:
        if lock is not None:
            self.begun.set()
            assert self.inside.wait(60)
        elif self.begun.is_set():
            self.inside.set()
            assert self.ended.wait(60)
        y = nn.functional.linear(torch.tanh(x), self.weight, self.bias)
        if lock is not None:
            self.ended.set()
        return y


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_an_eager_run_in_another_thread_meets_no_stand_ins(
    device: torch.device, rand: Rand
) -> None:
    """A capture puts stand-ins in the place of parameters; whoever finds those loses gradients."""
    model = Meets(device)
    weight = model.weight
    fast = ol.graph(model, warmup=1)
    gradients: list[Any] = []

    def other() -> None:
        y = fast(rand(1, 5, 4), threading.Lock())  # eager: a lock cannot be compared
        gradients.extend(torch.autograd.grad(y.sum(), weight))

    fast(rand(0, 5, 4)).sum().backward()
    with ThreadPoolExecutor(1) as executor:
        result = executor.submit(other)
        assert model.begun.wait(60)
        fast(rand(0, 5, 4)).sum().backward()
        result.result(60)
    assert_same(gradients, list(torch.autograd.grad(model(rand(1, 5, 4)).sum(), weight)))


@pytest.mark.thorough
def test_no_memory_growth(device: torch.device, rand: Rand) -> None:
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fast = ol.graph(model, warmup=1)
    sizes = [(3, 5, 8)[i % 3] for i in range(60)]
    before = 0
    for i, size in enumerate(sizes):
        optimizer.zero_grad()
        loss_of(fast(rand(i, size, 4))).backward()
        if i % 4:
            optimizer.step()
        if i == 20:
            before = allocated(device)
    assert allocated(device) <= before
    assert len(fast.recordings) == 3


# Results with nothing in common: a backward each.


class ActorCritic(nn.Module):
    """Two networks with nothing in common but the input, and two results of one of them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.actor(x)
        return a, self.critic(x), a.exp()


@pytest.mark.parametrize("how", ["one", "two", "reverse", "joint", "alone", "retained"])
def test_a_backward_for_each_part(device: torch.device, rand: Rand, how: str) -> None:
    def program(model: Any, i: int) -> Any:
        steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (model.actor, model.critic)]
        x = rand(i, 3, 4).requires_grad_(how != "one")
        a, c, e = model(x)
        model.zero_grad()
        parts = [loss_of(a) + loss_of(e), loss_of(c)]
        if how == "joint":
            parts = [parts[0] + parts[1]]
        elif how == "alone":
            parts = [parts[i % 2]]
        elif how == "reverse":
            parts, steps = parts[::-1], steps[::-1]
        for part, step in zip(parts, steps, strict=False):
            if how == "retained":
                part.backward(retain_graph=True)
            part.backward()
            step.step()  # over what the other part did not save
        return a.detach(), c.detach(), x.grad

    fast = train(ActorCritic(device), program, steps=9)
    assert replays(fast) == 8


def test_a_part_is_used_up_by_its_own_backward(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(ActorCritic(device), warmup=1)
    kept = []
    for i in range(6):
        a, c, e = fast(rand(i, 3, 4))
        loss_of(a).backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss_of(e).backward()
        kept.append(c)  # so that the recording stays busy
        if i == 3:
            assert len(fast.recordings) == 3
            kept.clear()
            del c
    assert len(fast.recordings) == 3


def test_what_a_part_saved_is_watched(device: torch.device, rand: Rand) -> None:
    model = ActorCritic(device)
    fast = ol.graph(model, warmup=1)
    for i in range(4):
        a, c, _ = fast(rand(i, 3, 4))
        with torch.no_grad():
            model.critic[2].weight.mul_(2)
        loss_of(a).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(c).backward()


@pytest.mark.parametrize("edited", ["x", "bias", "weight", "state"])
@pytest.mark.parametrize("alone", [False, True])
def test_an_edit_of_what_some_gradients_need(
    device: torch.device, rand: Rand, edited: str, alone: bool
) -> None:
    """An error where a gradient that is asked for depends on it, in eager and so here."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.state: Tensor
            self.register_buffer("state", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.state.add_(1)
            own = (x.detach() * self.weight).sum() + (self.bias * self.bias).sum()
            return (x * self.weight).sum() + own + (self.bias * self.state).sum()

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        x = rand(i, 3, 4).requires_grad_()
        loss = model(x)
        if i > 1:
            with torch.no_grad():
                (x if edited == "x" else getattr(model, edited)).mul_(2)
        try:
            loss.backward(inputs=[x]) if alone else loss.backward()
        except RuntimeError as error:
            return str(error).partition(":")[0]
        return x.grad

    train(Model().to(device), program, recordings=None)


class Scaled(nn.Module):
    """Saves parameters, a buffer and its argument themselves, and one parameter as a view of it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight, self.fixed = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4), False)
        self.inner = nn.Linear(4, 4)
        self.state: Tensor
        self.register_buffer("state", torch.randn(4))
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.weight).tanh() * self.state * x * self.fixed


@pytest.mark.parametrize("which", ["x", "weight", "state", "fixed", "inner.weight", "both"])
@pytest.mark.parametrize("edited", [False, True])
def test_other_memory_before_the_backward(
    device: torch.device, rand: Rand, which: str, edited: bool
) -> None:
    """`t.data = ...`: eager's backward reads what a tensor that it saved has then."""

    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        x = rand(i, 3, 4).requires_grad_()
        loss = model(x).sum()
        if i in (2, 3, 5):
            named = {"x": x, **dict(model.named_parameters()), "state": model.state}
            for name in ("x", "weight") if which == "both" else (which,):
                named[name].data = named[name].data * 2
            if edited:  # of what nothing reads
                with torch.no_grad():
                    model.inner.bias.mul_(2)
        loss.backward()
        return x.grad

    fast = train(Scaled(device), program, steps=8, recordings=None)
    assert replays(fast) > 2


def test_other_memory_of_what_a_checkpoint_reads(device: torch.device, rand: Rand) -> None:
    part = Made(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=Scaled(device))

    def program(model: Any, i: int) -> None:
        model.zero_grad()
        loss = model(rand(i, 3, 4)).sum()
        if i in (3, 5):
            weight = model.inner.inner.weight
            weight.data = weight.data * 2
        loss.backward()

    train(part, program, steps=8, recordings=None)


def test_other_memory_of_what_a_part_saved(device: torch.device, rand: Rand) -> None:
    parts = Made(lambda m, x, y: (x * m.a, y * m.b * y), a=rand(1, 4), b=rand(2, 4))

    def program(model: Any, i: int) -> None:
        model.zero_grad()
        x, y = rand(i, 4), rand(i + 50, 4)
        first, second = model(x, y)
        if i in (2, 5):
            y.data = y.data * 2
        if i in (3, 5):
            model.b.data = model.b.data * 2
        first.sum().backward()
        second.sum().backward()

    train(parts, program, steps=8, recordings=None)


def written_over(device: torch.device, first: Any) -> nn.Module:
    torch.manual_seed(4)
    layers = [nn.Linear(4, 4), first(), nn.ReLU(inplace=True), nn.Linear(4, 2)]
    return nn.Sequential(*layers).to(device)


@pytest.mark.parametrize("first", [nn.Tanh, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("only_looked_at", [False, True])
def test_a_forward_that_writes_over_what_it_saved(
    device: torch.device, rand: Rand, first: Any, only_looked_at: bool
) -> None:
    """Eager raises at a backward that comes there, and at no other."""

    def program(model: Any, i: int) -> Any:
        y = model(rand(i, 3, 4))
        if not only_looked_at:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            model.zero_grad()  # of what eager had reached before it raised
        return y.detach()

    train(written_over(device, first), program)


def test_gradients_beside_what_the_forward_wrote_over(device: torch.device, rand: Rand) -> None:
    def program(model: Any, i: int) -> Any:
        model.zero_grad()
        model(rand(i, 3, 4)).sum().backward(inputs=list(model.parameters())[2:])

    train(written_over(device, nn.Tanh), program)


def test_the_collector_ends_no_forward(device: torch.device, rand: Rand) -> None:
    """While another thread works on a graph, it finalizes what lives: torch counts the owners of a
    node at two moments. So nothing that it finalizes gives a recording free."""
    model = Net(device)
    fast = ol.graph(model, warmup=1)
    for i in range(3):
        loss_of(fast(rand(i, 5, 4))).backward()
    y = fast(rand(3, 5, 4))
    forwards = [o for o in gc.get_objects() if type(o) is flight.InFlightForward]
    flying = [f for f in forwards if type(f.token) is not flight.InFlightForward]  # no components
    assert flying
    assert not hasattr(flight.InFlightForward, "__del__")
    assert not any(gc.is_tracked(f.token) for f in flying)
    del flying, forwards
    del y
    loss_of(fast(rand(4, 5, 4))).backward()
    assert len(fast.recordings) == 1, "a dropped graph has given its recording free"

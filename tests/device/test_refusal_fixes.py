"""Refusals of what torch's own Python does: the fix names the option or call that does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, replays

Step = Callable[[Any, Tensor], Any]


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.averaged = nn.BatchNorm1d(3, momentum=None, affine=False)
        self.moving = nn.BatchNorm1d(3, momentum=0.1, affine=False)


def entropy(model: Model, x: Tensor, **options: Any) -> Tensor:
    return torch.distributions.Categorical(logits=model(x), **options).entropy()


def clipped(model: Model, x: Tensor, **options: Any) -> Tensor:
    model.zero_grad()
    model(x).square().sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0, **options)


def replaced(model: Model, x: Tensor) -> Tensor:
    loss = descent(model, x)
    for p in model.parameters():
        assert p.grad is not None
        p.data = p.data - 0.1 * p.grad
    return loss


def replaced_together(model: Model, x: Tensor) -> Tensor:
    loss = descent(model, x)
    with torch.no_grad():
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        vector = nn.utils.parameters_to_vector(model.parameters())
        vector -= 0.1 * nn.utils.parameters_to_vector(grads)
        nn.utils.vector_to_parameters(vector, model.parameters())
    return loss


def copied(model: Model, x: Tensor) -> Tensor:
    loss = descent(model, x)
    for p in model.parameters():
        assert p.grad is not None
        p.data.copy_(p.data - 0.1 * p.grad)
    return loss


def descent(model: Model, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.out = x.tanh()
        return ctx.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 - ctx.out**2)


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y**2)


def through(function: type[torch.autograd.Function]) -> Step:
    def step(model: Model, x: Tensor) -> Tensor:
        loss = function.apply(model(x)).mean()
        loss.backward()
        return loss

    return step


FIXES: dict[str, tuple[Step, str, str, Step]] = {
    "validation of distributions": (
        entropy,
        "OL101",
        "validate_args=False",
        lambda model, x: entropy(model, x, validate_args=False),
    ),
    "a momentum of None": (
        lambda model, x: model.averaged(model(x)),
        "OL101",
        "momentum=0.1",
        lambda model, x: model.moving(model(x)),
    ),
    "a norm that must be finite": (
        lambda model, x: clipped(model, x, error_if_nonfinite=True),
        "OL101",
        "without `error_if_nonfinite=True`",
        clipped,
    ),
    "data replaced": (replaced, "OL105", "p.data.copy_", copied),
    "parameters from a vector": (replaced_together, "OL105", "p.data.copy_", copied),
    "an attribute of a context": (through(Kept), "OL105", "ctx.save_for_backward", through(Saved)),
}


@pytest.mark.parametrize("name", FIXES)
def test_the_fix_is_of_use(
    device: torch.device, rand: Rand, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, code, words, mended = FIXES[name]
    # Dynamo turns it off for good as it compiles anything.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def run(step: Step) -> None:
        model = Model().to(device)
        fast = ol.graph(lambda x: step(model, x), warmup=1)
        for i in range(4):
            fast(rand(i, 5, 4))
        assert replays(fast) >= 2

    with pytest.raises(ol.CaptureError, match=code) as caught:
        run(refused)
    assert words in caught.value.fix
    run(mended)


def test_a_list_that_grows_is_read_and_changed_outside(device: torch.device, rand: Rand) -> None:
    seen: list[int] = []

    def grows(x: Tensor) -> Tensor:
        y = x * len(seen)
        seen.append(1)
        return y

    fast = ol.graph(grows, warmup=1)
    for i in range(2):  # the second finds that it grows
        fast(rand(i, 3))
    with pytest.raises(ol.CaptureError, match="OL118") as caught:
        fast(rand(2, 3))
    assert "y = fast(x, len(seen)); seen.append(1)" in caught.value.fix

    fast = ol.graph(lambda x, length: x * length, warmup=1)
    for i in range(8):
        x = rand(i, 3)
        y = fast(x, len(seen))
        assert torch.equal(y, x * len(seen))
        seen.append(1)
    assert len(fast.recordings) == 1
    assert replays(fast) >= 4


@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # packed where the sizes are
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_is_refused_as_packing_is(
    device: torch.device, rand: Rand, kind: type[nn.RNNBase]
) -> None:
    pack = nn.utils.rnn.pack_padded_sequence
    layer = kind(4, 3)
    given = ol.graph(layer, warmup=1)
    packs = ol.graph(lambda x: layer(pack(x, [5, 3], batch_first=True))[1], warmup=1)
    x = rand(0, 2, 5, 4)
    for fast, argument in ((given, pack(x, [5, 3], batch_first=True)), (packs, x)):
        fast(argument)
        with pytest.raises(ol.CaptureError, match=r"OL10[12]") as caught:
            fast(argument)
        assert "pad, and mask the result" in caught.value.fix


Indexed = Callable[[Tensor, Tensor], Tensor]


def put(x: Tensor, where: Any, value: Tensor | float) -> Tensor:
    y = x.clone()
    y[where] = value
    return y


INDEXED: dict[str, tuple[Indexed, str, Indexed]] = {
    "x[i]": (lambda x, i: x[i], "x[i.view(1)].squeeze(0)", lambda x, i: x[i.view(1)].squeeze(0)),
    "x[:, i]": (
        lambda x, i: x[:, i],
        "x[:, i.view(1)].squeeze(1)",
        lambda x, i: x[:, i.view(1)].squeeze(1),
    ),
    "x[i] = a number": (
        lambda x, i: put(x, i, 1.0),
        "x[i.view(1)] = y",
        lambda x, i: put(x, i.view(1), 1.0),
    ),
    "x[i] = a row": (
        lambda x, i: put(x, i, x[0]),
        "x[i.view(1)] = y",
        lambda x, i: put(x, i.view(1), x[0]),
    ),
    "x[:, i] = a column": (
        lambda x, i: put(x, (slice(None), i), x[:, 0]),
        "x[:, i.view(1)] = y.unsqueeze(1)",
        lambda x, i: put(x, (slice(None), i.view(1)), x[:, 0].unsqueeze(1)),
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_without_dimensions(device: torch.device, rand: Rand, name: str) -> None:
    refused, words, mended = INDEXED[name]
    broken, fast = ol.graph(refused, warmup=1), ol.graph(mended, warmup=1)
    with torch.no_grad():
        calls = [(rand(k, 5, 4), torch.tensor(k % 4, device=device)) for k in range(6)]
        broken(*calls[0])
        with pytest.raises(ol.CaptureError, match="OL101") as caught:
            broken(*calls[1])
        for call in calls:
            assert torch.equal(fast(*call), refused(*call))
    assert words in caught.value.fix
    assert replays(fast) == 5

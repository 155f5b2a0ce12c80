"""`on_refusal="split"`: a module that is refused runs as it is, and its children are graphed."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    Rand,
    assert_same,
    compare,
    drop_in_worlds,
    in_threads,
    on_cpu_and_cuda,
    replays,
)
from .training import Optimized, train

pytestmark = pytest.mark.filterwarnings(r"ignore:\[OL311\]")


class Block(nn.Module):
    """A residual block: several kernels."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Detector(nn.Module):
    """Keeps the rows that score above zero: as many as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Block(), Block())
        self.score = nn.Linear(4, 1)
        self.boxes = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.backbone(x)
        kept = (self.score(h)[:, 0] > 0).nonzero()[:, 0]  # kept
        return self.boxes(h)[kept], kept


class EarlyExit(nn.Module):
    """Stops at the layer where the mean is small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0.2:  # enough
                break
        return self.out(x)


class Middle(nn.Module):
    """Reads a number between two large parts."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(), nn.Dropout(0.5), Block())
        self.inner = inner
        self.last = nn.Sequential(Block(), nn.BatchNorm1d(4), Block())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.inner is not None:
            x = self.inner(x)
        x = x / (1 + abs(x.sum().item()))  # read
        return self.last(x)


class Heads(nn.Module):
    """Members of a ModuleDict, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": Block(), "b": nn.ModuleList([Block(), Block()])})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x * float(x.amax())  # scale
        return {"a": self.heads["a"](y), "b": self.heads["b"][1](self.heads["b"][0](y))}


def make(kind: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    torch.manual_seed(2)
    return kind().to(device)


def split(model: nn.Module, **options: Any) -> Any:
    return ol.graph(model, warmup=1, on_refusal="split", **options)


def middle(device: torch.device, **options: Any) -> Any:
    return split(make(Middle, device).eval(), **options)


def rows(rand: Rand) -> Callable[[int], tuple[Tensor]]:
    return lambda i: (rand(i, 6, 4),)


def in_pieces(
    device: torch.device,
    kind: Callable[[], nn.Module],
    arguments: Callable[[int], tuple[Any, ...]],
    calls: int = 8,
    recordings: int | None = None,
    **options: Any,
) -> Any:
    """Compare a module in `eval` with eager, and return it graphed."""
    return drop_in_worlds(
        lambda: (make(kind, device).eval(), arguments),
        calls=calls,
        recordings=recordings,
        on_refusal="split",
        **options,
    )


def summed(model: Any, rand: Rand, i: int) -> Tensor:
    """A step whose result the gradients are of."""
    model.zero_grad()
    y = model(rand(i, 6, 4))
    y.square().sum().backward()
    return y


PROGRAMS = {
    "nonzero in the head": (Detector, {"backbone", "score", "boxes"}),
    "an early exit": (EarlyExit, {"out", *(f"layers.{i}" for i in range(4))}),
    "item between blocks": (Middle, {"first", "last"}),
    "a ModuleDict": (Heads, {"heads.a", "heads.b.0", "heads.b.1"}),
    "two levels": (lambda: Middle(Middle()), {"first", "last", "inner.first", "inner.last"}),
}


def pieces(fast: Any) -> set[str]:
    """The names of what was recorded, below the model."""
    return {r.callable.partition(".")[2] for r in fast.recordings}


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_is_as_in_eager(device: torch.device, rand: Rand, name: str) -> None:
    kind, expected = PROGRAMS[name]
    fast = in_pieces(device, kind, rows(rand), 12, min_replays=12)
    assert pieces(fast) == expected
    assert all(r.replays for r in fast.recordings)


@pytest.mark.parametrize("gradients", ["autograd", "direct"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_as_in_eager(
    device: torch.device, rand: Rand, name: str, gradients: Any
) -> None:
    kind, expected = PROGRAMS[name]

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Any:
        optimizer.zero_grad()
        result = model(rand(i, 6, 4))
        tensors = result.values() if isinstance(result, dict) else result
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        loss = sum(t.square().sum() for t in tensors if t.is_floating_point())
        loss.backward()
        optimizer.step()
        return result, loss

    program = Optimized(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), step)
    fast = train(
        make(kind, device),
        program,
        steps=12,
        recordings=None,
        on_refusal="split",
        gradients=gradients,
    )
    assert pieces(fast) <= expected
    assert replays(fast) > 12


class Whole(nn.Module):
    """Nothing in it is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_what_can_be_captured_whole_is(device: torch.device, rand: Rand) -> None:
    fast = in_pieces(device, Whole, rows(rand), 5)
    assert [r.callable for r in fast.recordings] == ["Whole"]
    assert fast.stats().split == ()


def run(fast: Any, rand: Rand, calls: int = 8, shape: tuple[int, ...] = (6, 4)) -> None:
    with torch.no_grad():
        for i in range(calls):
            fast(rand(i, *shape))


@pytest.mark.filterwarnings("default")
def test_one_message_names_the_lines_and_the_cost(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(make(lambda: Middle(EarlyExit()), device).eval(), warmup=1, on_refusal="split")
    fast.inner.out = nn.Linear(4, 4).to(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(fast, rand, 10)
    (text,) = [str(w.message) for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert text.startswith("[OL311] `Middle` runs in pieces: `Middle`, `Middle.inner` run as they")
    assert text.count("# enough (OL101, ") == 1
    stats = fast.stats()
    assert f"{stats.split_launches} launches and {stats.split_us:.0f} us" in text
    assert stats.split_launches >= 4
    assert [one.module for one in stats.split] == ["Middle", "Middle.inner"]
    assert caught[0].filename == __file__


def test_pieces_of_other_sizes_at_each_call(device: torch.device, rand: Rand) -> None:
    class Late(Detector):
        def forward(self, x: Tensor) -> Any:
            h = self.backbone(x)
            return self.boxes(h[h[:, 0] > 0])

    fast, eager = split(make(Late, device).eval()), make(Late, device).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(fast, eager, lambda i: (rand(i, 5000, 4),), 40)
    texts = [str(w.message) for w in caught if "[OL311]" in str(w.message)]
    assert len(texts) == 1
    assert "some pieces still get other sizes or arguments at each call" in texts[0]
    assert pieces(fast) >= {"backbone"}


def test_a_size_that_comes_later(device: torch.device, rand: Rand) -> None:
    sizes = [6] * 6 + [3] * 6 + [6, 3, 6]
    in_pieces(device, Middle, lambda i: (rand(i, sizes[i], 4),), len(sizes), min_replays=12)


class Sometimes(nn.Module):
    """Is refused for one of its signatures."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, peek: bool) -> Tensor:
        y = self.body(x)
        return y * y.sum().item() if peek else y


def test_each_signature_is_split_for_itself(device: torch.device, rand: Rand) -> None:
    arguments = lambda i: (rand(i, 3, 4), i % 2 == 0)  # noqa: E731
    fast = in_pieces(device, Sometimes, arguments, 14, 2, min_replays=8)
    assert {r.callable for r in fast.recordings} == {"Sometimes", "Sometimes.body"}


def test_train_and_eval(device: torch.device, rand: Rand) -> None:
    def step(model: Any, i: int) -> Tensor:
        model.train(i % 8 < 4)
        return summed(model, rand, i)

    fast = train(make(Middle, device), step, steps=24, recordings=None, on_refusal="split")
    assert pieces(fast) == {"first", "last"}
    assert replays(fast) >= 20


# Hooks, shared children, and what the children are.


def test_hooks_of_children_run_at_each_call(device: torch.device, rand: Rand) -> None:
    model = make(Middle, device).eval()
    fast, eager = split(model), copy.deepcopy(model)
    seen: list[object] = []
    for one in (model, eager):
        one.first.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        one.first.register_forward_hook(lambda m, args, y: (seen.append(m), y * 2)[1])
        one.last.register_forward_hook(lambda m, args, y: seen.append(float(y.sum())))
    for i in range(8):
        seen.clear()
        compare(fast, eager, lambda _: (rand(i, 6, 4),), 1)  # noqa: B023
        if i > 1:  # a capture of the whole ran the hooks once more
            assert seen[0] is model.first
            assert seen[2] is eager.first
            assert seen[1] == seen[3]
    assert pieces(fast) == {"first", "last"}
    assert replays(fast) >= 8


def test_backward_hooks_of_children(device: torch.device, rand: Rand) -> None:
    def step(model: Any, i: int) -> Any:
        grads: list[Any] = []
        handle = model.last.register_full_backward_hook(lambda m, gi, go: grads.append(gi[0]))
        summed(model, rand, i)
        handle.remove()
        return grads

    fast = train(make(Middle, device), step, steps=8, recordings=None, on_refusal="split")
    assert replays(fast) >= 8


class Shared(nn.Module):
    """One block twice, by two names and inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.again = self.block
        self.both = nn.Sequential(self.block, Block())
        self.plain = [self.block]

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.block(x)) * x.sum().item()
        return self.both(self.plain[0](x))


def test_a_shared_child_is_graphed_once(device: torch.device, rand: Rand) -> None:
    fast = in_pieces(device, Shared, rows(rand), 8, 2, min_replays=15)
    assert sorted(pieces(fast)) == ["block", "both"]
    step = lambda model, i: summed(model, rand, i)  # noqa: E731
    train(make(Shared, device), step, steps=8, recordings=None, on_refusal="split")


def test_tied_weights(device: torch.device, rand: Rand) -> None:
    """A weight of two pieces that the module itself uses too."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.block = Block()
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.block(self.embed(ids))
            x = x * x.mean().item() + self.head.weight[0]
            return self.head(x)

    def step(model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad(set_to_none=i % 3 > 0)
        for k in range(2):  # microbatches
            y = model(rand(10 * i + k, 6, dtype=torch.long))
            y.square().mean().backward()
        optimizer.step()
        return y

    program = Optimized(lambda p: torch.optim.AdamW(p, lr=0.01), step)
    fast = train(make(Tied, device), program, steps=10, recordings=None, on_refusal="split")
    assert pieces(fast) == {"embed", "block", "head"}
    direct = copy.deepcopy(fast.__graphed__.fn.module), copy.deepcopy(fast.__graphed__.fn.module)
    direct[0].zero_grad()
    direct[1].zero_grad()
    other = ol.graph(direct[1], warmup=1, on_refusal="split", gradients="direct")
    for i in range(8):  # the same terms, in another order
        for model in (direct[0], other):
            model(rand(i, 6, dtype=torch.long)).square().mean().backward()
        for p, q in zip(direct[0].parameters(), direct[1].parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


class Encoded(nn.Module):
    """Calls a method of its child, which calls the child's children."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()

    def forward(self, x: Tensor) -> Tensor:
        y = self.coder.encode(x)
        return y * y.sum().item() + torch.relu(self.coder.blocks[1].up(x))[:, :4]


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.encode(x))


def test_a_child_called_by_another_method(device: torch.device, rand: Rand) -> None:
    """Its method runs as it is, and what that calls is graphed."""
    fast = in_pieces(device, Encoded, rows(rand), 12, 2, min_replays=8)
    assert pieces(fast) == {"coder.blocks.0", "coder.blocks.1.up"}


def test_a_child_that_is_called_late(device: torch.device, rand: Rand) -> None:
    arguments = lambda i: (rand(i, 6, 4) + (10 if i < 6 else -10),)  # noqa: E731
    fast = in_pieces(device, EarlyExit, arguments, 14, min_replays=14)
    assert pieces(fast) == {"out", *(f"layers.{i}" for i in range(4))}


def test_a_child_without_children_that_is_refused(device: torch.device, rand: Rand) -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    kind = lambda: nn.Sequential(Block(), Leaf(), Block())  # noqa: E731
    fast = in_pieces(device, kind, rows(rand), 10, 2, min_replays=10)
    assert [one.module for one in fast.stats().split] == ["Sequential", "Sequential.1"]


def test_a_child_that_is_graphed_already(device: torch.device, rand: Rand) -> None:
    def graph_child(i: int, model: Any) -> None:
        if i == 0:
            model.first = ol.graph(model.first, warmup=1)

    fast = in_pieces(device, Middle, rows(rand), min_replays=4, between=graph_child)
    assert pieces(fast) == {"last"}
    assert replays(fast.first) >= 4


# State.


def test_the_original_is_as_it_was(device: torch.device, rand: Rand) -> None:
    model = make(Middle, device).eval()
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    fast = split(model)
    run(fast, rand)
    after = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    assert after == before
    assert fast.first is model.first
    assert list(fast.state_dict()) == list(model.state_dict())


def test_the_forwards_are_as_they_were_after_an_error(device: torch.device, rand: Rand) -> None:
    class Picky(Middle):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x[0, 0].item() > 1e6:
                raise ValueError("too large")
            return y

    model = make(Picky, device).eval()
    fast = split(model)
    run(fast, rand)
    with torch.no_grad():
        with pytest.raises(ValueError, match="too large"):
            fast(torch.full((6, 4), 1e7, device=device))
        assert "forward" not in vars(model.first)
        assert_same(fast(rand(1, 6, 4)), copy.deepcopy(model)(rand(1, 6, 4)))


def test_a_state_dict_goes_round(device: torch.device, rand: Rand) -> None:
    fast, other = middle(device), make(Middle, device).eval()
    run(fast, rand)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    count = len(fast.recordings)
    for assign in (False, True):
        fast.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        compare(fast, other, rows(rand), 5)
        assert len(fast.recordings) == count


def test_moved_and_replaced(device: torch.device, rand: Rand) -> None:
    model = make(Middle, device).eval()
    fast, eager = split(model), copy.deepcopy(model)

    def same(dtype: torch.dtype = torch.float32) -> None:
        compare(fast, eager, lambda i: (rand(i, 6, 4, dtype=dtype),), 6)

    same()
    assert fast.double() is fast
    eager.double()
    same(torch.float64)
    fast.float()
    eager.float()
    same()
    torch.manual_seed(9)
    new = Block().to(device)
    for one in (fast, eager):
        one.last[2] = new
    same()
    for one in (fast, eager):
        one.last = new
    same()
    assert pieces(fast) == {"first", "last"}
    for one in (fast, eager):
        one.first.forward = lambda x: x + 1
    same()
    assert vars(model.first)["forward"](1) == 2
    for one in (model, eager):
        del one.first.forward
    same()


def test_deepcopy_starts_anew(device: torch.device, rand: Rand) -> None:
    fast = middle(device, max_recordings=7)
    run(fast, rand)
    twin = copy.deepcopy(fast)
    assert twin.recordings == []
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    compare(twin, copy.deepcopy(twin.__graphed__.fn.module), rows(rand))
    assert pieces(twin) == pieces(fast) == {"first", "last"}


@on_cpu_and_cuda
def test_pickle_gives_the_module(device: torch.device, rand: Rand) -> None:
    fast = middle(device)
    run(fast, rand)
    loaded = pickle.loads(pickle.dumps(fast))
    assert type(loaded) is Middle
    with torch.no_grad():
        assert_same(loaded(rand(0, 6, 4)), fast(rand(0, 6, 4)))


@pytest.mark.cpu
def test_reset_frees_the_pieces(device: torch.device, rand: Rand) -> None:
    fast = middle(device)
    run(fast, rand)
    assert fast.memory_bytes > 0 or device.type == "cpu"
    fast.reset()
    assert (fast.recordings, fast.memory_bytes, fast.stats().split) == ([], 0, ())
    run(fast, rand)
    assert pieces(fast) == {"first", "last"}


def test_a_pool_counts_each_recording_once(device: torch.device, rand: Rand) -> None:
    pool = ol.Pool()
    fast = middle(device, pool=pool)
    run(fast, rand)
    assert len(pool.stats().recordings) == len(fast.recordings) == 2
    assert pool.stats().replays == fast.stats().replays


def test_threads(device: torch.device, rand: Rand) -> None:
    model = make(Middle, device).eval()
    fast, eager = split(model), copy.deepcopy(model)

    def serve(first: int) -> None:
        compare(fast, eager, lambda i: (rand(first + i, 6, 4),), 12)

    in_threads(*(functools.partial(serve, 100 * n) for n in range(3)))
    assert "forward" not in vars(model.first)


# Options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"buckets": ol.Buckets(dim=0, sizes=(4, 8))}, "buckets"),
        ({"outputs": "static"}, "outputs='static'"),
        ({"on_mismatch": "raise"}, "on_mismatch='raise'"),
    ],
)
def test_options_that_pieces_cannot_keep(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ol.ArgumentError, match=words):
        ol.graph(nn.Linear(2, 2), on_refusal="split", **options)


@pytest.mark.parametrize(("kind", "code"), [(Middle, "OL101"), (Detector, "OL102")])
def test_refusals_of_modules_name_the_option(
    device: torch.device, rand: Rand, kind: Any, code: str
) -> None:
    model = make(kind, device).eval()
    with torch.no_grad(), pytest.raises(ol.CaptureError, match='on_refusal="split"') as named:
        run(ol.graph(model), rand)
    assert named.value.code == code
    with torch.no_grad(), pytest.raises(ol.CaptureError, match='on_refusal="split"'):
        ol.graph(model).capture(rand(0, 6, 4))
    with torch.no_grad(), pytest.raises(ol.CaptureError, match="call the module"):
        ol.graph(model, on_refusal="split").capture(rand(0, 6, 4))
    with torch.no_grad(), pytest.raises(ol.CaptureError) as caught:
        run(ol.graph(lambda x: x * x.sum().item()), rand)
    assert "on_refusal" not in caught.value.fix


def test_a_state_of_python_in_the_module_that_runs_as_it_is(
    device: torch.device, rand: Rand
) -> None:
    class Counting(Middle):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.history: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = super().forward(x)
            self.history.append(float(y[0, 0]))
            return y

    fast, eager = split(make(Counting, device).eval()), make(Counting, device).eval()
    for i in range(8):
        compare(fast, eager, lambda _: (rand(i, 6, 4),), 1)  # noqa: B023
        assert fast.calls == eager.calls
    assert fast.history == eager.history


@pytest.mark.parametrize("training", [False, True])
def test_numbers_drawn_on_the_host(device: torch.device, rand: Rand, training: bool) -> None:
    """Layers are dropped by Python's and NumPy's generators, which go on as in eager."""

    class Dropping(EarlyExit):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2 if numpy.random.rand() < 0.5 else x
            for layer in self.layers:
                if random.random() < 0.7:
                    x = layer(x)
            return self.out(x)

    seen: list[Any] = []
    for graphed in (False, True):
        model: Any = make(Dropping, device).train(training)
        model = split(model) if graphed else model
        random.seed(0)
        numpy.random.seed(0)
        results: list[Tensor] = []
        for i in range(16):
            with torch.set_grad_enabled(training):
                results.append(model(rand(i, 6, 4)))
            if training:
                results[-1].sum().backward()
        grads = [p.grad for p in model.parameters()]
        seen.append((results, grads, random.random(), numpy.random.rand()))
    assert_same(seen[1], seen[0])
    assert replays(model) >= 16


def test_an_argument_that_requires_grad_is_written(device: torch.device, rand: Rand) -> None:
    """Such a piece runs as it is, and its children do not."""

    class Masking(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 0
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.second = Masking(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) * x.sum().item()

    step = lambda model, i: summed(model, rand, i)  # noqa: E731
    fast = train(make(Net, device), step, steps=10, recordings=3, on_refusal="split")
    assert pieces(fast) == {"first", "second.0", "second.1"}


def test_inside_of_another_graph_it_is_inlined(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(make(Whole, device).eval(), warmup=1, on_refusal="split")
    outer = ol.graph(lambda x: fast(x) * 2, warmup=1)
    run(outer, rand)
    assert replays(outer) >= 5
    assert fast.recordings == []


class Collecting(nn.Module):
    """Keeps what each child gave, as a model that returns its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        kept = [x := layer(x) for layer in self.layers]
        return [y * float(kept[-1].amax()) for y in kept] + kept


def test_results_between_pieces_are_fresh(device: torch.device, rand: Rand) -> None:
    eager, fast = make(Collecting, device), ol.graph(make(Collecting, device), on_refusal="split")
    with torch.no_grad():
        got = [fast(rand(i, 6, 4)) for i in range(8)]
        for i, results in enumerate(got):
            assert_same(results, eager(rand(i, 6, 4)), f"call {i}")
    assert replays(fast) >= 6


def test_a_function_that_makes_a_tensor_of_numbers(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3).to(device)

    def f(x: Tensor) -> Tensor:
        h = layer(x) * torch.tensor([1.0, 2.0, 3.0], device=device)
        return h / max(h.sum().item(), 1.0)

    fast = ol.graph(f, on_refusal="split")
    compare(fast, f, lambda i: (rand(i, 2, 3),))
    assert replays(fast) >= 1

"""Table of calls: host tensors, host reads and shapes that depend on data."""

from __future__ import annotations

import pathlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    Rand,
    alike,
    assert_same,
    drop_in,
    drop_in_worlds,
    on_accelerators,
    on_cuda,
    random_tensor,
    refused,
    replays,
    right_or_refused,
)

FILE = pathlib.Path(__file__).name


# Tensors of the host.


@on_accelerators
def test_a_host_scalar_argument_is_read_at_each_call(rand: Rand) -> None:
    drop_in(lambda x, s: x * s + s, lambda i: (rand(i, 3), torch.tensor(float(i))))


@on_accelerators
def test_a_host_scalar_argument_of_each_dtype(rand: Rand) -> None:
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float16):
        drop_in(lambda x, s: x + s, lambda i, d=dtype: (rand(i, 3), torch.tensor(i % 3, dtype=d)))


@on_accelerators
@pytest.mark.usefixtures("compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, of a copy on the device
@pytest.mark.parametrize("compile", [False, True])
def test_a_host_scalar_argument_that_requires_grad_is_refused(rand: Rand, compile: bool) -> None:
    """Its gradient would have to be copied back. On the device, as the message says, it works."""

    def f(x: Tensor, s: Tensor) -> Tensor:
        return (x * s).sum()

    fast = ol.graph(f, compile=compile)
    leaf = torch.tensor(2.0, requires_grad=True)
    for i in range(3):
        fast(rand(i, 3), leaf)
    with pytest.raises(ol.CaptureError, match="its gradient back") as caught:
        fast(rand(3, 3), leaf)
    assert caught.value.code == "OL103"
    for i in range(6):
        x = rand(i, 3)
        s = torch.tensor(0.5, device=x.device, requires_grad=True)
        fast(x, s).backward()
        torch.testing.assert_close(s.grad, x.sum())
    assert fast.recordings


@on_accelerators
def test_a_host_argument_copied_to_the_device_is_refused(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, ids: Tensor) -> Tensor:
        return x + ids.to(x.device)  # the line

    check_refused(f, (rand(0, 3), torch.arange(3.0)), "OL103", "ids.to(x.device)  # the line")


@on_accelerators
def test_a_host_tensor_that_stays_on_the_host_is_never_frozen(rand: Rand) -> None:
    world = (lambda x, h: (x * 2, h * 2), lambda i: (rand(i, 3), torch.full((3,), float(i))))
    right_or_refused(lambda: world, "OL103", "OL104", "OL108")


@on_accelerators
def test_a_host_tensor_written_inside_is_refused(rand: Rand) -> None:
    def world() -> Any:
        counter = torch.zeros(3)

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            counter.add_(1)
            return x * 2, counter

        return f, lambda i: (rand(i, 3),)

    assert right_or_refused(world, "OL103", "OL104", "OL108") is not None


# Host reads, and shapes that depend on data.


def check_refused(f: Any, args: tuple[Any, ...], code: str, source: str) -> None:
    """Refused at the capturing call, with file, line and source; nothing is different after."""
    expected = f(*args) if not isinstance(f, nn.Module) else None
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(*args)
        rng = torch.get_rng_state()
        with pytest.raises(ol.CaptureError) as caught:
            fast(*args)
        assert torch.equal(torch.get_rng_state(), rng)
        error = caught.value
        assert error.code == code, str(error)
        assert error.where is not None
        assert FILE in error.where
        assert source.strip() in error.where, error.where
        with pytest.raises(ol.CaptureError):
            fast(*args)
        assert len(fast.recordings) == 0
        # Eager work and another capture go on.
        other = ol.graph(lambda x: x + 1, warmup=1)
        alike(lambda x: other(x.to(args[0])), lambda x: x.to(args[0]) + 1, random_tensor, 3)
        assert replays(other) > 0
        if expected is not None:
            assert_same(f(*args), expected)


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # branch
        return x
    return x * 2


def loop(x: Tensor) -> Tensor:
    while x.sum() < 100:  # loop
        x = x.abs() + 1
    return x


def printed(x: Tensor) -> Tensor:
    text = str(x)  # printed
    return x * len(text)


# Each line is named by its comment.
HOST_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x[0].item(),  # item
    "float": lambda x: x * float(x[0]),  # float
    "int": lambda x: x[: int(x.abs().sum()) % 2 + 1],  # int
    "index": lambda x: x * [1, 2, 3][x.long().sum().remainder(3)],  # index
    "branch": branch,
    "loop": loop,
    "tolist": lambda x: x * x.tolist()[0],  # tolist
    "equal": lambda x: x * (2 if torch.equal(x, x + 1) else 3),  # equal
    "allclose": lambda x: x * (2 if torch.allclose(x, x + 1) else 3),  # allclose
    "printed": printed,
}
DATA_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "nonzero": lambda x: x.nonzero(),  # nonzero
    "mask": lambda x: x[x > 0],  # mask
    "masked_select": lambda x: torch.masked_select(x, x > 0),  # masked_select
    "unique": lambda x: torch.unique(x),  # unique
    "where": lambda x: torch.where(x > 0)[0],  # where
    "repeat_interleave": lambda x: x.repeat_interleave(x.abs().long()),  # repeat_interleave
}


@pytest.mark.parametrize("name", [*HOST_READS, *DATA_SHAPES])
def test_a_read_or_a_shape_of_data_is_refused_with_its_line(rand: Rand, name: str) -> None:
    code = "OL101" if name in HOST_READS else "OL102"
    check_refused((HOST_READS | DATA_SHAPES)[name], (rand(0, 3),), code, f"# {name}")


def test_what_is_written_in_place_of_a_ring_in_python_is_graphed(
    device: torch.device, rand: Rand
) -> None:
    """Each refusal on the way names the next step, and the last one works."""

    def ring(place: Any, write: Callable[[Tensor, Any, Tensor], object], on: Any) -> Any:
        rows, at = torch.zeros(4, 3, device=device), [place]

        def remember(row: Tensor) -> Tensor:
            write(rows, at[0], row)
            on(at)
            return rows.sum(0)

        return remember

    def fix_of(fn: Any, code: str) -> str:
        fast = ol.graph(fn, warmup=1)
        with torch.no_grad(), pytest.raises(ol.CaptureError) as caught:
            list(map(fast, [rand(i, 3) for i in range(30)]))
        assert caught.value.code == code
        return caught.value.fix

    def count(at: list[Any]) -> None:
        at[0] += 1

    def turn(at: list[Any]) -> None:
        at[0].add_(1).remainder_(4)

    def assign(rows: Tensor, at: Any, row: Tensor) -> None:
        rows[at % 4] = row

    zero = torch.zeros((), dtype=torch.long, device=device)
    fix = fix_of(ring(0, assign, count), "OL118")
    assert "a tensor that is changed in place" in fix
    assert "pass it as a 0-dim tensor" in fix
    fix = fix_of(ring(zero.clone(), assign, turn), "OL101")
    assert "x[i.view(1)] = y" in fix

    def copy(rows: Tensor, at: Tensor, row: Tensor) -> None:
        rows.index_copy_(0, at.view(1), row[None])

    drop_in_worlds(lambda: (ring(zero.clone(), copy, turn), lambda i: (rand(i, 3),)), calls=12)


def test_one_hot_is_named_where_it_reads_its_argument(device: torch.device) -> None:
    kinds = torch.tensor([2, 0, 1], device=device)
    fast = ol.graph(torch.nn.functional.one_hot, warmup=1)
    with torch.no_grad():
        error = refused(fast, kinds, match="`one_hot` reads its argument")
    assert error.code == "OL101"
    written = eval(f"lambda i, n: {error.fix}", {"torch": torch})
    assert_same(written(kinds, 3), torch.nn.functional.one_hot(kinds, 3))


TAGGED = {
    torch.Tag.cudagraph_unsafe: "OL109",
    torch.Tag.dynamic_output_shape: "OL102",
    torch.Tag.data_dependent_output: "OL101",
}


@pytest.mark.parametrize("tag", TAGGED, ids=lambda tag: tag.name)
def test_operators_of_other_libraries_are_refused_by_their_tags(
    tag: torch.Tag, device: torch.device, rand: Rand
) -> None:
    with torch.library._scoped_library("onelaunch_tags", "DEF") as library:
        for name, given in (("of", "Tensor x, int n"), ("made", "int n, Device device")):
            library.define(f"{name}({given}) -> Tensor", tags=(tag,))
        library.impl("of", lambda x, n: x + n, "CompositeExplicitAutograd")
        library.impl("made", lambda n, device: torch.ones(n, device=device), "BackendSelect")

        def made_of(x: Tensor) -> Tensor:
            y = x * 2
            return torch.ops.onelaunch_tags.of(y, 3).relu()  # of a tensor

        def made(x: Tensor) -> Tensor:
            return torch.ops.onelaunch_tags.made(3, x.device) + x  # of none

        for f, line in ((made_of, "# of a tensor"), (made, "# of none")):
            check_refused(f, (rand(0, 3),), TAGGED[tag], line)
            (found,) = [
                finding
                for finding in ol.diagnose(f, (rand(0, 3),)).findings
                if finding.severity == "blocks-capture"
            ]
            assert found.code == TAGGED[tag]
            assert found.source.endswith(line)
            assert f"is tagged `{tag.name}`" in found.what
            assert {"run", "capture"} <= set(found.found_by)


def test_where_names_file_and_line(rand: Rand) -> None:
    with torch.no_grad():
        error = refused(ol.graph(branch, warmup=1), rand(0, 3))
    assert f"{FILE}:{branch.__code__.co_firstlineno + 1}" in str(error.where)


def test_the_line_is_the_users_not_a_librarys(device: torch.device, rand: Rand) -> None:
    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.max().item()  # deep in a module

    model = nn.Sequential(nn.Identity(), nn.Sequential(Peeks()))
    check_refused(model, (rand(0, 3),), "OL101", "# deep in a module")


def test_a_refusal_caught_by_the_callable_is_still_a_refusal(rand: Rand) -> None:
    """`try: x.item() except: ...` takes another branch under capture than it takes eagerly."""

    def f(x: Tensor) -> Tensor:
        try:
            scale = x[0].item()
        except Exception:  # noqa: BLE001 - what a careless callable does
            scale = 0.0
        return x * scale

    assert right_or_refused(lambda: (f, lambda i: (rand(i, 3),)), "OL101") == "OL101"


def test_on_refusal_eager_warns_once_and_stays_right(rand: Rand) -> None:
    fast = ol.graph(branch, warmup=1, on_refusal="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alike(fast, branch, rand, 3, calls=8)
    (message,) = [str(w.message) for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert "OL101" in message
    assert "# branch" in message
    assert len(fast.recordings) == 0


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_on_refusal_eager_is_per_signature(rand: Rand) -> None:
    def f(x: Tensor, peek: bool) -> Tensor:
        return x * x[0].item() if peek else x * 2

    drop_in(f, lambda i: (rand(i, 3), bool(i % 2)), calls=8, on_refusal="eager", min_replays=3)


@pytest.mark.parametrize("way", ["raise", "eager", "split"])
@pytest.mark.parametrize("what", ["a read", "a draw"])
@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_what_is_refused_in_training_is_captured_in_inference(
    device: torch.device, rand: Rand, way: Any, what: str
) -> None:
    """Layers left out at random, say, as they are in training alone; and again after both."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x * (x.sum().item() if what == "a read" else random.random())
            return self.layer(x)

    model = Dropping().to(device)
    fast = ol.graph(model, warmup=1, on_refusal=way)
    with torch.no_grad():
        for training in (True, False, True, False):
            fast.train(training)
            before = replays(fast)
            codes: set[str] = set()
            for i in range(6):
                try:
                    y = fast(rand(i, 2, 4))
                except ol.CaptureError as error:
                    codes.add(error.code)
                    continue
                if not training:
                    assert_same(y, model.layer(rand(i, 2, 4)))
            code = "OL101" if what == "a read" else "OL117"
            assert codes == ({code} if training and way == "raise" else set())
            assert training or replays(fast) - before >= 4


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("put", ["tensors", "tensors and None", "numbers", "dict", "popped"])
def test_a_refused_capture_leaves_containers_as_they_were(rand: Rand, put: str) -> None:
    """What the attempt put into them, the call that then runs eagerly puts there once more."""
    held: dict[Any, Any] = {"list": [], "full": [torch.ones(3), 1, torch.ones(3)]}

    def f(x: Tensor) -> Tensor:
        y = x * 2
        if put == "dict":
            held["y"], held["n"] = y, 1
        elif put == "popped":
            held["full"].pop()
            held["full"].pop()
        else:
            first = {"tensors": y, "numbers": 1}.get(put)
            held["list"] += [first, first, y]
        return y * x.sum().item()

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    for i in range(5):
        held["list"], held["full"] = [], [torch.ones(3), 1, torch.ones(3)]
        held.pop("y", None)
        held.pop("n", None)
        with torch.no_grad():
            fast(rand(i, 3))
        assert len(held["list"]) == (0 if put in ("dict", "popped") else 3), f"call {i}"
        assert len(held["full"]) == (1 if put == "popped" else 3), f"call {i}"
        assert ("y" in held, "n" in held) == (put == "dict", put == "dict"), f"call {i}"


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("way", ["raise", "eager", "split"])
def test_a_refused_capture_leaves_hooks_as_they_were(rand: Rand, way: Any) -> None:
    """peft adds some for a call: the function is in one dict, and how it is called in another."""

    def double(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "scale": 2.0}

    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    class Hooking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            handle = self.inner.register_forward_pre_hook(double, with_kwargs=True)
            y = self.inner(x)
            y = y * y.sum().item()
            handle.remove()
            return y

    model, eager = Hooking(), Hooking()
    fast = ol.graph(model, warmup=1, on_refusal=way)
    with torch.no_grad():
        for i in range(4):
            if way == "raise" and i:
                with pytest.raises(ol.CaptureError, match="OL101"):
                    fast(rand(i, 3))
            else:
                assert_same(fast(rand(i, 3)), eager(rand(i, 3)))
            assert not model.inner._forward_pre_hooks
            assert not model.inner._forward_pre_hooks_with_kwargs


@on_cuda
def test_a_grouped_product_in_float32(device: torch.device, rand: Rand) -> None:
    """CUDA's kernel is of half precision; for others torch reads the offsets on the host."""
    offsets = torch.tensor([8, 16], device=device, dtype=torch.int32)
    weights = rand(9, 2, 32, 16)

    def f(x: Tensor) -> Tensor:
        return nn.functional.grouped_mm(x, weights.to(x.dtype), offs=offsets)

    fast = ol.graph(f)
    message = r"OL109(.|\n)*batched_mm"
    with pytest.raises(ol.CaptureError, match=message):
        _ = [fast(rand(i, 16, 32)) for i in range(4)]
    for i in range(5):
        x = rand(i, 16, 32).bfloat16()
        assert_same(fast(x), f(x))
    assert replays(fast) >= 2

"""The signature of a call: what it says of tensors and of torch's modes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onelaunch.call.ambient import MODES, ambient, default_device, modes
from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import flatten_call

SIZES = st.lists(st.integers(0, 3), max_size=3)
CPU = torch.device("cpu")


def spec_of(*args: Any, **kwargs: Any) -> CallSpec:
    flat = flatten_call(args, kwargs)
    return CallSpec(
        flat.tree, tuple(TensorSpec.of(t) for t in flat.tensors), (), modes(), default_device()
    )


@given(SIZES, st.sampled_from([torch.float32, torch.int8, torch.complex64]), st.booleans())
def test_equal_specs_have_equal_hashes(sizes: list[int], dtype: torch.dtype, flip: bool) -> None:
    def make() -> Tensor:
        t = torch.zeros(sizes, dtype=dtype)
        return t.transpose(0, -1) if flip and sizes else t

    a, b = spec_of(make(), k=[make(), 1]), spec_of(make(), k=[make(), 1])
    assert a == b
    assert hash(a) == hash(b)


@given(SIZES, st.permutations(range(3)), st.integers(1, 2))
def test_dense_is_one_run_of_memory(sizes: list[int], order: list[int], step: int) -> None:
    t = torch.zeros(sizes)
    if len(sizes) == 3:
        t = t.permute(order)
    if sizes:
        t = t[::step]
    spec = TensorSpec.of(t)
    places = torch.arange(64 * 4).as_strided(t.shape, t.stride()).flatten().tolist()
    assert spec.dense == (not places or sorted(places) == list(range(len(places))))
    assert spec.extent_bytes == (4 * (max(places) + 1) if places else 0)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.ones(3, 2),
    "stride": lambda: torch.ones(3, 2).t(),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.complex128),
    "device": lambda: torch.ones(2, 3, dtype=torch.complex64, device="meta"),
    "requires_grad": lambda: torch.ones(2, 3, dtype=torch.complex64, requires_grad=True),
    "conj": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2, 3, dtype=torch.complex64)),
    "kind": lambda: torch.nn.Parameter(
        torch.ones(2, 3, dtype=torch.complex64), requires_grad=False
    ),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_tensor_that_differs_is_named(field: str) -> None:
    mine = spec_of(torch.ones(2, 3, dtype=torch.complex64))
    theirs = spec_of(OTHERS[field]())
    assert mine != theirs
    where, how = mine.difference(theirs, ["args[0]"])
    assert where.startswith("args[0]")
    assert how.startswith("captured ")
    if field not in ("shape", "stride"):
        assert where == f"args[0].{field}"


@pytest.mark.parametrize(
    ("mine", "theirs", "where", "how"),
    [
        (((1,), {}), ((2,), {}), "args[0]", "captured 1, got 2"),
        (((), {"k": 1}), ((), {"k": True}), "kwargs['k']", "captured 1, got True"),
        (((), {"k": 1}), ((), {"j": 1}), "kwargs", "captured keys ['k'], got ['j']"),
        ((([1],), {}), (((1,),), {}), "args[0]", "captured list of 1, got tuple of 1"),
        ((({"a": [0.5]},), {}), (({"a": [1.5]},), {}), "args[0]['a'][0]", "captured 0.5, got 1.5"),
        (((), {}), ((1,), {}), "args", "captured tuple of 0, got tuple of 1"),
    ],
)
def test_a_constant_that_differs_is_named(mine: Any, theirs: Any, where: str, how: str) -> None:
    first, second = spec_of(*mine[0], **mine[1]), spec_of(*theirs[0], **theirs[1])
    assert first.difference(second, []) == (where, how)


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def autocast(kind: str = "cpu", **options: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: torch.autocast(kind, **options)


@contextlib.contextmanager
def on(kind: str) -> Any:
    """Autocast of a device that there may not be."""
    torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, False)


CACHE = ("autocast", "captured cache_enabled=True, got cache_enabled=False")
NAMED: dict[str, tuple[Callable[[], AbstractContextManager[object]], tuple[str, str]]] = {
    "cudnn": (
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
        ("cudnn.benchmark", "captured False, got True"),
    ),
    "device": (lambda: torch.device("meta"), ("default device", "captured cpu, got meta")),
    "grad": (torch.no_grad, ("grad mode", "captured True, got False")),
    "autocast": (autocast(), ("autocast on cpu", "captured off, got on")),
    "its dtype": (
        autocast(dtype=torch.float16, enabled=False),
        ("autocast on cpu", "captured bfloat16, got float16"),
    ),
    "its cache": (autocast(cache_enabled=False, enabled=False), CACHE),
    "dtype": (default_dtype, ("default dtype", "captured float32, got float64")),
} | {
    kind: (functools.partial(on, kind), (f"autocast on {kind}", "captured off, got on"))
    for kind in ("cpu", "cuda", "xpu", "hpu", "mps")
}


@pytest.mark.parametrize("name", NAMED)
def test_a_mode_that_differs_is_named(name: str) -> None:
    mode, expected = NAMED[name]
    x = torch.ones(2)
    mine = spec_of(x)
    with mode():
        theirs = spec_of(x)
        assert ambient() is None
    assert mine.difference(theirs, ["x"]) == expected
    assert len(mine.modes) == 1 + len(MODES)
    assert default_device() == CPU


def test_what_surrounds_a_call() -> None:
    assert ambient() is None
    with torch.autograd.forward_ad.dual_level():
        assert ambient() == "forward-mode AD is active"
    with torch.overrides.BaseTorchFunctionMode():
        assert ambient() == "a torch function mode is active"
    found: list[str | None] = []
    torch.func.vmap(lambda x: found.append(ambient()) or x)(torch.ones(2))
    assert found == ["a functorch transform is active"]

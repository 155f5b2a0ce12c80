"""Function modes of ours are one mode on torch's stack, and each sees what concerns it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onelaunch.driver.function_modes import UnnoticedMode, call


class Noting(UnnoticedMode):
    def __init__(self, seen: list[str], name: str, *concerns: Any) -> None:
        super().__init__()
        self.concerns = frozenset(concerns)
        self._seen, self._name = seen, name

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._seen.append(f"{self._name}:{func.__name__}")
        return call(func, types, args, kwargs)


class Theirs(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Kind(Tensor):
    """Its functions run under the modes, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            torch.sin(torch.ones(1))
            return func(*args, **(kwargs or {}))


def count() -> int:
    return torch._C._len_torch_function_stack()


def test_each_sees_what_concerns_it_from_the_innermost_outwards() -> None:
    seen: list[str] = []
    x = torch.ones(2)
    outer, inner = Noting(seen, "outer", torch.sin, torch.cos), Noting(seen, "inner", torch.sin)
    with outer:
        assert count() == 1
        with inner, Noting(seen, "innermost"):
            assert count() == 1
            torch.sin(x)
            torch.cos(x)
            torch.tan(x)
        assert count() == 1
        torch.sin(x)
    assert count() == 0
    assert seen == ["inner:sin", "outer:sin", "outer:cos", "outer:sin"]


def test_a_mode_of_the_users_between_them_stays_there() -> None:
    seen: list[str] = []
    with Noting(seen, "outer", torch.sin), Theirs(), Noting(seen, "inner", torch.sin):
        assert count() == 3
        torch.sin(torch.ones(1))
    assert count() == 0
    assert seen == ["inner:sin", "outer:sin"]


def test_they_are_on_in_functions_of_a_class_and_in_backwards() -> None:
    seen: list[str] = []
    leaf = torch.ones(1, requires_grad=True)
    with Noting(seen, "outer", torch.sin), Noting(seen, "inner", torch.sin):
        torch.cos(torch.ones(1).as_subclass(Kind))
        assert seen == ["inner:sin", "outer:sin"]
        y = leaf * 2
        y.register_hook(lambda g: torch.sin(g))
        y.backward()
    assert seen == ["inner:sin", "outer:sin"] * 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_function_leaves_none_on(error: type[BaseException]) -> None:
    class Raising(Noting):
        def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            raise error

    with pytest.raises(error), Noting([], "outer", torch.sin), Raising([], "inner", torch.sin):
        torch.sin(torch.ones(1))
    assert count() == 0

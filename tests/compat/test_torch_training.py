"""What whole training steps rely on in torch and do not find in its documentation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_C: Any = torch._C


def test_global_hooks_run_around_every_step() -> None:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: seen.append("before")),
        register_optimizer_step_post_hook(lambda o, a, k: seen.append("after")),
    ]

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            seen.append("own")

    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    try:
        SGD([p], lr=0.1).step()
        Own([p], {}).step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before", "after", "before", "own", "after"]
    SGD([p], lr=0.1).step()
    assert len(seen) == 5


def test_a_schedulers_wrapper_calls_the_hooks_too() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = SGD([p], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda o, a, k: seen.append(o))
    optimizer.step()
    handle.remove()
    assert seen == [optimizer]


def test_a_delayed_error_requires_grad_and_raises() -> None:
    leaf = torch.ones(3).requires_grad_()
    with torch.no_grad():
        spent = _C._functions.DelayedError("over", 1)(leaf)
    assert spent.requires_grad
    assert not spent.is_leaf
    assert spent.data_ptr() == leaf.data_ptr()
    with pytest.raises(RuntimeError, match="over"):
        spent.sum().backward()


def test_a_freed_graph_tells_at_the_node() -> None:
    w = torch.ones(3, requires_grad=True)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return 2 * g * ctx.saved_tensors[0]

    loss = Square.apply(w)
    assert isinstance(loss.grad_fn, torch.autograd.function.BackwardCFunction)
    loss.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        _ = loss.grad_fn.saved_tensors


def test_versions_are_counted_for_many_tensors_at_once() -> None:
    tensors = [torch.ones(2), nn.Parameter(torch.ones(1))]
    before = [t._version for t in tensors]
    _C._increment_version(tensors)
    assert [t._version for t in tensors] == [v + 1 for v in before]


def test_gradients_read_without_pythons_share() -> None:
    p = nn.Parameter(torch.ones(2))
    read = _C.TensorBase.grad.__get__
    assert read(p) is None
    p.grad = torch.ones(2)
    assert read(p) is p.grad


def test_the_names_that_optimizers_and_scalers_have() -> None:
    p = nn.Parameter(torch.ones(2))
    assert Adam([p], fused=True)._step_supports_amp_scaling
    assert not hasattr(Adam([p]), "_step_supports_amp_scaling")
    assert torch.amp.GradScaler._maybe_opt_step.__code__
    assert Counter(Adam([p]).param_groups[0].keys()) >= Counter(["lr", "capturable", "fused"])


def test_a_float_of_a_class_of_its_own_is_a_number() -> None:
    class Own(float):
        pass

    t = torch.ones(2)
    assert torch.equal(t.add(t, alpha=Own(2)), t * 3)
    assert torch.equal(t * Own(2), t * 2)
    torch._foreach_add_([t], [t.clone()], alpha=Own(3))
    assert t.tolist() == [4, 4]

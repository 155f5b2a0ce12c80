"""A callable with its arguments, and the copies of both that engines work on."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from onelaunch.call import tree

T = TypeVar("T")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    """A callable and the arguments of one call.

    Attributes:
        share_parameters: True if copies share its parameters, for a model that memory cannot hold
            many times; its buffers and its other state are still copied.
        results_on: the device of its results, if known; a callable may move its arguments.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    share_parameters: bool = False
    results_on: torch.device | None = None

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)

    @property
    def device(self) -> torch.device:
        """The device it runs on: the GPU if any argument, parameter, buffer or result is there."""
        devices = {t.device for t in self.tensors()}
        if self.results_on is not None:
            devices.add(self.results_on)
        accelerators = sorted((d for d in devices if d.type != "cpu"), key=str)
        return accelerators[0] if accelerators else torch.device("cpu")

    def tensors(self) -> Iterator[Tensor]:
        """List the tensors of the arguments, and of the modules behind the callable."""
        yield from tree.flatten((self.args, self.kwargs)).tensors
        yield from self.parameters()
        for part in parts(self.fn):
            if isinstance(part, nn.Module):
                yield from part.buffers()
            elif isinstance(part, Tensor):
                yield part

    def parameters(self) -> Iterator[nn.Parameter]:
        for part in parts(self.fn):
            if isinstance(part, nn.Module):
                yield from part.parameters()

    def copy(self) -> Workload:
        """Copy it to memory of its own: neither state nor arguments leak between engines."""
        shared = tuple(self.parameters()) if self.share_parameters else ()
        args, kwargs = self.copy_inputs()
        return replace(self, fn=own(self.fn, shared=shared), args=args, kwargs=kwargs)

    def copy_inputs(self, inputs: Inputs | None = None) -> Inputs:
        """Copy the arguments, or those given, to memory of their own."""
        return each_tensor(inputs or (self.args, self.kwargs), clone)

    def in_float64(self) -> Workload:
        """Copy it with every floating tensor as float64 (complex128).

        Raises:
            TypeError: a module behind the callable cannot be copied.
        """
        return self._changed(widen, lambda module: module.double())

    def on_the_host(self) -> Workload:
        """Copy it with all its tensors on the CPU.

        Raises:
            TypeError: a module behind the callable cannot be copied.
        """
        return self._changed(to_host, lambda module: module.cpu())

    def _changed(
        self, change: Callable[[Tensor], Tensor], change_module: Callable[[nn.Module], object]
    ) -> Workload:
        made = Workload(own(self.fn, change), *each_tensor((self.args, self.kwargs), change))
        originals = {id(part) for part in parts(self.fn)}
        for part in parts(made.fn):
            if isinstance(part, nn.Module):
                if id(part) in originals:
                    raise TypeError(f"{type(part).__name__} cannot be copied")
                change_module(part)
        return made

    def fresh(self, generator: torch.Generator) -> Inputs:
        """Make other arguments of the same shapes, dtypes, strides and range of values."""
        return each_tensor((self.args, self.kwargs), functools.partial(resample, generator))

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of its positional and keyword arguments in code."""
        count = len(self.args)
        return ["x"] if count == 1 else [f"x{i}" for i in range(count)], list(self.kwargs)

    @property
    def call_text(self) -> str:
        """The arguments as code: ``x`` or ``x0, x1, mask=mask``."""
        positional, keyword = self.names
        return ", ".join([*positional, *(f"{name}={name}" for name in keyword)])


def each_tensor(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Change each tensor of the arguments; one passed twice stays one tensor."""
    flat = tree.flatten(inputs)
    changed: dict[int, Tensor] = {}
    for tensor in flat.tensors:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    return tree.unflatten(flat.tree, [changed[id(t)] for t in flat.tensors])


def clone(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def to_host(t: Tensor) -> Tensor:
    return t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad)


def widen(t: Tensor) -> Tensor:
    """Copy `t` in the widest dtype of its kind; integers and booleans as they are."""
    if t.is_complex():
        wide = t.detach().to(torch.complex128, copy=True)
    elif t.is_floating_point():
        wide = t.detach().to(torch.float64, copy=True)
    else:
        wide = t.detach().clone()
    return wide.requires_grad_(t.requires_grad)


def resample(generator: torch.Generator, t: Tensor) -> Tensor:
    """Make other values that the callable should accept wherever it accepts `t`'s.

    Floats are drawn from the normal distribution of `t`'s mean and deviation and cut to its range,
    so that positive values stay positive; equal ones are jittered. Integers, booleans and masks are
    shuffled, so that indices stay in range.
    """
    if t.numel() == 0:
        return clone(t)
    flat = reals(t).to("cpu").reshape(-1)
    if is_data(t):
        wide = flat.double()
        noise = torch.randn(wide.shape, generator=generator, dtype=torch.float64, device="cpu")
        low, high = wide.aminmax()
        if low == high:
            new = wide + 0.1 * noise
        else:
            new = (wide.mean() + wide.std() * noise).clamp(low, high)
    else:
        new = flat[torch.randperm(flat.numel(), generator=generator, device="cpu")]
    return with_(t, new)


def is_data(t: Tensor) -> bool:
    """Return True if the numbers in `t` may be others: floats that are no mask.

    A mask holds infinities, or 0 and one other value.
    """
    if not (t.is_floating_point() or t.is_complex()) or t.numel() == 0:
        return False
    values = reals(t).double()
    if bool(values.isinf().any()):
        return False
    low, high = values.aminmax()
    two = bool(((values == low) | (values == high)).all()) and bool(low < high)
    return not (two and values.numel() > 2 and 0.0 in (float(low), float(high)))


def reals(t: Tensor) -> Tensor:
    """Return the values of `t` without autograd, complex ones as pairs."""
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def with_(t: Tensor, values: Tensor) -> Tensor:
    """Make a tensor like `t` with these values, laid out as `reals` gives them."""
    new = values.to(reals(t).dtype).reshape(reals(t).shape).to(t.device)
    result = t.detach().clone()
    result.copy_(torch.view_as_complex(new.contiguous()) if t.is_complex() else new)
    return result.requires_grad_(t.requires_grad)


def own(
    fn: Callable[..., Any],
    change: Callable[[Tensor], Tensor] = clone,
    shared: Sequence[Tensor] = (),
) -> Callable[..., Any]:
    """Copy `fn` with its state.

    A module or an object is copied deeply. A plain function is made anew around copies of what it
    closes over and of the modules and tensors among its globals (tensors passed through `change`).
    Objects that cannot be copied are shared, and so are those in `shared`.
    """
    memo: dict[int, Any] = {id(t): t for t in shared}
    if not isinstance(fn, types.FunctionType):
        return duplicate(fn, memo)
    names = global_state(fn)
    if not fn.__closure__ and not names:
        return fn

    def copied(held: object) -> Any:
        return change(held) if isinstance(held, Tensor) else duplicate(held, memo)

    cells = tuple(_own_cell(cell, copied) for cell in fn.__closure__ or ())
    outside = fn.__globals__
    if names:
        outside = outside | {name: copied(outside[name]) for name in names}
    made = types.FunctionType(fn.__code__, outside, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__qualname__ = fn.__qualname__
    return made


def _own_cell(cell: types.CellType, copied: Callable[[object], Any]) -> types.CellType:
    try:
        return types.CellType(copied(cell.cell_contents))
    except ValueError:  # an empty cell: a name that the function has not been given yet
        return cell


def global_state(fn: types.FunctionType) -> list[str]:
    """List the globals that a function names and that hold tensors."""
    return [
        name
        for name in fn.__code__.co_names
        if isinstance(fn.__globals__.get(name), (nn.Module, Tensor))
    ]


def duplicate(held: T, memo: dict[int, Any]) -> T:
    try:
        return copy.deepcopy(held, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        # A lock, a generator, a tensor in the middle of an autograd graph.
        return held


def parts(fn: Callable[..., Any]) -> Iterator[object]:
    """List the objects behind a callable that may hold state."""
    yield fn
    if isinstance(fn, functools.partial):
        partial = cast("functools.partial[Any]", fn)
        yield from parts(partial.func)
        yield from partial.args
        yield from partial.keywords.values()
    elif isinstance(fn, types.MethodType):
        yield fn.__self__
        yield from attributes(fn.__self__)
    elif isinstance(fn, types.FunctionType):
        yield from (fn.__globals__[name] for name in global_state(fn))
        for cell in fn.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue
    else:
        yield from attributes(fn)


def attributes(holder: object) -> list[object]:
    """List the attributes of an object that is no module: a pipeline around a model, say."""
    return [] if isinstance(holder, nn.Module) else list(getattr(holder, "__dict__", {}).values())

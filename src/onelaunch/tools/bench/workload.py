"""A callable with its arguments, and the copies of both that engines work on."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pickle import PickleError
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onelaunch.call import tree
from onelaunch.errors import bad, describe_type
from onelaunch.state.hooks import read_hooks, read_last_hooks

T = TypeVar("T")
P = ParamSpec("P")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
OnProgress = Callable[[str, float], None]
"""A function that takes the present step, as a text, and the part of the work done: 0 to 1."""


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
    kwargs: dict[str, Any] = field(default_factory=dict)
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

    def roots(self) -> list[tuple[str, object]]:
        """Return the names and objects that a walk over its state begins at."""
        return [("", self.fn), ("args", self.args), ("kwargs", self.kwargs)]

    def copy(self) -> Workload:
        """Copy it to memory of its own: neither state nor arguments leak between engines."""
        shared = tuple(self.parameters()) if self.share_parameters else ()
        args, kwargs = self.copy_inputs()
        return replace(self, fn=own(self.fn, shared=shared), args=args, kwargs=kwargs)

    def copy_inputs(self, inputs: Inputs | None = None) -> Inputs:
        """Copy the arguments, or those given, to memory of their own; objects too."""
        given = inputs or (self.args, self.kwargs)
        memo: dict[int, Any] = {id(t): clone(t) for t in tree.flatten(given).tensors}
        return duplicate(given, memo)

    def cut_history(self) -> None:
        """Let autograd begin at the arguments again, which a call before has written in place; of
        a copy alone."""
        for t in tree.flatten((self.args, self.kwargs)).tensors:
            if t.grad_fn is not None and not t._is_view():
                values = t.detach().clone().requires_grad_()
                with torch.enable_grad():
                    t.detach_().copy_(values)

    def in_float64(self) -> Workload:
        """Copy it with every floating tensor as float64 (complex128).

        Raises:
            TypeError: a module behind the callable cannot be copied.
        """
        return self._changed(widen, lambda module: module.double())

    def on(self, device: torch.device) -> Workload:
        """Copy it to a device: its arguments and the tensors it holds; of its modules what `.to()`
        moves.

        Raises:
            TypeError: a module behind the callable cannot be copied.
        """
        return self._changed(lambda t: to(t, device), lambda module: module.to(device))

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

    @property
    def args_text(self) -> str:
        """The tuple of the positional arguments as code: ``(x,)``."""
        names, _ = self.names
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"

    @property
    def kwargs_text(self) -> str:
        """The dict of the keyword arguments as code: ``{"mask": mask}``."""
        _, names = self.names
        given = ", ".join(f'"{name}": {name}' for name in names)
        return f"{{{given}}}"


def each_tensor(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Change each tensor of the arguments. A tensor that is passed twice stays one tensor; objects,
    such as a cache, are copied."""
    flat = tree.flatten(inputs)
    changed: dict[int, Tensor] = {}
    for tensor in flat.tensors:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    made = tree.unflatten(flat.tree, [changed[id(t)] for t in flat.tensors])
    return duplicate(made, {id(t): t for t in changed.values()})


def clone(t: Tensor) -> Tensor:
    return graded_as(t, t.detach().clone())


def to(t: Tensor, device: torch.device) -> Tensor:
    return graded_as(t, t.detach().to(device, copy=True))


def graded_as(t: Tensor, made: Tensor) -> Tensor:
    """Let a copy require grad as `t` does: as a leaf, or as the result of an operation, which
    unlike a leaf can be written in place."""
    made.requires_grad_(t.requires_grad)
    if t.is_leaf or torch.is_inference_mode_enabled():
        return made
    with torch.enable_grad():
        return made.clone()


def widen(t: Tensor) -> Tensor:
    """Copy `t` in the widest dtype of its kind; integers and booleans as they are."""
    real = torch.float64 if t.is_floating_point() else t.dtype
    dtype = torch.complex128 if t.is_complex() else real
    return graded_as(t, t.detach().to(dtype, copy=True))


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
    """Make a tensor like `t` with other values, laid out as the result of `reals`."""
    new = values.to(reals(t).dtype).reshape(reals(t).shape).to(t.device)
    result = t.detach().clone()
    result.copy_(torch.view_as_complex(new.contiguous()) if t.is_complex() else new)
    return graded_as(t, result)


def own(
    fn: Callable[..., Any],
    change: Callable[[Tensor], Tensor] = clone,
    shared: Sequence[Tensor] = (),
) -> Callable[..., Any]:
    """Copy `fn` with its state.

    A module or an object is copied deeply. A plain function is made anew around copies of its
    closure, and of its globals that hold tensors, such as functions of its file. Each tensor is
    passed through `change`. Objects that cannot be copied are shared, and so is `shared`.
    """
    memo: dict[int, Any] = {id(t): t for t in shared}
    if isinstance(fn, types.FunctionType):
        return _own_function(fn, change, memo)
    return duplicate(fn, memo)


def _own_function(
    fn: types.FunctionType, change: Callable[[Tensor], Tensor], memo: dict[int, Any]
) -> types.FunctionType:
    if id(fn) in memo:
        return memo[id(fn)]
    names = global_state(fn)
    if not fn.__closure__ and not names:
        return fn

    def copied(held: object) -> Any:
        if id(held) not in memo and isinstance(held, Tensor):
            memo[id(held)] = change(held)
            _copy_hooks(held, memo[id(held)], memo)
        if isinstance(held, types.FunctionType):
            return _own_function(held, change, memo)
        return duplicate(held, memo)

    # One namespace for all functions of a module: what one of them stores, the others see.
    outside: dict[str, Any] = memo.setdefault(id(fn.__globals__), dict(fn.__globals__))
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    made = types.FunctionType(fn.__code__, outside, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__qualname__ = fn.__qualname__
    made.__dict__.update(fn.__dict__)
    memo[id(fn)] = made  # before what it holds is copied: it may hold itself
    for cell, source in zip(cells, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # empty: a name that the function has not been given yet
            cell.cell_contents = copied(source.cell_contents)
    for name in names:
        outside[name] = copied(fn.__globals__[name])
    return made


def global_state(fn: types.FunctionType) -> list[str]:
    """List the globals that a function names and that hold tensors: modules, optimizers, their
    containers and owners. Functions of its own file are listed too, as they may hold tensors."""
    found = ((name, fn.__globals__.get(name)) for name in dict.fromkeys(_names(fn.__code__)))
    return [name for name, value in found if _holds(value, fn)]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _holds(value: object, fn: types.FunctionType) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__globals__ is fn.__globals__
    if isinstance(value, _STATE):
        return True
    if isinstance(value, type | types.ModuleType):
        return False
    inside: Iterable[Any] = tree.flatten(value).tensors if isinstance(value, list | dict) else ()
    return any(isinstance(held, _STATE) for held in (*inside, *vars_of(value).values()))


_STATE = (Tensor, nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


def vars_of(holder: object) -> dict[str, Any]:
    """Return the attributes of an object; none if it has no dict of them."""
    return getattr(holder, "__dict__", {})


def duplicate(held: T, memo: dict[int, Any]) -> T:
    """Copy an object deeply; what cannot be copied is shared.

    Args:
        memo: as for `copy.deepcopy`.
    """
    try:
        with warnings.catch_warnings():
            # Python 3.14 copies no iterators; until then they are copied.
            warnings.filterwarnings("ignore", "Pickle, copy, and deepcopy", DeprecationWarning)
            made = copy.deepcopy(held, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError, PickleError):
        # A lock, a generator, a tensor in the middle of an autograd graph.
        return held
    for source in list(memo.get(id(memo), [])):  # `deepcopy` keeps all that it has copied
        if isinstance(source, Tensor):
            _copy_hooks(source, memo[id(source)], memo)
        if isinstance(source, Optimizer):  # it hands out its state alone, for files
            given, own_vars = vars(source), vars(memo[id(source)])
            missing = given.keys() - own_vars.keys() - {"step"}
            own_vars.update({name: copy.deepcopy(given[name], memo) for name in missing})
            for name in _STEP_HOOKS:
                hooks = given.get(name, {}).items()
                own_vars[name] = OrderedDict((key, _own_hook(hook, memo)) for key, hook in hooks)
    return made


def _copy_hooks(source: Tensor, made: Tensor, memo: dict[int, Any]) -> None:
    """Give a copy of a leaf the leaf's hooks, with copies of the objects that the hooks hold:
    `deepcopy` leaves hooks out."""
    known = -id(source)  # no id; what a hook holds may have the hook
    if known in memo or not (source.is_leaf and made.is_leaf and made.requires_grad):
        return
    memo[known] = True
    for read, register in (
        (read_hooks, Tensor.register_hook),
        (read_last_hooks, Tensor.register_post_accumulate_grad_hook),
    ):
        for hook in (read(source) or {}).values():
            register(made, _own_hook(hook, memo))


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _own_hook(hook: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
    plain = isinstance(hook, types.FunctionType)
    return _own_function(hook, clone, memo) if plain else duplicate(hook, memo)


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
    return [] if isinstance(holder, nn.Module) else list(vars_of(holder).values())


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a callable, or of its class, in tables."""
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def validated(fn: object, args: object, kwargs: object, where: str) -> Workload:
    """Make a workload from the arguments that a user gave to a function of ours.

    Args:
        where: the function, as the error names it.

    Raises:
        ArgumentError: OL401.
    """
    fix = f"{where}(model, (x,))"
    if not callable(fn):
        what, why = f"{type(fn).__name__} is not callable", "it is called with the arguments"
        raise bad(what, where, why, fix)
    if not isinstance(args, (tuple, list)):
        what = f"args is {describe_type(args)}, not a tuple"
        raise bad(what, where, "it holds the positional arguments of a call", fix)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        what, why = f"kwargs is {describe_type(kwargs)}, not a dict", "it names the arguments"
        fix = f'{where}(model, (x,), {{"mask": mask}})'
        raise bad(what, where, why, fix)
    return Workload(fn, tuple(args), dict(kwargs or {}))


def takes_a_call(tool: Callable[P, T]) -> Callable[P, T]:
    """Let a function of ours that takes a callable and its arguments refuse another form.

    Each such function takes ``(fn, args, kwargs)``. The arguments are in a tuple and a dict, since
    an argument may have the name of an option.
    """
    signature = inspect.signature(tool)

    @functools.wraps(tool)
    def checked(*given: P.args, **named: P.kwargs) -> T:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            why = "the arguments of a call come in a tuple, its keyword arguments in a dict"
            where = tool.__name__
            fix = f'{where}(model, (x,), {{"mask": mask}})'
            raise bad(str(error), where, why, fix) from None
        return tool(*given, **named)

    return checked


def tell_nobody(text: str, part: float) -> None:
    """Show no progress."""

"""Random tensor programs: views, in-place operations, aliases, constants, mixed dtypes.

A program is a list of steps over a growing list of values. Steps name their operands by number, so
that any list of steps is a program; a step that its operands do not admit (a matrix product of
vectors) is dropped when the program is settled, which depends on shapes and dtypes alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

SHAPES = [(), (1,), (4,), (3, 4), (4, 4), (4, 3), (2, 3, 4), (1, 4), (3, 1), (0, 4), (8,)]
DTYPES = [
    torch.float32,
    torch.float32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
]
CONSTANTS: list[Any] = [0, 1, 2, -1, 2.0, 0.5, -0.0, True, False, float("inf"), float("nan")]

# What an operation gets: the values picked as its operands, and two small numbers.
Operation = Callable[[Tensor, Tensor, int, int], Any]


def _writable(t: Tensor) -> Tensor:
    if torch._debug_has_internal_overlap(t) != 0:
        raise RuntimeError("writes to memory that overlaps itself are undefined")
    return t


def _fitting(out: Tensor, like: Tensor) -> Tensor:
    if out.shape != like.shape:
        raise RuntimeError("a caller's tensor resized is a refusal, and tested as one")
    return out


def _index(t: Tensor, m: int) -> Tensor:
    """Indices into dimension 0 that are in range whatever the data."""
    return (torch.arange(3, device=t.device) + m) % max(1, t.shape[0])


VIEWS: dict[str, Operation] = {
    "transpose": lambda x, y, m, n: x.transpose(m % x.dim(), n % x.dim()),
    "tail": lambda x, y, m, n: x[1:],
    "head": lambda x, y, m, n: x[: m % 4],
    "steps": lambda x, y, m, n: x[:: 2 + m % 2],
    "select": lambda x, y, m, n: x[..., n % x.shape[-1]],
    "flatten": lambda x, y, m, n: x.reshape(-1),
    "view": lambda x, y, m, n: x.view(-1, x.shape[0]),
    "unsqueeze": lambda x, y, m, n: x.unsqueeze(m % (x.dim() + 1)),
    "squeeze": lambda x, y, m, n: x.squeeze(),
    "expand": lambda x, y, m, n: x.expand(2, *x.shape),
    "expand as": lambda x, y, m, n: x.expand_as(y),
    "diagonal": lambda x, y, m, n: x.diagonal(),
    "chunk": lambda x, y, m, n: x.chunk(2, m % x.dim()),
    "unbind": lambda x, y, m, n: x.unbind(0)[:3],
    "bits": lambda x, y, m, n: x.view(torch.int32),
    "real": lambda x, y, m, n: x.real,
    "imag": lambda x, y, m, n: x.imag,
    "conj": lambda x, y, m, n: x.conj(),
    "detach": lambda x, y, m, n: x.detach(),
    "windows": lambda x, y, m, n: x.unfold(0, 2, 1),
    "itself": lambda x, y, m, n: x,
}

FUNCTIONS: dict[str, Operation] = {
    "clone": lambda x, y, m, n: x.clone(),
    "contiguous": lambda x, y, m, n: x.contiguous(),
    "neg": lambda x, y, m, n: -x,
    "abs": lambda x, y, m, n: x.abs(),
    "sin": lambda x, y, m, n: x.sin(),
    "exp": lambda x, y, m, n: x.exp(),
    "relu": lambda x, y, m, n: torch.relu(x),
    "sum": lambda x, y, m, n: x.sum(),
    "sum of one dimension": lambda x, y, m, n: x.sum(m % x.dim(), keepdim=n % 2 == 0),
    "amax": lambda x, y, m, n: x.amax(m % x.dim()),
    "argmax": lambda x, y, m, n: x.argmax(m % x.dim()),
    "cumsum": lambda x, y, m, n: x.cumsum(m % x.dim()),
    "softmax": lambda x, y, m, n: x.softmax(-1),
    "flip": lambda x, y, m, n: x.flip(m % x.dim()),
    "sort": lambda x, y, m, n: tuple(x.sort(stable=True)),
    "add": lambda x, y, m, n: x + y,
    "mul": lambda x, y, m, n: x * y,
    "sub": lambda x, y, m, n: torch.sub(x, y, alpha=1 + m % 3),
    "maximum": lambda x, y, m, n: torch.maximum(x, y),
    "compare": lambda x, y, m, n: x > y,
    "where": lambda x, y, m, n: torch.where(x != 0, x, y),
    "matmul": lambda x, y, m, n: x @ y,
    "outer": lambda x, y, m, n: torch.outer(x, y),
    "cat": lambda x, y, m, n: torch.cat([x, y]),
    "stack": lambda x, y, m, n: torch.stack([x, y], m % 2),
    "gather rows": lambda x, y, m, n: x[_index(x, m)],
    "take": lambda x, y, m, n: x.index_select(0, _index(x, m)),
    "add constant": lambda x, y, m, n: x + CONSTANTS[m % len(CONSTANTS)],
    "mul constant": lambda x, y, m, n: x * CONSTANTS[m % len(CONSTANTS)],
    "to dtype": lambda x, y, m, n: x.to(DTYPES[m % len(DTYPES)]),
    "to same": lambda x, y, m, n: x.to(x.dtype),
    "zeros like": lambda x, y, m, n: torch.zeros_like(x),
    "full": lambda x, y, m, n: torch.full((3, 4), float(m), device=x.device),
    "arange": lambda x, y, m, n: torch.arange(m, device=x.device),
    "clamp": lambda x, y, m, n: x.clamp(-1, 1),
    "transposed copy": lambda x, y, m, n: x.clone().t_(),
    "var": lambda x, y, m, n: x.var(0, correction=0),
    "pad": lambda x, y, m, n: torch.nn.functional.pad(x, (m % 3, n % 3)),
}

WRITES: dict[str, Operation] = {
    "add_": lambda x, y, m, n: _writable(x).add_(y),
    "mul_": lambda x, y, m, n: _writable(x).mul_(y),
    "copy_": lambda x, y, m, n: _writable(x).copy_(y),
    "zero_": lambda x, y, m, n: _writable(x).zero_(),
    "fill_": lambda x, y, m, n: _writable(x).fill_(m),
    "add_ constant": lambda x, y, m, n: _writable(x).add_(CONSTANTS[m % len(CONSTANTS)]),
    "neg_": lambda x, y, m, n: _writable(x).neg_(),
    "relu_": lambda x, y, m, n: _writable(x).relu_(),
    "clamp_": lambda x, y, m, n: _writable(x).clamp_(-1, 1),
    "set item": lambda x, y, m, n: _writable(x).__setitem__(0, m),
    "set slice": lambda x, y, m, n: _writable(x).__setitem__(slice(1, None), y),
    "masked_fill_": lambda x, y, m, n: _writable(x).masked_fill_(x > 0, m),
    "index_add_": lambda x, y, m, n: _writable(x).index_add_(0, _index(x, m)[:1], x[:1].clone()),
    "sub_ of its own view": lambda x, y, m, n: _writable(x).sub_(x.flip(0)),
    "out=": lambda x, y, m, n: torch.add(x, 1, out=_writable(_fitting(y, x))),
    "sqrt_": lambda x, y, m, n: _writable(x).abs_().sqrt_(),
}

OPERATIONS: dict[str, Operation] = {**VIEWS, **FUNCTIONS, **WRITES}


@dataclasses.dataclass(frozen=True)
class Step:
    operation: str
    x: int
    y: int
    m: int
    n: int


@dataclasses.dataclass(frozen=True)
class Source:
    """One argument: a tensor of its own, or one that shares memory with an earlier argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    of: int


LAYOUTS = [
    "plain",
    "plain",
    "plain",
    "transposed",
    "sliced",
    "steps",
    "expanded",
    "same",
    "overlap",
]


@dataclasses.dataclass(frozen=True)
class Program:
    sources: tuple[Source, ...]
    state: tuple[Source, ...]
    constants: tuple[Any, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def run(self, tensors: list[Tensor], state: list[Tensor], constant: Any) -> Any:
        """The callable's body. `constant` scales the first argument."""
        values = [*tensors, *state]
        values.append(values[0] * constant)
        for step in self.steps:
            values.extend(_apply(step, values))
        picked = [values[k % len(values)] for k in self.results]
        return {"first": picked[0], "rest": tuple(picked[1:]), "steps": len(self.steps)}

    def settle(self, device: torch.device) -> Program:
        """The program without the steps that its operands do not admit, for each constant."""
        # A dropped step renumbers the values after it, so again until nothing is dropped.
        settled = self
        for constant in self.constants:
            settled = settled._settle(device, constant)
        return settled if settled.steps == self.steps else settled.settle(device)

    def _settle(self, device: torch.device, constant: Any) -> Program:
        values = [*self.arguments(0, device), *self.initial_state(device)]
        values.append(values[0] * constant)
        kept: list[Step] = []
        for step in self.steps:
            try:
                with warnings.catch_warnings(action="error"):
                    values.extend(_apply(step, values))
            except (RuntimeError, IndexError, ZeroDivisionError, TypeError, ValueError, Warning):
                continue
            kept.append(step)
        return dataclasses.replace(self, steps=tuple(kept))

    def arguments(self, call: int, device: torch.device) -> list[Tensor]:
        return _build(self.sources, 100 * call, device)

    def initial_state(self, device: torch.device) -> list[Tensor]:
        return _build(self.state, 7777, device)


def _apply(step: Step, values: list[Tensor]) -> list[Tensor]:
    x, y = values[step.x % len(values)], values[step.y % len(values)]
    made = OPERATIONS[step.operation](x, y, step.m, step.n)
    made = made if isinstance(made, (tuple, list)) else [made]
    # A value that grew large makes a program slow, and shows nothing more.
    return [t for t in made if isinstance(t, Tensor) and t.numel() <= 512]


def _build(sources: tuple[Source, ...], seed: int, device: torch.device) -> list[Tensor]:
    made: list[Tensor] = []
    for k, source in enumerate(sources):
        earlier = made[source.of % len(made)] if made else None
        if source.layout == "same" and earlier is not None:
            made.append(earlier)
        elif source.layout == "overlap" and earlier is not None and earlier.dim() > 0:
            made.append(earlier[1:])
        else:
            made.append(_fresh(source, seed + k, device))
    return made


def _fresh(source: Source, seed: int, device: torch.device) -> Tensor:
    def values(*shape: int) -> Tensor:
        # Quarters: sums and products of a few of them are exact in any order.
        generator = torch.Generator().manual_seed(seed)
        t = torch.randint(-8, 9, shape, generator=generator) / 4
        return t.to(source.dtype).to(device)

    shape = source.shape
    if source.layout == "transposed" and len(shape) >= 2:
        return values(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if source.layout == "sliced" and shape:
        return values(*shape[:-1], shape[-1] + 3)[..., 1 : 1 + shape[-1]]
    if source.layout == "steps" and shape:
        return values(shape[0] * 2, *shape[1:])[::2]
    if source.layout == "expanded" and shape:
        return values(1, *shape[1:]).expand(shape)
    return values(*shape)


_numbers = st.integers(0, 40)
_sources = st.builds(
    Source, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), _numbers
)
# In-place operations are as likely as the rest: they are where replays go wrong.
_names = [*WRITES, *WRITES, *VIEWS, *FUNCTIONS]
_steps = st.builds(
    Step, st.sampled_from(_names), _numbers, _numbers, st.integers(0, 10), st.integers(0, 3)
)


def _several(elements: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[Any]:
    """As many short lists as long ones; hypothesis alone prefers short."""
    return st.integers(least, most).flatmap(
        lambda n: st.lists(elements, min_size=n, max_size=n).map(tuple)
    )


programs = st.builds(
    Program,
    _several(_sources, 1, 4),
    _several(_sources, 0, 2),
    _several(st.sampled_from(CONSTANTS), 1, 2),
    _several(_steps, 1, 24),
    _several(_numbers, 1, 5),
)

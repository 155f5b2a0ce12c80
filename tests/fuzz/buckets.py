"""Random programs under random buckets: each call equals eager, or the program is refused.

    python -m tests.fuzz.buckets --programs 5000 --seed 1 --device cpu

A program is one to four expressions of `bucket_operators`, on data of several kinds (normal, zeros,
ones, integers, negative, large; of extreme scales, near the numbers that hide padding, infinite,
NaN), called at many sizes of its buckets, 0 among them; some are trained, some keep counts and
statistics. Prints each program that is wrong, with the seed that makes it alone.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol

from . import command
from .bucket_operators import FINAL, SAME, State, compiled

KINDS = ("normal", "zeros", "ones", "integers", "negative", "large", "small")
EXTREME = ("huge", "tiny", "near", "low", "lowest", "infinite", "nan")
SIZES = [(3, 7), (4, 8), (2, 5, 9), (8,), (1, 6), (5, 6, 9), (7,)]


@dataclass(frozen=True)
class Program:
    """Expressions, the buckets they run under, and data."""

    seed: int
    steps: tuple[str, ...]
    last: str
    buckets: ol.Buckets
    ahead: bool
    trained: bool
    kinds: tuple[str, ...]
    """Of the data of each call in turn; the first is what the proof sees."""

    def __str__(self) -> str:
        text = [f"seed {self.seed}", *self.steps, f"return {self.last}", str(self.buckets)]
        text.append(f"ahead={self.ahead} trained={self.trained} data={self.kinds}")
        return "\n    ".join(text)


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    steps = tuple(r.choices(SAME, k=r.choice((0, 0, 1, 1, 1, 2, 3))))
    last = r.choice(SAME) if steps and r.random() < 0.3 else r.choice(FINAL)
    dim = r.choice((0, 1, (0, 1)))
    both = isinstance(dim, tuple)
    sizes = tuple(r.choice(SIZES) for _ in range(2)) if both else r.choice(SIZES)
    fill = 0 if r.random() < 0.7 else None
    length = (None, fill) if both else fill if dim == 1 else None
    pad: dict[str, Any] = {} if fill is None else {"mask": length}
    if r.random() < 0.15:
        pad["x"] = 0 if not both else (0, 0)
    kinds = tuple(r.choices(KINDS, k=3)) if r.random() < 0.7 else (r.choice(KINDS),)
    if r.random() < 0.5:  # in later calls; now and then in those of the proof too
        kinds = (*kinds, *r.choices(EXTREME, k=2)) if r.random() < 0.8 else r.choices(EXTREME, k=3)
    buckets = ol.Buckets(dim, sizes, pad=pad, dims={"w": None, "b": None, "table": None})
    return Program(seed, steps, last, buckets, r.random() < 0.4, r.random() < 0.25, tuple(kinds))


def data(r: torch.Generator, kind: str, *shape: int) -> Tensor:
    """Values of one kind."""
    t = torch.randn(*shape, generator=r, dtype=torch.float64)
    return {
        "normal": t,
        "zeros": t * 0,
        "ones": t * 0 + 1,
        "integers": (t * 2).round(),
        "negative": -t.abs() - 0.1,
        "large": t * 100,
        "small": t * 1e-3,
        "huge": t * 1e30,
        "tiny": t * 1e-30,
        "near": t * 1e3 - 9.5e3,  # numbers that hide
        "low": t - 3e5,
        "lowest": -t.abs() * 1e38 - 1e38,
        "infinite": _but_last(t, t.where(t > -0.5, -torch.inf)),
        "nan": _but_last(t, t.where(t > -1, torch.nan)),
    }[kind]


def _but_last(t: Tensor, other: Tensor) -> Tensor:
    """Other values, but in the last row, which padding repeats; docs/limits.md says why."""
    made = other.clone()
    made[-1:], made[:, -1:] = t[-1:], t[:, -1:]
    return made


def arguments(seed: int, kind: str, batch: int, length: int) -> list[Tensor]:
    r = torch.Generator().manual_seed(seed)
    x, y = (data(r, kind, batch, length, 4) for _ in range(2))
    mask = torch.ones(batch, length, dtype=torch.float64)
    if kind not in ("zeros", "ones") and length:
        least = 0 if kind in EXTREME else 1  # a row that is masked as a whole
        keep = torch.randint(least, length + 1, (batch, 1), generator=r)
        mask = (torch.arange(length) < keep).double()
    ids = torch.randint(0, 8, (batch, length), generator=r)
    return [x, y, mask, ids * 0 if kind == "zeros" else ids]


def sizes_of(found: Program, r: random.Random) -> list[tuple[int, int]]:
    """The sizes of the calls: every one of a bucketed dimension, or some of two."""
    known = found.buckets.sizes
    if len(known) == 2:
        tops = [sizes[-1] for sizes in known]
        drawn = [(r.randint(1, tops[0]), r.randint(1, tops[1])) for _ in range(16)]
        return [*drawn, (0, tops[1]), (1, 1), (tops[0], 0), (1, 0), drawn[0]]
    other = r.choice((3, 5, 8))
    every = list(range(1, known[0][-1] + 1))
    r.shuffle(every)
    # Each bucket is first called without being shown, where it is not captured ahead.
    every = [size for size in every for _ in range(1 if found.ahead else 2)]
    every.append(0)
    return [(n, other) if found.buckets.dim == (0,) else (other, n) for n in every]


def same(got: Any, expected: Any, layout: bool = True) -> str | None:
    """What differs of two results, but for rounding. Layouts are those of the kernels that serve
    inference: of a batch of one, training may take others."""
    mine, theirs = ([t.dtype, list(t.shape), _strides(t)][: 2 + layout] for t in (got, expected))
    if mine != theirs:
        return f"{mine} is not {theirs}"
    a, b = got.detach().cpu(), expected.detach().cpu()
    if not a.is_floating_point():
        return None if torch.equal(a, b) else f"{a} is not {b}"
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = 1e-4 if a.dtype == torch.float32 else 1e-7
    near = torch.isclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)
    near |= b.isinf() & a.isnan()  # 0 times what is infinite in padding: docs/limits.md
    return None if bool(near.all()) else f"{a} is not {b}"


def _strides(t: Tensor) -> list[int]:
    """Those that say where an element is."""
    return [n for size, n in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]


@command.no_errors
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: right, refused (with the code), void (eager fails) or wrong."""
    torch.manual_seed(found.seed)
    lines = [compiled(source) for source in (*found.steps, found.last)]
    seed = torch.Generator().manual_seed(found.seed)
    shapes = ((4, 4), (4,), (8, 4))
    parameters = [torch.randn(s, generator=seed, dtype=torch.float64).abs() for s in shapes]
    parameters[1] -= 0.5
    w, b, table = (t.to(device).requires_grad_(found.trained) for t in parameters)

    kept, theirs = State().to(device), State().to(device)

    def stepped(state: State, x: Tensor, y: Tensor, mask: Tensor, ids: Tensor) -> Any:
        for line in lines[:-1]:
            x = line(x, y, mask, ids, w, b, table, state)
        return lines[-1](x, y, mask, ids, w, b, table, state)

    def call(x: Tensor, y: Tensor, mask: Tensor, ids: Tensor) -> Any:
        return stepped(kept, x, y, mask, ids)

    r = random.Random(found.seed + 1)
    plan = sizes_of(found, r)
    plan = [sizes for sizes in plan if 0 not in sizes or _taken(lines, [sizes], found)]
    # On CUDA an index out of bounds ends the process; ahead, each bucket's own size is run.
    if (device.type == "cuda" or found.ahead) and not _taken(lines, plan, found):
        return "void", "eager"
    buckets = ol.Buckets(
        found.buckets.dim if len(found.buckets.dim) > 1 else found.buckets.dim[0],
        found.buckets.sizes if len(found.buckets.dim) > 1 else found.buckets.sizes[0],
        pad=dict(found.buckets.pad) if len(found.buckets.dim) > 1
        else {k: v[0] for k, v in found.buckets.pad.items()},
    )  # fmt: skip
    fast = ol.graph(call, buckets=buckets, warmup=1)
    # What docs/limits.md says of `max_pool1d` on plain CPU tensors is of its layout.
    pooled = device.type == "cpu" and any("max_pool1d" in s for s in (*found.steps, found.last))
    layout = not (found.trained or pooled)
    mode = torch.enable_grad if found.trained else torch.no_grad
    replayed = False
    with mode():
        for number, (batch, length) in enumerate(plan):
            kind = found.kinds[number % len(found.kinds)]
            given = [t.to(device) for t in arguments(found.seed * 64 + number, kind, batch, length)]
            try:
                expected = stepped(theirs, *given)
                wanted = _gradients(expected, (w, b, table))
            except Exception:  # noqa: BLE001 - whatever eager raises
                if number == 0:
                    return "void", "eager"
                theirs.load_state_dict(kept.state_dict())
                continue  # a size that eager does not take
            try:
                if number == 0 and found.ahead:
                    with warnings.catch_warnings():  # some buckets may be refused, not all
                        warnings.simplefilter("ignore", ol.GraphWarning)
                        fast.warm_up([tuple(given)])
                got = fast(*given)
                grads = _gradients(got, (w, b, table))
            except ol.CaptureError as error:
                return "refused", error.code
            wrong = same(got, expected, layout)
            for (name, t), other in zip(kept.named_buffers(), theirs.buffers(), strict=True):
                wrong = wrong or (same(t, other) and f"{name}: {same(t, other)}")
            for name, a, e in zip("wbt", grads, wanted, strict=True):
                if wrong is None and (a is None) != (e is None):
                    wrong = f"gradient of {name}: {a} is not {e}"
                if wrong is None and a is not None and e is not None:
                    wrong = same(a, e, False) and f"gradient of {name}: {same(a, e, False)}"
            if wrong is not None:
                return "wrong", f"call {number} of {batch} x {length}, {kind} data: {wrong}"
        replayed = any(recording.replays for recording in fast.recordings)
    return "right" if replayed else "void", "replayed" if replayed else "no replay"


def _taken(lines: list[Callable[..., Any]], plan: list[tuple[int, int]], found: Program) -> bool:
    """Whether eager takes every size of a plan, as the host tells."""
    shapes = ((4, 4), (4,), (8, 4))
    parameters = [torch.ones(s, dtype=torch.float64) for s in shapes]
    try:
        for number, (batch, length) in enumerate(plan):
            kind = found.kinds[number % len(found.kinds)]
            x, *rest = arguments(found.seed * 64 + number, kind, batch, length)
            for line in lines:
                x = line(x, *rest, *parameters, State())
    except Exception:  # noqa: BLE001 - whatever eager raises
        return False
    return True


def _gradients(result: Any, leaves: tuple[Tensor, ...]) -> list[Tensor | None]:
    if not (isinstance(result, Tensor) and result.requires_grad):
        return [None] * len(leaves)
    seed = torch.Generator().manual_seed(result.numel())
    weight = torch.randn(result.shape, generator=seed, dtype=torch.float64)
    weight = weight.to(result.device, result.dtype)
    return list(torch.autograd.grad(result, leaves, weight, allow_unused=True))


fuzz = command.fuzzer(program, verdict)


if __name__ == "__main__":
    sys.exit(command.main("Random programs under random buckets.", fuzz, 5000))

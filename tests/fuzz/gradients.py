"""Random functions in grad mode: results, gradients and who shares memory are as in eager.

    python -m tests.fuzz.gradients --programs 2000 --seed 1 --device cpu
    python -m tests.fuzz.gradients --programs 200 --device tape --compile

A function takes views, computes, writes in place and turns grad mode on and off, over two
arguments, a parameter and a buffer, and returns some of what it has. It is called in two worlds,
eagerly in one; then a backward runs, and a result is written. Prints each function that is wrong,
without the lines that do not make it so.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.driver.select import driver_of

from . import command

CALLS = 7
VIEWS = (
    *("{a}[1:]", "{a}[0]", "{a}.t()", "{a}[:, ::2]", "{a}.chunk(2)[{k}]", "{a}.unbind()[{k}]"),
    *("{a}.view(-1)", "{a}.reshape(2, -1)", "{a}.unsqueeze(0)", "{a}.diagonal()"),
    *("{a}.view_as({a})", "{a}.expand(2, *{a}.shape)", "{a}.detach()", "{a}.detach()", "{a}"),
    "Tripled.apply({a})",
)
COMPUTED = (
    *("{a}.abs()", "{a} * 2", "{a}.sum()", "{a} + {b}", "({a} * {b}).clamp(-3, 3)"),
    *("{a}.clone()", "{a}.relu()", "{a}.contiguous()", "({a} @ w).clamp(-3, 3)"),
    *("{a}.clamp(-2, 2)", "torch.where({a} > 0, {a}, {b})", "{a}.argmax()"),
    *("Doubled.apply({a})", "torch.cat([{a}, {b}])", "{a}.detach().clone()", "-{a}"),
)
"""Exact on small whole numbers, in whatever order gradients are added."""
WRITES = ("{a}.mul_(2)", "{a}.add_({b})", "{a}.copy_({b})", "{a}.detach().add_(1)", "{a}[0] = 1")
PREFIXES = (*[""] * 8, "with torch.no_grad(): ", "with torch.enable_grad(): ")
OPTIONS: tuple[dict[str, Any], ...] = (*[{}] * 3, {"inputs": "rebind"}, {"gradients": "direct"})
GIVEN = ("x", "y", "w", "b")


class Tripled(torch.autograd.Function):
    """A view with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


@dataclass(frozen=True)
class Program:
    """A function, by its lines, and which of its tensors require grad."""

    seed: int
    lines: tuple[str, ...]
    results: tuple[str, ...]
    trained: tuple[str, ...]
    mode: str
    options: dict[str, Any]
    given: str = "apart"
    """How the arguments lie in memory."""
    writes: bool = False
    """Whether a result is written before the backward."""
    compiled: str = ""
    """See `command.graph`."""

    def __str__(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return (
            f"# seed {self.seed}; require grad: {self.trained}; {self.mode}; {self.options}; "
            f"arguments: {self.given}; a result is written: {self.writes}\n"
            f"def f(x, y):\n{body}    return {', '.join(self.results)},"
        )


def program(seed: int) -> Program:
    """Return the program of a seed."""
    draw = random.Random(seed)
    names, lines = list(GIVEN), list[str]()
    for number in range(draw.randint(1, 7)):
        kinds = draw.choice([VIEWS, VIEWS, COMPUTED, COMPUTED, WRITES])
        a, b = (draw.choice(names[-4:] if draw.random() < 0.6 else names) for _ in range(2))
        text = draw.choice(kinds).format(a=a, b=b, k=draw.randrange(2))
        if kinds is not WRITES:
            text = f"v{number} = {text}"
            names.append(f"v{number}")
        lines.append(draw.choice(PREFIXES) + text)
    results = tuple(draw.choice(names[-5:]) for _ in range(draw.randint(1, 4)))
    trained = tuple(name for name in ("x", "y", "w") if draw.random() < 0.6)
    mode, options = draw.choice(["grad", "grad", "no_grad"]), draw.choice(OPTIONS)
    given = draw.choice(["apart", "apart", "halves", "detached"])
    writes = draw.random() < 0.3
    return Program(seed, tuple(lines), results, trained, mode, options, given, writes)


class World:
    """The tensors of a program, and its function over them."""

    def __init__(self, found: Program, device: torch.device) -> None:
        self._found = found
        self._device = device
        self.w = self._tensor("w", 7)
        self.b = self._tensor("b", 8)
        scope = {"torch": torch, "Tripled": Tripled, "Doubled": Doubled, "w": self.w, "b": self.b}
        exec(str(found), scope)
        self.f: Callable[..., Any] = scope["f"]

    def _tensor(self, name: str, seed: int) -> Tensor:
        values = torch.randint(-3, 4, (4, 4), generator=torch.Generator().manual_seed(seed))
        made = values.to(torch.float32).to(self._device)
        return made.requires_grad_() if name in self._found.trained else made

    def call(self, f: Callable[..., Any], i: int) -> list[Any]:
        """Return all that a call and what comes after it do."""
        x, y = self._tensor("x", 100 + i), self._tensor("y", 200 + i)
        leaves = [x, y, self.w, self.b]
        if self._found.given == "halves":
            both = torch.cat([x, y])
            x, y = both[:4], both[4:]
        elif self._found.given == "detached":
            x = y.detach()
        given = [x, y, self.w, self.b]
        versions = [t._version for t in given]
        with torch.set_grad_enabled(self._found.mode == "grad"):
            results = list(f(x, y))
        every = [*given, *results]
        storage = driver_of(self._device.type).storage
        facts: list[Any] = [
            [t._version > before for t, before in zip(given, versions, strict=True)],
            [(t.shape, t.stride(), t.dtype, *_in_autograd(t)) for t in results],
            [a is b for a, b in itertools.combinations(every, 2)],
            [
                storage(a) == storage(b) and 0 not in (a.numel(), b.numel())
                for a, b in itertools.combinations(every, 2)
            ],
            _values(every),
        ]
        if self._found.writes and self._found.mode == "grad":
            results[0].mul_(2)
        graded = [t for t in results if _in_autograd(t)[0] and t.is_floating_point()]
        if graded:
            torch.stack([(t * t).sum() for t in graded]).sum().backward()
        grads = [t.grad for t in leaves]
        facts.append([g if g is None else (g._is_view(), *_values([g])) for g in grads])
        last = results[-1]
        with torch.no_grad():
            facts.append(_raised(lambda: last.mul_(2)))
            facts.append(_values(every))
            for t, start in zip(given[2:], (7, 8), strict=True):
                t.grad = None
                t.copy_(self._tensor("", start + 10 * i))
        return facts


def _in_autograd(t: Tensor) -> tuple[bool, bool]:
    """Whether a tensor requires grad, and whether it is a leaf.

    One computed from a view that `no_grad` made requires grad in eager, by a graph that leads
    nowhere: in replays it does not.
    """
    stack, seen = [t.grad_fn], set[Any]()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    leads = any(node.name() == "torch::autograd::AccumulateGrad" for node in seen)
    return t.requires_grad and (leads or t.grad_fn is None), t.is_leaf or not leads


def _values(tensors: Sequence[Tensor]) -> list[Any]:
    return [t.detach().cpu().tolist() for t in tensors]


def _raised(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - compared with the other world
        return type(error).__name__
    return None


@command.quiet()
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: right, refused (with the code), void (eager fails) or wrong."""
    eager, graphed = World(found, device), World(found, device)
    fast = command.graph(graphed.f, found.compiled, warmup=1, **found.options)
    for i in range(CALLS):
        try:
            expected = eager.call(eager.f, i)
        except Exception:  # noqa: BLE001 - of the program
            return "void", "eager"
        try:
            got = graphed.call(fast, i)
        except ol.CaptureError as error:
            return "refused", error.code
        except Exception as error:  # noqa: BLE001 - eager raised nothing
            return "wrong", f"call {i}: {type(error).__name__}: {error}"
        if repr(got) != repr(expected):
            pairs = zip(got, expected, strict=True)
            return (
                "wrong",
                f"call {i}: {next(f'{a} for {b}' for a, b in pairs if repr(a) != repr(b))}",
            )
    return command.right(fast)


def _smaller(found: Program) -> list[Program]:
    fewer = command.without(found, "results", 1)
    return [*command.without(found, "lines"), *fewer, *command.without(found, "trained")]


fuzz = command.fuzzer(program, verdict, _smaller)


if __name__ == "__main__":
    sys.exit(command.main("Random functions in grad mode.", fuzz, 2000, compiles=True))

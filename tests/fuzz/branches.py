"""Random programs with many branches, under `parallel`: each result is eager's, bit for bit.

    python -m tests.fuzz.branches --programs 1000 --seed 1 --device tape

Operations make new tensors out of any earlier ones, write tensors in place, also through views, and
draw random numbers. So memory is freed and taken again while branches run. On the tape a recording
runs its operations in another order than they came, wherever its edges allow it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import command
from .state import different

MAKE = (
    *("{new} = {a} + {b}", "{new} = {a} * 0.5 - {b}", "{new} = {a} @ {b}"),
    *("{new} = torch.addmm({a}, {b}, {c})", "{new} = {a}.tanh()", "{new} = {a}.softmax(-1)"),
    *("{new} = {a}.t().contiguous()", "{new} = torch.stack([{a}, {b}, {c}]).mean(0)"),
    "{new} = torch.cat([{a}[:2], {b}[2:]])",
    "{new} = {a}.sum(0, keepdim=True).expand(4, 4) * {b}",
    *("{new} = torch.where({a} > 0, {b}, {c})", "{new} = {a}.cumsum(1)"),
    *("{new} = {a}.masked_fill({b} > 1, 0.5)", "{new} = torch.rand_like({a}) + {b}"),
    "{new} = torch.nn.functional.dropout({a}, 0.3)",
    *("{new} = {a}.index_select(0, {b}[:, 0].argsort())", "{new} = torch.sort({a}, 1).values"),
    *("{new} = {a}.clone()", "{new} = {a}[1:3].repeat(2, 1)"),
)
WRITE = (
    *("{a}.mul_(0.5)", "{a}.add_({b}, alpha=0.1)", "{a}[1:3].copy_({b}[:2])"),
    *("{a}[0] = {b}[1]", "{a}.t()[2].sub_({b}[0])", "torch._foreach_add_([{a}, {b}], 0.25)"),
    *("torch.add({a}, {b}, out={a})", "torch.mm({b}, {c}, out={a})", "{a}.copy_({b})"),
)
FREE = "del {a}"


@dataclass(frozen=True)
class Program:
    """The lines of a callable of `x` and the state `s`, which it may write.

    Attributes:
        options: those of `ol.graph`, besides.
    """

    seed: int
    lines: tuple[str, ...]
    kept: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        head = f"# seed {self.seed}, {dict(self.options)}\ndef f(x, s):"
        return "\n    ".join([head, *self.lines, f"return {', '.join(self.kept)},"])


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    names, lines = ["x", "s"], list[str]()
    for number in range(r.randint(5, 40)):
        text = r.choices((r.choice(MAKE), r.choice(WRITE), FREE), (8, 2, 3))[0]
        if text == FREE and len(names) < 5:
            continue
        given = {key: r.choice(names) for key in ("b", "c")}
        target = r.choice(names[2:] or ["s"]) if text == FREE else r.choice(names)
        if text in WRITE and target in given.values():
            continue
        lines.append(text.format(new=f"v{number}", a=target, **given))
        if text in MAKE:
            names.append(f"v{number}")
        elif text == FREE:
            names.remove(target)
    options: dict[str, Any] = {"outputs": "static"} if r.random() < 0.2 else {}
    options["parallel"] = "auto" if r.random() < 0.5 else True
    if r.random() < 0.2:
        options["inputs"] = "rebind"
    kept = r.sample(names, min(len(names), r.randint(1, 4)))
    return Program(seed, tuple(lines), tuple(kept), tuple(options.items()))


def run(found: Program, device: torch.device) -> tuple[str, str]:
    """What becomes of a program."""
    state = torch.linspace(-1, 1, 16).view(4, 4)
    states = [state.clone().to(device) for _ in range(2)]
    f = command.ran(str(found), found.seed, {"torch": torch})["f"]
    fast: Any = command.graph(f, "", warmup=1, **dict(found.options))
    with torch.no_grad(), command.quiet():
        for call in range(5):
            both: list[tuple[Any, Tensor, Tensor]] = []
            for which, g in enumerate((f, fast)):
                x = command.random_tensor(call, 4, 4, device=device)
                torch.manual_seed(call)
                try:
                    result = g(x, states[which])
                except Exception as error:  # noqa: BLE001 - reported
                    if g is f:
                        return "void", type(error).__name__
                    code = getattr(error, "code", None)
                    if code is None:
                        return "wrong", f"call {call}: {type(error).__name__}: {error}"
                    return "refused", code
                both.append(([t.clone() for t in result], x, torch.rand(1, device=device)))
            why = different(both[1], both[0]) or different(states[1], states[0])
            if why:
                return "wrong", f"call {call}: {why}"
    recorded = fast.recordings
    wide = any(r.parallel is not None for r in recorded)
    return "right", ("parallel" if wide else "a chain") if recorded else "eager"


fuzz = command.fuzzer(program, run, lambda found: command.without(found, "lines"))


if __name__ == "__main__":
    sys.exit(command.main(__doc__ or "", fuzz, programs=1000))

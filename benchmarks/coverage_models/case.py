"""One model under each engine: the same calls with the same seeds, compared with eager's.

The calls are of two sets of inputs in turn, of the same shapes, and the last four of them are
compared: results, and in training all gradients.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn

import onelaunch as ol

from .diagnosed import DOCTOR, diagnosed
from .engines import COMPILED, Skipped, differentiable, engine, leaves_of
from .subject import Subject

Mode = Literal["inference", "training"]
SEEDS: dict[str, tuple[int, ...]] = {
    "inference": (0, 0, 0, 0, 0, 1, 0, 1),
    "training": (0, 0, 0, 0, 0, 0, 0, 1, 0, 1),
}
COMPARED = 4
REPLAYS = 2
TOLERANCE = {"cpu": 1e-5, "tape": 1e-5, "cuda": 2e-3}
COMPILED_TOLERANCE = 2e-2
Row = dict[str, Any]


@dataclass
class Ran:
    """What an engine gave: the leaves of the compared calls, on the host, and figures."""

    leaves: list[list[Any]]
    seconds: list[float]
    launches: list[int]
    figures: dict[str, Any]
    warned: list[str]


def play(subject: Subject, name: str, mode: Mode, device: torch.device) -> Ran:
    """Run the calls under an engine."""
    training = mode == "training"
    model = copy.deepcopy(subject.model).to(device).train(training)
    fast = engine(name, model, training)
    seeds = SEEDS[mode]
    sets = {seed: subject.arguments(seed) for seed in set(seeds)}
    ran = Ran([], [], [], {}, [])
    for number, seed in [*((0, 0) for _ in range(fast.warmup)), *enumerate(seeds)]:
        args, kwargs = _on(sets[seed], device)
        _seed(number)
        before, start = fast.launches(), time.perf_counter()
        with torch.set_grad_enabled(training), _noting(ran.warned):
            found = fast(args, kwargs)
            if training:
                found = _backward(found)
        _synchronize(device)
        ran.seconds.append(time.perf_counter() - start)
        ran.launches.append(fast.launches() - before)
        if len(ran.seconds) > fast.warmup + len(seeds) - COMPARED:
            ran.leaves.append(_kept(found, model if training else None))
        model.zero_grad(set_to_none=True)
        del found
    ran.figures = fast.figures()
    return ran


@contextlib.contextmanager
def _noting(codes: list[str]) -> Generator[None]:
    """Note the codes of onelaunch's warnings."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ol.GraphWarning)
        yield
    codes += [str(w.message)[1:].partition("]")[0] for w in raised]


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {k: _on(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(v, device) for v in value)
    return value


def _seed(number: int) -> None:
    torch.manual_seed(100 + number)
    random.seed(100 + number)
    numpy.random.seed(100 + number)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class NoGradient(Exception):
    """No result has a gradient."""


def _backward(found: Any) -> Tensor:
    """A loss of all results that have a gradient, after its backward."""
    parts = [t.float().square().mean() for t in differentiable(found) if not t.is_complex()]
    if not parts:
        raise NoGradient
    loss = torch.stack(parts).sum()
    loss.backward()
    return loss


def _kept(found: Any, model: nn.Module | None) -> list[Any]:
    leaves = leaves_of(found)
    if model is not None:
        leaves += [p.grad for p in model.parameters()]
    return [x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x for x in leaves]


def difference(got: list[list[Any]], expected: list[list[Any]]) -> float:
    """The largest difference of a number, relative to the largest value of its tensor; infinite
    where what is compared is not alike."""
    if [len(g) for g in got] != [len(e) for e in expected]:
        return float("inf")
    pairs = [pair for g, e in zip(got, expected, strict=True) for pair in zip(g, e, strict=True)]
    return max((_apart(g, e) for g, e in pairs), default=0.0)


def _apart(got: Any, expected: Any) -> float:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        same = type(got) is type(expected) and (got == expected or got != got)
        return 0.0 if same else float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if torch.equal(got, expected) or got.numel() == 0:
        return 0.0
    if not (got.is_floating_point() or got.is_complex()):
        return float("inf")
    wide = torch.complex128 if got.is_complex() else torch.float64
    a, b = got.to(wide), expected.to(wide)
    finite = torch.isfinite(b)
    same = torch.isfinite(a) == finite
    same &= finite | (a == b) | (torch.isnan(a) & torch.isnan(b))
    if not bool(same.all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    apart, largest = (a - b)[finite].abs().max(), b[finite].abs().max()
    return float(apart / largest.clamp(min=1e-6))


@dataclass
class Reference:
    """Eager's results, and how far two runs of it are apart."""

    ran: Ran
    spread: float

    def row(self) -> Row:
        return {"spread": self.spread, "seconds": round(sum(self.ran.seconds), 4)}


MOST_SPREAD = 0.01


class Undecided(Exception):
    """Eager's own results differ too much from run to run to say what is right."""


def reference(subject: Subject, mode: Mode, device: torch.device) -> Reference:
    """Run eager twice.

    Raises:
        Undecided: the two differ.
    """
    first, second = (play(subject, "eager", mode, device) for _ in range(2))
    spread = difference(second.leaves, first.leaves)
    if spread > MOST_SPREAD:
        raise Undecided(f"two runs of eager differ by {spread:.3g}")
    return Reference(first, spread)


NOISE = 1e-6
TRIALS = 4


def _unsteady(
    subject: Subject, mode: Mode, device: torch.device, eager: Reference, limit: float
) -> float:
    """How far eager's own results move with parameters that differ by a part in a million, which is
    what another order of a sum's terms does; 0.0 if within the limit. Two boxes with equal scores
    but for the last digits change places: then a compiler's own rounding decides what is first."""
    for seed in range(TRIALS):
        model = copy.deepcopy(subject.model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator) * NOISE
                p.mul_(1 + noise.to(p.dtype))
        ran = play(replace(subject, model=model), "eager", mode, device)
        moved = difference(ran.leaves, eager.ran.leaves)
        if moved > limit:
            return moved
    return 0.0


def judge(
    subject: Subject, name: str, mode: Mode, device: torch.device, eager: Reference | None
) -> Row:
    """Run an engine, or the doctor, which needs no reference, and say what became of it."""
    if name == DOCTOR:
        return diagnosed(subject, mode == "training", _on(subject.arguments(0), device), device)
    assert eager is not None
    try:
        ran = play(subject, name, mode, device)
    except Skipped as error:
        return {"verdict": "skipped", "text": str(error)}
    except ol.CaptureError as error:
        where = (error.where or "").rpartition("site-packages/")[2].strip()
        row: Row = {"verdict": "refused", "code": error.code, "line": where}
        return row | {"text": error.what, "fix": error.fix}
    except Exception as error:  # noqa: BLE001  becomes a row
        verdict = "refused" if name == "by hand" else "failed"
        return {"verdict": verdict, "text": _said(error)}
    limit = COMPILED_TOLERANCE if name in COMPILED else TOLERANCE[device.type]
    apart = difference(ran.leaves, eager.ran.leaves)
    row = {"max_error": apart if isfinite(apart) else "not alike", **ran.figures}
    if ran.warned:
        row["code"] = ran.warned[0]
    replayed = [i for i, n in enumerate(ran.launches) if n]
    if apart > max(limit, 10 * eager.spread):
        if name in COMPILED and (moved := _unsteady(subject, mode, device, eager, limit)):
            told = moved if isfinite(moved) else "not alike"
            return {"verdict": "undecided", **row, "eager moves": told}
        return {"verdict": "wrong", **row}
    if name == "reduce-overhead" and not ran.figures["one_graph"]:
        return {"verdict": "pieces", **row, "seconds": round(sum(ran.seconds[:3]), 4)}
    if len(replayed) < REPLAYS or not ran.launches[-1]:
        return {"verdict": "no replay", **row}
    launches = ran.launches[-1]
    first = next(i for i, n in enumerate(ran.launches) if n == launches)
    row |= {"launches": launches, "seconds": round(sum(ran.seconds[: first + 1]), 4)}
    return {"verdict": "one launch" if launches == 1 else "pieces", **row}


def _said(error: Exception) -> str:
    lines = [line for line in re.split(r"\n", str(error)) if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"

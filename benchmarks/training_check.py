"""Whether an engine trains rightly: step by step, each from a state that is the same for all.

Training is chaotic. After four steps of Adam float32 itself is 70% away from float64 on a ResNet-50
whose BatchNorm sees one image, however well each step is computed; so where two runs have got to
says nothing. A single step says a lot: its loss, its gradients, what BatchNorm remembers, and
whether Adam did with these gradients what it should. Adam's step is judged by the engine's own
gradients, for it gives a gradient of nothing but rounding as much weight as any other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training_engines import (
    BETAS,
    EPS,
    LEARNING_RATE,
    Batch,
    Training,
    adam,
    forward_backward,
    whole_step,
)
from onelaunch.tools.bench.precision import relative_error

STEPS = 3  # that are checked: the first has no moments, and each has a batch of its own
EAGER_FACTOR = 5.0  # how much further from float64 than eager an engine may be
TIGHTEST, LOOSEST = 1e-3, 0.5  # of a relative error
CHECKED = ("losses", "gradients", "updates", "buffers")
Errors = tuple[float, float, float, float]


@dataclass(frozen=True)
class State:
    """Where a step begins.

    Attributes:
        moments: by parameter the two of Adam; none of one that never had a gradient.
        count: of the steps so far.
    """

    parameters: list[Tensor]
    buffers: list[Tensor]
    moments: dict[int, tuple[Tensor, Tensor]]
    count: int

    @staticmethod
    def of(training: Training, count: int) -> State:
        parameters = list(training.model.parameters())
        moments = {
            i: (known["exp_avg"].clone(), known["exp_avg_sq"].clone())
            for i, known in enumerate(map(training.state_of, parameters))
            if "exp_avg" in known
        }
        buffers = [b.clone() for b in training.model.buffers()]
        return State([p.detach().clone() for p in parameters], buffers, moments, count)

    @torch.no_grad()
    def load(self, training: Training) -> None:
        """Put an engine there, in place, for graphs know its tensors by address."""
        parameters = list(training.model.parameters())
        for t, value in zip(parameters, self.parameters, strict=True):
            t.copy_(value)
        for t, value in zip(training.model.buffers(), self.buffers, strict=True):
            t.copy_(value)
        for i, known in enumerate(map(training.state_of, parameters)):
            if "exp_avg" in known:
                for t, value in zip(("exp_avg", "exp_avg_sq"), self.moments[i], strict=True):
                    known[t].copy_(value)
                known["step"].fill_(self.count)


@dataclass(frozen=True)
class Step:
    """What one step gave; `off` is how far Adam was from what it makes of these gradients."""

    loss: Tensor
    gradients: list[Tensor]
    buffers: list[Tensor]
    off: float


def one_step(training: Training, state: State, batch: Batch) -> Step:
    state.load(training)
    loss = training.call(*batch).detach().clone()
    buffers = [now - old for now, old in zip(training.model.buffers(), state.buffers, strict=True)]
    if training.optimizer is None:
        parameters = training.model.parameters()
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        return Step(loss, gradients, buffers, 0.0)
    return Step(loss, *_of_adam(training, state, buffers))


def _of_adam(
    training: Training, state: State, buffers: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], float]:
    """The gradients as Adam's first moment tells them; each engine has that, and in one place."""
    first, second = BETAS
    count = state.count + 1
    gradients: list[Tensor] = []
    found: list[list[Tensor]] = [[], [], []]
    expected: list[list[Tensor]] = [[], [], []]
    for i, p in enumerate(training.model.parameters()):
        known = training.state_of(p)
        if i not in state.moments:
            continue
        if "exp_avg" not in known:
            return [], buffers, math.nan
        m, v = (t.double() for t in state.moments[i])
        mean = known["exp_avg"].double()
        gradient = (mean - first * m) / (1 - first)
        square = second * v + (1 - second) * gradient.square()
        scale = (square / (1 - second**count)).sqrt() + EPS
        gradients.append(gradient.float())
        found[0].append(p.detach().double() - state.parameters[i].double())
        expected[0].append(-LEARNING_RATE / (1 - first**count) * mean / scale)
        found[1].append(known["exp_avg_sq"].clone())
        expected[1].append(square)
        found[2].append(known["step"].double())
        expected[2].append(torch.full_like(found[2][-1], count))
    return gradients, buffers, _worst(map(relative_error, found, expected))


def _worst(errors: Any) -> float:
    """The largest, NaN where one is."""
    known = list(errors)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


class Reference:
    """Steps of eager training, and what float64 makes of each."""

    def __init__(self, part: str, model: nn.Module, batches: Sequence[Batch]) -> None:
        wide = [(x.double() if x.is_floating_point() else x, y) for x, y in batches]
        eager = self._eager(part, copy.deepcopy(model), batches[0])
        exact = self._eager(part, copy.deepcopy(model).double(), wide[0])
        self._cases: list[tuple[State, Batch, Step]] = []
        state = State.of(Training(lambda x, y: x, model), 0)
        known = State.of(eager, 0).moments.items()
        zeros = {i: (torch.zeros_like(m), torch.zeros_like(v)) for i, (m, v) in known}
        state = State(state.parameters, state.buffers, zeros, 0)
        for i in range(STEPS):
            truth = one_step(exact, state, wide[i % len(wide)])
            gradients = [g.float() for g in truth.gradients]
            kept = Step(truth.loss, gradients, truth.buffers, truth.off)
            self._cases.append((state, batches[i % len(batches)], kept))
            one_step(eager, state, batches[i % len(batches)])
            state = State.of(eager, i + 1)
        self.eager = self.errors(eager)

    @staticmethod
    def _eager(part: str, model: nn.Module, batch: Batch) -> Training:
        optimizer = adam(model) if part == "step" else None
        call = whole_step(model, optimizer) if optimizer else forward_backward(model, model)
        call(*batch)  # the optimizer makes its state
        return Training(call, model, optimizer)

    def errors(self, training: Training) -> Errors:
        """How far an engine is from float64 in each that is `CHECKED`, relative, at worst."""
        losses: list[Tensor] = []
        gradients: list[float] = []
        updates: list[float] = []
        buffers: list[float] = []
        for state, batch, truth in self._cases:
            found = one_step(training, state, batch)
            losses.append(found.loss)
            same = len(found.gradients) == len(truth.gradients)
            gradients.append(relative_error(found.gradients, truth.gradients) if same else math.nan)
            updates.append(found.off)
            buffers.append(relative_error(found.buffers, truth.buffers))
        expected = [truth.loss for *_, truth in self._cases]
        return (
            relative_error(losses, expected),
            _worst(gradients),
            _worst(updates),
            _worst(buffers),
        )

    def judge(self, training: Training) -> tuple[float, str | None]:
        """The largest error of an engine, and what is wrong, if anything is."""
        errors = self.errors(training)
        wrong: list[str] = []
        for name, error, eagers in zip(CHECKED, errors, self.eager, strict=True):
            allowed = min(LOOSEST, max(TIGHTEST, EAGER_FACTOR * eagers))
            if not error <= allowed:  # a NaN too
                wrong.append(f"of the {name} {error:.1e}, allowed {allowed:.1e}")
        return _worst(errors), f"relative error {'; '.join(wrong)}" if wrong else None

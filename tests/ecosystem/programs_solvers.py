"""Differential equations: fixed steps, as torchdiffeq's `rk4` takes them, and adaptive ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .harness import Run, inference, training

Field = Callable[[Tensor, Tensor], Tensor]


class Dynamics(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width + 1, 16), nn.Tanh(), nn.Linear(16, width))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, t.expand(len(y), 1)], -1))


def rk4(f: Field, y: Tensor, times: Tensor) -> Tensor:
    """The states at all times, one step between two of them."""
    states = [y]
    for start, end in itertools.pairwise(times):
        h = end - start
        k1 = f(start, y)
        k2 = f(start + h / 2, y + h * k1 / 2)
        k3 = f(start + h / 2, y + h * k2 / 2)
        k4 = f(end, y + h * k3)
        y = y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        states.append(y)
    return torch.stack(states)


def dynamics(run: Run) -> Dynamics:
    torch.manual_seed(0)
    return Dynamics().to(run.device)


@inference(recordings=1)
def states_at_times_that_change(run: Run) -> None:
    """Times are an argument: as many of them as before, whatever they are."""
    model = dynamics(run)
    solve = run.graph(lambda y, times: rk4(model, y, times))
    with torch.no_grad():
        for i in range(8):
            run.see(solve(run.rand(i, 3, 4), torch.linspace(0, 1 + i, 6, device=run.device)))


@training()
def a_neural_ode(run: Run) -> None:
    model = dynamics(run)
    solve = run.graph(lambda y, times: rk4(model, y, times))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(9):
        optimizer.zero_grad()
        times = torch.linspace(0, 1 + i / 9, 5, device=run.device)
        loss = (solve(run.rand(i, 6, 4), times) - run.rand(50 + i, 5, 6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training(recordings=1)
def a_neural_ode_as_a_whole_step(run: Run) -> None:
    model = dynamics(run)
    times = torch.linspace(0, 1, 5, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    @run.graph
    def step(y: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (rk4(model, y, times)[-1] - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(9):
        run.see(step(run.rand(i, 6, 4), run.rand(50 + i, 6, 4)))
    run.see(model)


class Adaptive(nn.Module):
    """Heun's method, whose step is halved until its error is small: a branch on a value."""

    def __init__(self, dynamics: nn.Module) -> None:
        super().__init__()
        self.dynamics = dynamics

    def forward(self, y: Tensor, times: Tensor) -> Tensor:
        t, end = times[0], times[-1]
        h = (end - t) / 4
        while t < end:
            h = torch.minimum(h, end - t)
            k = self.dynamics(t, y)
            error = (self.dynamics(t + h, y + h * k) - k) * h / 2
            if error.abs().max() > 0.02:
                h = h / 2
                continue
            y, t = y + h * k + error, t + h
        return y


def _solved(run: Run, solve: Callable[[Tensor, Tensor], Tensor]) -> None:
    times = torch.linspace(0, 1, 2, device=run.device)
    with torch.no_grad():
        for i in range(5):
            run.see(solve(run.rand(i, 3, 4), times))


@inference(refused={"cpu": "OL101", "cuda": "OL101"})
def adaptive_steps_are_refused(run: Run) -> None:
    _solved(run, run.graph(Adaptive(dynamics(run))))


@inference()
def adaptive_steps_of_graphed_dynamics(run: Run) -> None:
    _solved(run, Adaptive(run.graph(dynamics(run))))

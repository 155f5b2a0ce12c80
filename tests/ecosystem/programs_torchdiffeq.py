"""Differential equations with torchdiffeq: the function that its solvers call is graphed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchdiffeq import odeint, odeint_adjoint

from .harness import Run, inference, training
from .programs_solvers import dynamics

CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}


def _times(run: Run) -> Tensor:
    return torch.linspace(0, 1, 4, device=run.device)


def _solved(run: Run, method: str) -> None:
    f = run.graph(dynamics(run))
    with torch.no_grad():
        for i in range(4):
            run.see(odeint(f, run.rand(i, 6, 4), _times(run), method=method, **CLOSE))


@inference(replays=40, recordings=1)
def states_by_rk4_of_torchdiffeq(run: Run) -> None:
    _solved(run, "rk4")


@inference(replays=40, recordings=1)
def states_by_dopri5_of_torchdiffeq(run: Run) -> None:
    _solved(run, "dopri5")


def _trained(run: Run, solve: Any, method: str, **options: Any) -> None:
    model = dynamics(run)
    f = run.graph(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(6):
        optimizer.zero_grad()
        states = solve(f, run.rand(i, 6, 4), _times(run), method=method, **CLOSE)
        loss = (states - run.rand(50 + i, 4, 6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training(replays=60, recordings=2)
def a_neural_ode_by_rk4_and_its_adjoint(run: Run) -> None:
    _trained(run, odeint_adjoint, "rk4")


@training(replays=60, recordings=2)
def a_neural_ode_by_dopri5_and_its_adjoint(run: Run) -> None:
    _trained(run, odeint_adjoint, "dopri5")


@training(replays=40, recordings=16)
def a_neural_ode_by_all_forwards_of_rk4(run: Run) -> None:
    """Twelve forwards, three steps of four, wait for one backward."""
    _trained(run, odeint, "rk4", max_in_flight=12)


@training(replays=40, recordings=64)
def a_neural_ode_by_all_forwards_of_dopri8(run: Run) -> None:
    """Its stages are written into one tensor, so that their gradients are mostly gaps."""
    _trained(run, odeint, "dopri8", max_in_flight=64)

"""Inference with torch alone: ensembles, casts, kinds of results, hooks, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Run, inference
from .programs_training import MiniGPT, mlp


@inference()
def an_ensemble_by_vmap(run: Run) -> None:
    models = [mlp(run, dropout=0.0).eval() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    template = copy.deepcopy(models[0]).to("meta")

    def one(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(template, (params, buffers), (x,))

    fast = run.graph(torch.func.vmap(one, in_dims=(0, 0, None)))
    with torch.no_grad():
        for i in range(8):
            run.see(fast(params, buffers, run.rand(i, 6, 8)))


@inference()
def jacobians_by_jacrev(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(run.device)
    model.requires_grad_(False)
    fast = run.graph(torch.func.vmap(torch.func.jacrev(lambda x: model(x))))
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.rand(i, 5, 4)))


@inference()
def forces_by_autograd_inside(run: Run) -> None:
    """A potential energy and its gradient, as molecular dynamics asks for."""
    model = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1)).to(run.device)
    model.requires_grad_(False)

    @run.graph
    def energy_and_forces(places: Tensor) -> tuple[Tensor, Tensor]:
        places = places.detach().requires_grad_()
        gaps = places[:, None] - places[None]
        energy = model(gaps).sum() + gaps.square().sum()
        (slope,) = torch.autograd.grad(energy, places)
        return energy.detach(), -slope

    places, speed = run.rand(0, 5, 3), torch.zeros(5, 3, device=run.device)
    for _ in range(9):
        energy, forces = energy_and_forces(places)
        speed = speed + 0.01 * forces
        places = places + 0.01 * speed
        run.see(energy, places)


@inference()
def int8_weights_by_hand(run: Run) -> None:
    class Int8Linear(nn.Module):
        weight: Tensor
        scale: Tensor

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)
            self.bias = linear.bias

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)

    model = mlp(run).eval()
    model[0], model[4] = Int8Linear(model[0]), Int8Linear(model[4])
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.rand(i, 6, 8)))


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


@inference(recordings=4)
def test_time_augmentation(run: Run) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    fast = run.graph(model.to(run.device).eval())
    with torch.no_grad():
        for i in range(6):
            x = run.rand(i, 2, 3, 8, 8)
            views = [x, x.flip(-1), x.transpose(-1, -2), torch.rot90(x, 2, (-2, -1))]
            run.see(torch.stack([fast(v) for v in views]).mean(0))


@inference(refused={"cpu": "OL102", "cuda": "OL102"})
def boxes_that_depend_on_data_are_refused(run: Run) -> None:
    @run.graph
    def keep(boxes: Tensor, scores: Tensor) -> Tensor:
        return boxes[scores > 0.5]

    with torch.no_grad():
        for i in range(6):
            run.see(keep(run.rand(i, 9, 4), run.rand(i, 9)))


@inference(recordings=4, refused={"cpu": "OL101"})
def k_means_by_hand(run: Run) -> None:
    """On a CPU `one_hot` reads the largest class on the host."""
    points = run.rand(0, 60, 4)

    @run.graph
    def lloyd(centres: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(points, centres).argmin(1)
        chosen = F.one_hot(nearest, 5).to(points.dtype)
        return (chosen.T @ points) / chosen.sum(0).clamp(min=1)[:, None], nearest

    centres = points[:5].clone()
    for _ in range(9):
        centres, nearest = lloyd(centres)
        run.see(centres, nearest)


@inference(refused={"cpu": "OL101", "cuda": "OL101"})
def a_kalman_filter_that_checks_its_inverse_is_refused(run: Run) -> None:
    _kalman(run, torch.linalg.inv)


@inference()
def a_kalman_filter(run: Run) -> None:
    _kalman(run, lambda a: torch.linalg.inv_ex(a).inverse)


def _kalman(run: Run, inv: Callable[[Tensor], Tensor]) -> None:
    move = torch.eye(4, device=run.device) + 0.1 * torch.eye(4, device=run.device).roll(2, 1)
    look = torch.eye(2, 4, device=run.device)
    noise = 0.01 * torch.eye(4, device=run.device)

    @run.graph
    def update(mean: Tensor, cov: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        mean, cov = move @ mean, move @ cov @ move.T + noise
        gain = cov @ look.T @ inv(look @ cov @ look.T + noise[:2, :2])
        return mean + gain @ (z - look @ mean), cov - gain @ look @ cov

    mean, cov = torch.zeros(4, device=run.device), torch.eye(4, device=run.device)
    for i in range(10):
        mean, cov = update(mean, cov, run.rand(i, 2))
        run.see(mean, cov)


@inference()
def beam_search_with_fixed_beams(run: Run) -> None:
    model = MiniGPT().to(run.device).eval()

    @run.graph
    def expand(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = F.log_softmax(model(ids)[0][:, -1], -1) + scores[:, None]
        best, flat = log_probs.flatten().topk(3)
        parents = torch.div(flat, 40, rounding_mode="floor")
        ids = torch.cat([ids[parents][:, 1:], (flat % 40)[:, None]], 1)
        return ids, best

    ids = run.ints(0, 40, 1, 6).repeat(3, 1)
    scores = torch.tensor([0.0, -1e4, -1e4], device=run.device)
    with torch.inference_mode():
        for _ in range(9):
            ids, scores = expand(ids, scores)
            run.see(ids, scores)

"""Inference with torch alone: ensembles, casts, kinds of results, hooks, refusals."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol

from .harness import Run, inference
from .programs_training import MiniGPT, Residual, mlp


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
def weights_swapped_by_functional_call(run: Run) -> None:
    model = mlp(run).eval()
    other = {k: v.detach() * 1.5 for k, v in model.named_parameters()}
    mine = {k: v.detach() for k, v in model.named_parameters()}
    fast = run.graph(lambda weights, x: torch.func.functional_call(model, weights, (x,)))
    with torch.no_grad():
        for i in range(10):
            run.see(fast((mine, other)[i % 2], run.rand(i, 6, 8)))


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
def bfloat16_weights(run: Run) -> None:
    fast = run.graph(MiniGPT().to(run.device, torch.bfloat16).eval())
    with torch.inference_mode():
        for i in range(7):
            run.see(fast(run.ints(i, 40, 2, 12))[0].float())


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


@inference(recordings=4)
def autocast_switched_on_and_off(run: Run) -> None:
    fast = run.graph(MiniGPT().to(run.device).eval())
    with torch.no_grad():
        for i in range(12):
            with torch.autocast(run.device.type, torch.bfloat16, enabled=bool(i % 2)):
                run.see(fast(run.ints(i, 40, 2, 12))[0])


@dataclasses.dataclass
class Detection:
    boxes: Tensor
    scores: Tensor
    labels: tuple[str, ...] = ("cat", "dog")
    image_id: int = 0


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


@inference(recordings=8)
def a_dataclass_of_results(run: Run) -> None:
    body = nn.Linear(8, 6).to(run.device)

    @run.graph
    def detect(x: Tensor, image_id: int) -> Detection:
        y = body(x)
        return Detection(y[:, :4].sigmoid(), y[:, 4:].softmax(-1), image_id=image_id)

    with torch.no_grad():
        for i in range(14):
            run.see(detect(run.rand(i, 3, 8), i % 2))


@inference()
def named_tuples_and_nested_dicts(run: Run) -> None:
    body = nn.Linear(8, 6).to(run.device)

    @run.graph
    def features(batch: dict[str, Any]) -> collections.OrderedDict[str, Any]:
        y = body(batch["image"]) * batch["weights"][0]
        result: collections.OrderedDict[str, Any] = collections.OrderedDict()
        result["stats"] = Pair(y.mean(0), y.std(0))
        result["levels"] = [y, {"half": y[:, ::2], "same": batch["image"]}]
        return result

    with torch.no_grad():
        for i in range(8):
            run.see(
                features({"image": run.rand(i, 3, 8), "weights": [run.rand(i + 1, 3, 1), None]})
            )


@inference(recordings=2)
def monte_carlo_dropout(run: Run) -> None:
    model = mlp(run, dropout=0.5).eval()
    for layer in model:
        if isinstance(layer, nn.Dropout):
            layer.train()
    fast = run.graph(model)
    x = run.rand(0, 6, 8)
    with torch.no_grad():
        draws = torch.stack([fast(x) for _ in range(12)])
    run.see(draws.mean(0), draws.std(0))


@inference(recordings=4)
def test_time_augmentation(run: Run) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    fast = run.graph(model.to(run.device).eval())
    with torch.no_grad():
        for i in range(6):
            x = run.rand(i, 2, 3, 8, 8)
            views = [x, x.flip(-1), x.transpose(-1, -2), torch.rot90(x, 2, (-2, -1))]
            run.see(torch.stack([fast(v) for v in views]).mean(0))


@inference()
def feature_extraction_by_a_hook(run: Run) -> None:
    """The hook is on the graphed module itself, so it runs at each call."""
    fast = run.graph(mlp(run).eval())
    features: list[Tensor] = []
    handle = fast.register_forward_hook(lambda module, args, out: features.append(out.norm()))
    with torch.no_grad():
        for i in range(8):
            fast(run.rand(i, 6, 8))
    handle.remove()
    run.see(torch.stack(features))


@inference(warns=("OL308",))
def activations_kept_by_hooks_inside(run: Run) -> None:
    """A dict that hooks of submodules fill gets the tensors of each call."""
    model = mlp(run).eval()
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            kept[name] = out

        return hook

    for name, layer in model.named_children():
        layer.register_forward_hook(keep(name))
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(8):
            fast(run.rand(i, 6, 8))
            run.see(kept)


@inference()
def a_partial_with_constants(run: Run) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, heads: int, causal: bool) -> Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    fast = run.graph(functools.partial(attend, heads=2, causal=True))
    with torch.no_grad():
        for i in range(8):
            run.see(fast(*(run.rand(i + k, 2, 6, 8) for k in range(3))))


@inference(recordings=4)
def layers_skipped_by_a_flag(run: Run) -> None:
    class Exiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(8) for _ in range(4)])
            self.depth = 4

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[: self.depth]:
                x = block(x)
            return x

    model = Exiting().to(run.device).eval()
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(18):
            model.depth = 4 if i < 6 or i > 11 else 2
            run.see(fast(run.rand(i, 3, 8)))


@inference(refused={"cpu": "OL101", "cuda": "OL101"})
def early_exit_by_confidence_is_refused(run: Run) -> None:
    first, second = nn.Linear(8, 3).to(run.device), nn.Linear(8, 3).to(run.device)

    @run.graph
    def classify(x: Tensor) -> Tensor:
        scores = first(x).softmax(-1)
        if scores.max() > 0.9:
            return scores
        return second(x).softmax(-1)

    with torch.no_grad():
        for i in range(6):
            run.see(classify(run.rand(i, 3, 8)))


@inference(refused={"cpu": "OL102", "cuda": "OL102"})
def boxes_that_depend_on_data_are_refused(run: Run) -> None:
    @run.graph
    def keep(boxes: Tensor, scores: Tensor) -> Tensor:
        return boxes[scores > 0.5]

    with torch.no_grad():
        for i in range(6):
            run.see(keep(run.rand(i, 9, 4), run.rand(i, 9)))


@inference(warns=("OL102",))
def a_refusal_that_runs_eagerly(run: Run) -> None:
    @run.graph(on_refusal="eager")
    def keep(boxes: Tensor, scores: Tensor) -> Tensor:
        return boxes[scores > 0.5]

    head = run.graph(nn.Linear(4, 2).to(run.device))
    with torch.no_grad():
        for i in range(8):
            run.see(keep(head.weight.expand(2, 2, 4).flatten(0, 1), run.rand(i, 4)))
            run.see(head(run.rand(i, 9, 4)))


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


@inference(recordings=2)
def buckets_over_batch_sizes(run: Run) -> None:
    model = mlp(run).eval()
    fast = run.graph(model, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    with torch.no_grad():
        for i in range(20):
            run.see(fast(run.rand(i, 1 + i % 8, 8)).argmax(-1))


@inference()
def weights_updated_in_place_between_calls(run: Run) -> None:
    model = mlp(run).eval()
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(10):
            run.see(fast(run.rand(i, 6, 8)))
            model[0].weight.mul_(0.9)
            model.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()})


@inference(recordings=4)
def a_module_moved_to_double_and_back(run: Run) -> None:
    model = mlp(run).eval()
    fast = run.graph(model)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)
            for i in range(5):
                run.see(fast(run.rand(i, 6, 8).to(dtype)))

"""Training where the whole step is graphed, and updates of reinforcement learning."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol

from .harness import Run, training
from .programs_training import MiniGPT, labelled, mlp


@training(recordings=1)
def a_trainer_whose_log_grows(run: Run) -> None:
    """The step reads one attribute of an object and leaves its list alone."""

    class Trainer:
        def __init__(self) -> None:
            self.kind = run.device.type
            self.history: list[float] = []

    trainer = Trainer()
    model = MiniGPT(dropout=0.0).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    @run.graph
    def step(ids: Tensor) -> Tensor:
        with torch.autocast(trainer.kind, dtype=torch.bfloat16, enabled=False):
            _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(9):
        trainer.history.append(step(run.ints(i, 40, 2, 17)).item())
    run.see(trainer.history, model)


@training()
def maml_with_an_inner_step(run: Run) -> None:
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).to(run.device)
    optimizer = ol.capturable(torch.optim.Adam(model.parameters(), lr=1e-2))

    @run.graph
    def step(x: Tensor, y: Tensor, x_new: Tensor, y_new: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        outer = F.mse_loss(torch.func.functional_call(model, adapted, (x_new,)), y_new)
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        return outer.detach()

    for i in range(9):
        x, x_new = run.rand(i, 8, 1), run.rand(i + 20, 8, 1)
        run.see(step(x, (x + i).sin(), x_new, (x_new + i).sin()))
    run.see(model)


@training()
def an_ensemble_trained_by_vmap(run: Run) -> None:
    models = [nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)) for _ in range(3)]
    params, _ = torch.func.stack_module_state([m.to(run.device) for m in models])
    params = {k: p.detach().requires_grad_() for k, p in params.items()}
    template = copy.deepcopy(models[0]).to(run.device)
    optimizer = ol.capturable(torch.optim.Adam(list(params.values()), lr=1e-2))

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(template, weights, (x,)), y)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = torch.func.vmap(one, in_dims=(0, None, None))(params, x, y)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    for i in range(9):
        run.see(step(*labelled(run, i)))
    run.see(params)


@training()
def per_sample_gradients(run: Run) -> None:
    """Differentially private SGD: each sample's gradient is clipped, then noise."""
    model = nn.Linear(8, 3).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (x[None],))
        return F.cross_entropy(logits, y[None])

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        weights = {k: p.detach() for k, p in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (1.0 / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            g = torch.einsum("b,b...->...", scale, grads[name])
            p.grad = (g + 0.1 * torch.randn_like(g)) / len(x)
        optimizer.step()
        return norms

    for i in range(9):
        run.see(step(*labelled(run, i)))
    run.see(model)


@training()
def hogwild_style_shared_replicas(run: Run) -> None:
    """Two workers' gradients averaged by hand into one model."""
    model = mlp(run, dropout=0.0)
    workers = [copy.deepcopy(model) for _ in range(2)]
    optimizer = ol.capturable(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for worker, part, target in zip(workers, x.chunk(2), y.chunk(2), strict=True):
            worker.zero_grad()
            loss = F.cross_entropy(worker(part), target)
            loss.backward()
            losses.append(loss.detach())
        for p, *others in zip(model.parameters(), *(w.parameters() for w in workers), strict=True):
            p.grad = torch.stack([o.grad for o in others]).mean(0)
        optimizer.step()
        with torch.no_grad():
            for worker in workers:
                for p, o in zip(model.parameters(), worker.parameters(), strict=True):
                    o.copy_(p)
        return torch.stack(losses)

    for i in range(9):
        run.see(step(*labelled(run, i)))
    run.see(model, workers)

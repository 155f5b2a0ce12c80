"""Training where the whole step is graphed, and updates of reinforcement learning."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol

from .harness import Run, training
from .programs_training import MiniGPT, labelled, mlp


@training()
def adam_inside(run: Run) -> None:
    model = mlp(run)
    optimizer = ol.capturable(torch.optim.Adam(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for i in range(10):
        run.see(step(*labelled(run, i)).item())
        schedule.step()
    run.see(model, optimizer.state_dict())


@training(refused={"cpu": "OL120", "cuda": "OL120"})
def adam_as_it_comes_is_refused(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for i in range(8):
        run.see(step(*labelled(run, i)))


@training()
def sgd_with_nesterov_and_clipping_inside(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    @run.graph
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss.detach(), "norm": norm}

    for i in range(10):
        run.see(step(*labelled(run, i)))
    run.see(model)


@training()
def a_trainer_class_with_a_graphed_method(run: Run) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp(run)
            self.optimizer = ol.capturable(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
            self.global_step = 0
            self.history: list[float] = []
            self.train_step = run.graph(self.train_step)

        def train_step(self, x: Tensor, y: Tensor) -> Tensor:
            self.model.train()
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        def fit(self, steps: int) -> None:
            for i in range(steps):
                loss = self.train_step(*labelled(run, i))
                self.global_step += 1
                self.history.append(loss.item())

    trainer = Trainer()
    trainer.fit(10)
    run.see(trainer.history, trainer.global_step, trainer.model)


@training()
def a_trainer_that_counts_inside_its_graphed_step(run: Run) -> None:
    """`global_step` is only counted: eager and replays count alike."""

    class Trainer:
        def __init__(self) -> None:
            self.model = mlp(run)
            self.optimizer = ol.capturable(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
            self.global_step = 0
            self.training_step = run.graph(self.training_step)

        def training_step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.global_step += 1
            return loss.detach()

    trainer = Trainer()
    for i in range(10):
        run.see(trainer.training_step(*labelled(run, i)), trainer.global_step)
    run.see(trainer.model)


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
def bfloat16_autocast_inside(run: Run) -> None:
    model = MiniGPT(dropout=0.0).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    kind = run.device.type

    @run.graph
    def step(ids: Tensor) -> Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16):
            _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for i in range(9):
        run.see(step(run.ints(i, 40, 2, 17)))
    run.see(model)


@training()
def a_scaler_inside_with_a_fused_optimizer(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=256.0, growth_interval=3)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(run.device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for i in range(10):
        x, y = labelled(run, i)
        run.see(step(x * 1e6 if i == 7 else x, y), scaler.get_scale())
    run.see(model)


@training(refused={"cpu": "OL121", "cuda": "OL121"})
def a_scaler_inside_with_an_ordinary_optimizer(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=256.0)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(run.device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for i in range(8):
        run.see(step(*labelled(run, i)))


@training()
def gradients_accumulated_over_calls(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @run.graph
    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        return loss.detach()

    for i in range(20):
        run.see(accumulate(*labelled(run, i)))
        if i % 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    run.see(model)


@training()
def microbatches_in_one_step(run: Run) -> None:
    model = mlp(run, dropout=0.0)
    optimizer = ol.capturable(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), target) / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    for i in range(9):
        run.see(step(*labelled(run, i)))
    run.see(model)


@training()
def a_moving_average_inside(run: Run) -> None:
    model = mlp(run)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = ol.capturable(torch.optim.Adam(model.parameters(), lr=1e-2))
    mine, its = list(model.parameters()), list(average.parameters())

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(its, mine, 0.1)
        return loss.detach()

    for i in range(9):
        run.see(step(*labelled(run, i)), average)


@training(warns=("OL308",))
def optimizers_that_step_in_the_backward(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(run.device)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    for i in range(9):
        run.see(step(*labelled(run, i)))
    run.see(model)


@training()
def an_optimizer_of_ones_own(run: Run) -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, beta: float, decay: float) -> None:
            super().__init__(params, {"lr": lr, "beta": beta, "decay": decay})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    if "average" not in self.state[p]:
                        self.state[p]["average"] = torch.zeros_like(p)
                    average = self.state[p]["average"]
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(torch.sign(average.lerp(p.grad, 0.1)), alpha=-group["lr"])
                    average.lerp_(p.grad, 1 - group["beta"])

    model = mlp(run)
    optimizer = Lion(model.parameters(), 1e-2, 0.9, 0.1)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(12):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
        run.see(step(*labelled(run, i)))
    run.see(model)


@training(refused={"cpu": "OL101", "cuda": "OL101"})
def a_loss_read_inside_is_refused(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    @run.graph
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for i in range(8):
        step(*labelled(run, i))
    run.see(losses)


@training(refused={"cpu": "OL101", "cuda": "OL101"})
def a_nan_check_inside_is_refused(run: Run) -> None:
    model = mlp(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        return loss.detach()

    for i in range(8):
        run.see(step(*labelled(run, i)))


@training()
def a_double_backward_inside(run: Run) -> None:
    """WGAN-GP: the gradient of a gradient, all in one step."""
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(run.device)
    optimizer = ol.capturable(torch.optim.Adam(critic.parameters(), lr=1e-3))

    @run.graph
    def step(real: Tensor, fake: Tensor) -> Tensor:
        mix = torch.rand(len(real), 1, device=real.device)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(9):
        run.see(step(run.rand(i, 16, 8), run.rand(i + 50, 16, 8)))
    run.see(critic)


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

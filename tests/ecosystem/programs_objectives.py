"""Training loops of many objectives: generative, contrastive, adversarial, by other optimizers."""

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
def variational_autoencoder(run: Run) -> None:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 12), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, logvar = self.encoder(x).chunk(2, -1)
            z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
            return self.decoder(z), mean, logvar

    model = VAE().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(8):
        x = run.rand(i, 16, 8)
        again, mean, logvar = fast(x)
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1).mean()
        loss = F.mse_loss(again, x, reduction="sum") / len(x) + min(1.0, i / 5) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss, again)
    run.see(model)


@training(recordings=8)
def generative_adversarial_networks(run: Run) -> None:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(run.device)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(run.device)
    fast_generator, fast_critic = run.graph(generator), run.graph(critic)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loss_fn = nn.BCEWithLogitsLoss()
    for i in range(10):
        real = run.rand(i, 16, 8)
        fake = fast_generator(torch.randn(16, 4, device=run.device))
        of_critic.zero_grad()
        scores, doubted = fast_critic(real), fast_critic(fake.detach())
        loss_of_critic = loss_fn(scores, torch.ones_like(scores))
        loss_of_critic = loss_of_critic + loss_fn(doubted, torch.zeros_like(doubted))
        loss_of_critic.backward()
        of_critic.step()
        of_generator.zero_grad()
        believed = fast_critic(fake)
        loss_of_generator = loss_fn(believed, torch.ones_like(believed))
        loss_of_generator.backward()
        of_generator.step()
        run.see(loss_of_critic, loss_of_generator)
    run.see(generator, critic)


@training()
def siamese_contrastive_pairs(run: Run) -> None:
    model = mlp(run, outputs=6, dropout=0.0)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(10):
        x, near, same = run.rand(i, 16, 8), run.rand(i + 50, 16, 8), run.ints(i, 2, 16)
        a, b = fast(x), fast(near)  # two forwards before their backward
        distance = F.pairwise_distance(a, b)
        loss = (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def simclr_with_a_temperature(run: Run) -> None:
    model = mlp(run, outputs=6)
    fast = run.graph(model)
    temperature = nn.Parameter(torch.tensor(0.5, device=run.device))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
    for i in range(8):
        x = run.rand(i, 8, 8)
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        z = F.normalize(fast(views), dim=-1)
        scores = z @ z.T / temperature
        scores = scores.masked_fill(torch.eye(16, dtype=torch.bool, device=run.device), -1e9)
        loss = F.cross_entropy(scores, (torch.arange(16, device=run.device) + 8) % 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss, temperature)
    run.see(model)


@training()
def byol_with_a_momentum_target(run: Run) -> None:
    online, target = mlp(run, outputs=6), None
    target = copy.deepcopy(online).requires_grad_(False)
    predictor = nn.Linear(6, 6).to(run.device)
    fast_online, fast_target = run.graph(online), run.graph(target)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.1)
    for i in range(8):
        x, other = run.rand(i, 16, 8), run.rand(i + 70, 16, 8)
        p = F.normalize(predictor(fast_online(x)), dim=-1)
        with torch.no_grad():
            z = F.normalize(fast_target(other), dim=-1)
        loss = 2 - 2 * (p * z).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(online.parameters(), target.parameters(), strict=True):
                its.lerp_(mine, 0.05)
        run.see(loss)
    run.see(online, target, predictor)


@training()
def distillation(run: Run) -> None:
    teacher = mlp(run).eval().requires_grad_(False)
    student = mlp(run)
    fast_teacher, fast_student = run.graph(teacher), run.graph(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for i in range(8):
        x, y = labelled(run, i)
        with torch.inference_mode():
            wanted = F.softmax(fast_teacher(x) / 2, -1)
        logits = fast_student(x)
        loss = F.kl_div(F.log_softmax(logits / 2, -1), wanted.clone(), reduction="batchmean")
        loss = 4 * loss + 0.1 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss, wanted)
    run.see(student, teacher)


@training(recordings=6)
def multi_task_heads_in_turn(run: Run) -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 16)
            self.heads = nn.ModuleDict({"a": nn.Linear(16, 3), "b": nn.Linear(16, 2)})

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.heads[task](self.body(x).relu())

    model = Tasks().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(14):
        task = "ab"[i % 2]
        x, y = run.rand(i, 16, 8), run.ints(i, 3 - i % 2, 16)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x, task), y)
        loss.backward()
        optimizer.step()
        run.see(loss, [p.grad for p in model.parameters()])
    run.see(model)


@training(recordings=6)
def sharpness_aware_minimisation(run: Run) -> None:
    """Two forwards and backwards for each step, the second at other weights."""
    model = mlp(run, dropout=0.0)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(8):
        x, y = labelled(run, i)
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        with torch.no_grad():
            grads = [p.grad.clone() for p in model.parameters()]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p, g in zip(model.parameters(), grads, strict=True):
                p.add_(0.05 * g / norm)
        optimizer.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(0.05 * g / norm)
        optimizer.step()
        optimizer.zero_grad()
        run.see(loss)
    run.see(model)


class Snake(torch.autograd.Function):
    """An activation with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.a = a
        return x + torch.sin(a * x) ** 2 / a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (1 + torch.sin(2 * ctx.a * x)), None


@training()
def an_autograd_function_of_ones_own(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.a = nn.Linear(8, 16), nn.Linear(16, 3), 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Snake.apply(self.first(x), self.a))

    model = Net().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(12):
        if i == 6:
            model.a = 0.5
        x, y = labelled(run, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training(recordings=12)
def progressive_resizing(run: Run) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for size in (8, 12, 8):
        for i in range(5):
            x, y = run.rand(i, 4, 3, size, size), run.ints(i, 3, 4)
            optimizer.zero_grad()
            loss = F.cross_entropy(fast(x), y)
            loss.backward()
            optimizer.step()
            run.see(loss)
    run.see(model)


@training(recordings=6)
def early_stopping_with_validation(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    best, weights, bad = float("inf"), None, 0
    held_out = labelled(run, 99)
    for i in range(12):
        fast.train()
        x, y = labelled(run, i % 3)
        optimizer.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        optimizer.step()
        fast.eval()
        with torch.no_grad():
            score = F.cross_entropy(fast(held_out[0]), held_out[1]).item()
        schedule.step(score)
        if score < best:
            best, weights, bad = score, copy.deepcopy(model.state_dict()), 0
        else:
            bad += 1
        run.see(score, bad, schedule.get_last_lr())
    assert weights is not None
    model.load_state_dict(weights)
    with torch.no_grad():
        run.see(fast(held_out[0]), best)


@training(recordings=2)
def lbfgs_with_a_closure(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    x, y = labelled(run, 0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        return loss

    for _ in range(4):
        run.see(optimizer.step(closure).item())
    run.see(model)


@training()
def meta_learning_with_functional_call(run: Run) -> None:
    """Reptile: a few steps on each task, then the weights move towards where these led."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(run.device)
    fast = run.graph(model)
    for task in range(4):
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i in range(3):
            x = run.rand(10 * task + i, 16, 1)
            loss = F.mse_loss(fast(x), torch.sin(x + task))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.see(loss)
        after = model.state_dict()
        model.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})
    run.see(model)


@training(recordings=6)
def curriculum_of_sequence_lengths(run: Run) -> None:
    model = MiniGPT(dropout=0.0).to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in range(12):
        ids = run.ints(i, 40, 2, 9 if i < 6 else 17)
        _, loss = fast(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training(recordings=6)
def alternating_generator_and_critic_steps(run: Run) -> None:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(run.device)
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(run.device)
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    if run.device.type != "cpu":
        ol.capturable(of_generator)
        ol.capturable(of_critic)

    @run.graph
    def critic_step(real: Tensor) -> Tensor:
        fake = generator(torch.randn(16, 4, device=real.device)).detach()
        loss = critic(fake).mean() - critic(real).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        return loss.detach()

    @run.graph
    def generator_step() -> Tensor:
        loss = -critic(generator(torch.randn(16, 4, device=run.device))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        return loss.detach()

    for i in range(12):
        run.see(critic_step(run.rand(i, 16, 8)))
        if i % 2:
            run.see(generator_step())
    run.see(generator, critic)

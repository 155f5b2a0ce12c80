"""Reinforcement learning: updates as steps, and around a graphed model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

import onelaunch as ol

from .harness import Run, training


@training(recordings=6)
def deep_q_learning(run: Run) -> None:
    online = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)).to(run.device)
    target = copy.deepcopy(online)
    optimizer = ol.capturable(torch.optim.Adam(online.parameters(), lr=1e-3))
    act = run.graph(lambda observation: online(observation).argmax(-1))

    @run.graph
    def learn(s: Tensor, a: Tensor, r: Tensor, after: Tensor, done: Tensor) -> Tensor:
        with torch.no_grad():
            best = online(after).argmax(-1, keepdim=True)  # double Q-learning
            wanted = r + 0.99 * (1 - done) * target(after).gather(1, best).squeeze(1)
        q = online(s).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        return loss.detach()

    for i in range(12):
        with torch.no_grad():
            action = act(run.rand(i, 1, 4))
        batch = (run.rand(i, 16, 4), run.ints(i, 2, 16), run.rand(i + 1, 16))
        run.see(action, learn(*batch, run.rand(i + 2, 16, 4), run.ints(i + 3, 2, 16).float()))
        if i % 5 == 4:
            target.load_state_dict(online.state_dict())
    run.see(online, target)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 24), nn.Tanh())
        self.policy, self.value = nn.Linear(24, 2), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.policy(h), self.value(h).squeeze(-1)


def ppo_loss(
    model: Any, s: Tensor, a: Tensor, before: Tensor, advantage: Tensor, returns: Tensor
) -> Tensor:
    logits, value = model(s)
    policy = Categorical(logits=logits, validate_args=False)
    ratio = (policy.log_prob(a) - before).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(0.8, 1.2) * advantage
    gain = torch.min(ratio * advantage, clipped).mean()
    return -gain + 0.5 * F.mse_loss(value, returns) - 0.01 * policy.entropy().mean()


def ppo_batch(run: Run, i: int) -> tuple[Tensor, ...]:
    s, a = run.rand(i, 32, 4), run.ints(i, 2, 32)
    return s, a, run.rand(i + 1, 32) / 10 - 0.7, run.rand(i + 2, 32), run.rand(i + 3, 32)


@training()
def proximal_policy_optimisation_as_one_step(run: Run) -> None:
    model = ActorCritic().to(run.device)
    optimizer = ol.capturable(torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5))

    @run.graph
    def update(*batch: Tensor) -> Tensor:
        loss = ppo_loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    for epoch in range(3):
        for i in range(4):
            run.see(update(*ppo_batch(run, 10 * epoch + i)))
    run.see(model)


@training(recordings=6)
def proximal_policy_optimisation_around_the_model(run: Run) -> None:
    model = ActorCritic().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for i in range(8):
        with torch.no_grad():
            logits, _ = fast(run.rand(i, 32, 4))
            action = Categorical(logits=logits).sample()
        batch = ppo_batch(run, i)
        loss = ppo_loss(fast, batch[0], action, *batch[2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss, action)
    run.see(model)


@training(recordings=6)
def soft_actor_critic(run: Run) -> None:
    actor = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 4)).to(run.device)
    critics = [nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)) for _ in range(2)]
    critics = [c.to(run.device) for c in critics]
    targets = [copy.deepcopy(c).requires_grad_(False) for c in critics]
    log_alpha = torch.zeros((), device=run.device, requires_grad=True)
    weights = [p for c in critics for p in c.parameters()]
    of_actor = ol.capturable(torch.optim.Adam(actor.parameters(), lr=1e-3))
    of_critics = ol.capturable(torch.optim.Adam(weights, lr=1e-3))
    of_alpha = ol.capturable(torch.optim.Adam([log_alpha], lr=1e-2))

    def sample(s: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(s).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = normal.rsample()
        action = raw.tanh()
        log_prob = normal.log_prob(raw) - torch.log(1 - action.square() + 1e-6)
        return action, log_prob.sum(-1, keepdim=True)

    @run.graph
    def update_critics(s: Tensor, a: Tensor, r: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            action, log_prob = sample(after)
            q = torch.min(*[t(torch.cat([after, action], -1)) for t in targets])
            wanted = r + 0.99 * (q - log_alpha.exp() * log_prob)
        loss = sum(F.mse_loss(c(torch.cat([s, a], -1)), wanted) for c in critics)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        with torch.no_grad():
            for mine, its in zip(critics, targets, strict=True):
                for p, t in zip(mine.parameters(), its.parameters(), strict=True):
                    t.mul_(0.95).add_(p, alpha=0.05)
        return loss.detach()

    @run.graph
    def update_actor(s: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob = sample(s)
        q = torch.min(*[c(torch.cat([s, action], -1)) for c in critics])
        loss = (log_alpha.exp().detach() * log_prob - q).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()
        of_alpha.zero_grad()
        (-log_alpha.exp() * (log_prob.detach() - 2.0)).mean().backward()
        of_alpha.step()
        return loss.detach(), log_alpha.detach()

    for i in range(9):
        s, a, r = run.rand(i, 16, 4), run.rand(i + 1, 16, 2), run.rand(i + 2, 16, 1)
        run.see(update_critics(s, a, r, run.rand(i + 3, 16, 4)), update_actor(s))
    run.see(actor, critics, targets)


@training()
def a_policy_of_a_transformed_distribution(run: Run) -> None:
    policy = nn.Linear(4, 2).to(run.device)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

    @run.graph
    def surprise(s: Tensor) -> tuple[Tensor, Tensor]:
        normal = Normal(policy(s), torch.ones_like(s[:, :2]), validate_args=False)
        squashed = TransformedDistribution(normal, [TanhTransform(cache_size=1)], False)
        action = squashed.rsample()
        return Independent(squashed, 1, validate_args=False).log_prob(action), action

    for i in range(8):
        log_prob, action = surprise(run.rand(i, 16, 4))
        loss = (log_prob * action.detach().square().sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(policy)

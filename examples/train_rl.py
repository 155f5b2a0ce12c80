"""PPO on CartPole with a policy of two small layers: a training job that waits for launches.

    python -m examples.train_rl                        # eager and onelaunch
    python -m examples.train_rl --engines eager,onelaunch,reduce-overhead

Environments, policy and updates are all on the device; what one step computes takes a GPU a few
microseconds, and launching it takes eager a millisecond. The three functions that do the work are
the same for every engine, which only wraps them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from examples.placement import device

ENVIRONMENTS = 32
HORIZON = 64  # steps of each environment between updates
EPOCHS = 6
BATCHES = 4
ITERATIONS = 60
LONGEST = 500  # steps of an episode, and so the best return
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
LEARNING_RATE = 2e-3

Wrap = Callable[[Callable[..., Any]], Any]


class Policy(nn.Module):
    """float32 (n, 4) states to logits (n, 2) and values (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


def cart_pole(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The state (n, 4) after 20 ms, and whether the pole fell or the cart left, as in Gymnasium."""
    x, v, angle, spin = state.unbind(-1)
    force = torch.where(action == 1, 10.0, -10.0)
    cos, sin = angle.cos(), angle.sin()
    push = (force + 0.05 * spin.square() * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
    speed = push - 0.05 * turn * cos / 1.1
    after = (x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn)
    fell = (after[0].abs() > 2.4) | (after[2].abs() > 0.2095)
    return torch.stack(after, -1), fell


@dataclass
class Learner:
    """A policy, its optimizer, and what they do, as functions of tensors."""

    policy: Policy
    optimizer: torch.optim.Optimizer

    def act(self, state: Tensor, age: Tensor) -> tuple[Tensor, ...]:
        """One step of every environment; those that end begin anew.

        Args:
            state: (n, 4).
            age: steps of the episode so far, (n,).

        Returns:
            The next state and age, then action, log-probability, value, whether the episode ended,
            and its return if it did.
        """
        with torch.no_grad():
            logits, value = self.policy(state)
            logp = logits.log_softmax(-1)
            action = (torch.rand_like(value) < logp[:, 1].exp()).long()
            after, fell = cart_pole(state, action)
            age = age + 1
            ended = fell | (age >= LONGEST)
            fresh = torch.rand_like(after) * 0.1 - 0.05
            after = torch.where(ended.unsqueeze(-1), fresh, after)
            chosen = logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            result = torch.where(ended, age, 0.0)
            return after, torch.where(ended, 0.0, age), action, chosen, value, ended, result

    def advantages(self, values: Tensor, ended: Tensor, last: Tensor) -> Tensor:
        """Generalised advantages (horizon, n) of a reward of 1 per step."""
        with torch.no_grad():
            _, following = self.policy(last)
            alive = 1.0 - ended.float()
            advantage = torch.zeros_like(following)
            found: list[Tensor] = []
            for t in reversed(range(len(values))):
                surprise = 1.0 + GAMMA * following * alive[t] - values[t]
                advantage = surprise + GAMMA * LAMBDA * alive[t] * advantage
                following = values[t]
                found.append(advantage)
            return torch.stack(found[::-1])

    def update(
        self, state: Tensor, action: Tensor, before: Tensor, advantage: Tensor, target: Tensor
    ) -> Tensor:
        """One step of Adam on a minibatch; the loss."""
        self.optimizer.zero_grad()
        logits, value = self.policy(state)
        logp = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (logp - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = 0.5 * (value - target).square().mean() - gain.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()


@dataclass
class Curve:
    """The mean return of the episodes that ended in each iteration, and the speed.

    Attributes:
        steps_per_second: of all environments together, updates included, in the second half.
    """

    returns: list[float]
    steps_per_second: float


def eager(fn: Callable[..., Any]) -> Any:
    return fn


def reduce_overhead(fn: Callable[..., Any]) -> Any:
    """Compiled, its results copied, for the next call overwrites them."""
    compiled = torch.compile(fn, mode="reduce-overhead")

    def call(*args: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(*args)
        return tuple(t.clone() for t in result) if isinstance(result, tuple) else result.clone()

    return call


ENGINES: dict[str, Wrap] = {
    "eager": eager,
    "reduce-overhead": reduce_overhead,
    "onelaunch": ol.graph,
}


def learning(wrap: Wrap, seed: int = 1) -> Iterator[float]:
    """Train from one seed, an iteration at a time; the mean return of the episodes that ended."""
    torch.manual_seed(seed)
    where = device()
    policy = Policy().to(where)
    # The kinds of Adam that count their steps in a tensor.
    kind: dict[str, Any] = {"capturable": True} if where.type == "cuda" else {"fused": True}
    learner = Learner(policy, torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, **kind))
    act, advantages, update = map(wrap, (learner.act, learner.advantages, learner.update))
    state = torch.rand(ENVIRONMENTS, 4, device=where) * 0.1 - 0.05
    age = torch.zeros(ENVIRONMENTS, device=where)
    size = ENVIRONMENTS * HORIZON
    while True:
        states: list[Tensor] = []
        seen: list[tuple[Tensor, ...]] = []
        for _ in range(HORIZON):
            states.append(state)
            state, age, *rest = act(state, age)
            seen.append(tuple(rest))
        actions, before, values, ended, results = (
            torch.stack(column) for column in zip(*seen, strict=True)
        )
        advantage = advantages(values, ended, state)
        flat = [t.flatten(0, 1) for t in (torch.stack(states), actions, before, advantage)]
        flat.append((advantage + values).flatten())
        for _ in range(EPOCHS):
            for batch in torch.randperm(size, device=where).split(size // BATCHES):
                update(*(t[batch] for t in flat))
        episodes = ended.sum().item()
        yield results.sum().item() / episodes if episodes else float(LONGEST)


def learn(engine: str, iterations: int = ITERATIONS, seed: int = 1) -> Curve:
    """Train from one seed."""
    run = learning(ENGINES[engine], seed)
    warm = iterations // 2
    returns = list(itertools.islice(run, warm))
    started = time.perf_counter()
    returns += itertools.islice(run, iterations - warm)
    seconds = time.perf_counter() - started
    return Curve(returns, (iterations - warm) * ENVIRONMENTS * HORIZON / seconds)


def main(engines: list[str], iterations: int = ITERATIONS) -> dict[str, Curve]:
    """Learn with each engine and print the curves side by side."""
    curves: dict[str, Curve] = {}
    for engine in engines:
        print(f"learning with {engine}", flush=True)
        curves[engine] = learn(engine, iterations)
    print("mean return of the episodes that ended:")
    print("steps   " + "".join(f"{engine:>17}" for engine in engines))
    for i in [*range(0, iterations, 5), iterations - 1]:
        figures = "".join(f"{curves[engine].returns[i]:17.1f}" for engine in engines)
        print(f"{(i + 1) * ENVIRONMENTS * HORIZON:<8,}{figures}")
    for engine, curve in curves.items():
        best = max(curve.returns)
        print(
            f"{engine:16} {curve.steps_per_second:10,.0f} steps per second, best return {best:.0f}"
        )
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="eager,onelaunch", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := set(names) - set(ENGINES):
        parser.error(f"no engine is called {' or '.join(unknown)}; they are {', '.join(ENGINES)}")
    main(names, options.iterations)

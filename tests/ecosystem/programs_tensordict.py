"""TensorDicts as arguments and results."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import Tensor, nn

from .harness import Run, inference, training


def transition(run: Run, seed: int, **more: Any) -> TensorDict:
    """What a policy saw and did, and what it got."""
    rows = {"seen": run.rand(seed, 4, 8), "next": {"reward": run.rand(seed + 1, 4, 1)}}
    return TensorDict({**rows, **more}, [4])


@inference(recordings=1)
def a_tensordict_by_its_entries(run: Run) -> None:
    fast = run.graph(lambda td: td["seen"].sum(-1, keepdim=True) * td["next", "reward"])
    with torch.no_grad():
        for i in range(8):
            run.see(fast(transition(run, i)))


@inference(recordings=1)
def a_tensordict_as_the_result(run: Run) -> None:
    fast = run.graph(lambda td: td.apply(lambda t: t.sigmoid() * 2))
    with torch.no_grad():
        for i in range(8):
            result = fast(transition(run, i))
            assert result.batch_size == (4,)
            run.see(result["seen"], result["next", "reward"])


@inference(recordings=3)
def tensordicts_with_other_keys_and_batch_sizes(run: Run) -> None:
    """`==` of their contexts says the same of every batch size with as many dimensions."""

    def f(td: TensorDict, x: Tensor) -> Tensor:
        return x * td.batch_size[0] * len(list(td.keys()))

    fast = run.graph(f)
    with torch.no_grad():
        for i in range(16):
            given = [TensorDict({}, [4]), TensorDict({}, [5]), transition(run, i)]
            run.see(fast(given[i % 3], run.rand(i, 3)))


@inference(recordings=1)
def a_lazy_stack(run: Run) -> None:
    fast = run.graph(lambda td: td["seen"] * 2)
    with torch.no_grad():
        for i in range(8):
            run.see(
                fast(LazyStackedTensorDict(transition(run, i), transition(run, i + 9), stack_dim=0))
            )


@tensorclass
class Sample:
    """Tensors, and a word beside them."""

    x: Tensor
    kind: str


@inference(recordings=2)
def a_tensorclass_with_a_word(run: Run) -> None:
    fast = run.graph(lambda sample: sample.x * len(sample.kind))
    with torch.no_grad():
        for i in range(12):
            sample = Sample(x=run.rand(i, 4), kind="ab" if i < 6 else "abc", batch_size=[4])
            run.see(fast(sample))


@training(recordings=1)
def a_policy_that_reads_a_tensordict(run: Run) -> None:
    policy = nn.Linear(8, 2).to(run.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    fast = run.graph(lambda td: (policy(td["seen"]) * td["next", "reward"]).mean())
    for i in range(8):
        optimizer.zero_grad()
        loss = fast(transition(run, i))
        loss.backward()
        optimizer.step()
        run.see(loss)

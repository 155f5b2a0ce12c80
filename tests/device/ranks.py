"""Situations in which the processes of a group differ, for test_distributed_ranks.py.

    python -m tests.device.ranks RANK WORLD FOLDER SITUATION...

Each process writes RANK.json: situation -> what it saw. A collective that another process does not
come to ends after a few seconds with an error of gloo's, and counts as a hang.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import onelaunch as ol
from onelaunch.runtime import ranks

SECONDS = 20
FOLDER = Path(sys.argv[3] if len(sys.argv) > 3 else ".")
Report = dict[str, Any]


def last() -> bool:
    """Whether this is the process that differs."""
    return dist.get_rank() == dist.get_world_size() - 1


def given(i: int, rank: int | None = None, rows: int = 4) -> Tensor:
    return torch.full((rows, 3), float(i + 1) * (1 + (dist.get_rank() if rank is None else rank)))


def total(i: int, rows: int = 4) -> Tensor:
    """The sum of what the processes give."""
    return sum((given(i, r, rows) for r in range(dist.get_world_size())), torch.zeros(()))


def report(fast: Any, **more: Any) -> Report:
    stats = fast.stats()
    return {
        "replays": stats.replays,
        "warmups": stats.warmup_calls,
        "eager": stats.eager_calls,
        "recordings": len(stats.recordings),
        "captures": stats.captures,
        **more,
    }


def calls(fast: Any, before: Callable[[int], object] = id, count: int = 9, **more: Any) -> Report:
    """Call a sum over the processes, and see that each result is right."""
    right = True
    for i in range(count):
        before(i)
        right &= torch.equal(fast(given(i)), total(i) + 1)
    return report(fast, right=right, **more)


def reduced(x: Tensor) -> Tensor:
    y = x * 1
    dist.all_reduce(y)
    return y + 1


def refused_here(way: str) -> Callable[[], Report]:
    def situation() -> Report:
        here = last()

        def f(x: Tensor) -> Tensor:
            y = x * 1
            dist.all_reduce(y)
            if here:
                y.sum().item()  # the line that cannot
            return y + 1

        return calls(ol.graph(f, on_refusal=way))  # type: ignore[call-overload]

    return situation


def refused_before() -> Report:
    """As `refused_here`, before the collective."""
    here = last()

    def f(x: Tensor) -> Tensor:
        y = x * 1
        if here:
            y.sum().item()  # the line that cannot
        dist.all_reduce(y)
        return y + 1

    return calls(ol.graph(f, on_refusal="eager"))


def refused_with_state() -> Report:
    """The captured run of the process that can is undone: its state counts each call once."""
    here, state, seen = last(), Flag(), list[float]()
    state.total = torch.zeros(4, 3)

    def f(x: Tensor) -> Tensor:
        y = x * 1
        dist.all_reduce(y)
        state.total = state.total + y
        seen.append(1.0)
        if here:
            y.sum().item()
        return y + 1

    expected = sum((total(i) for i in range(9)), torch.zeros(()))
    found = calls(ol.graph(f, on_refusal="eager"))
    found["right"] &= torch.equal(state.total, expected) and len(seen) == 9
    return found


def split_module() -> Report:
    here = last()

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            dist.all_reduce(y)
            return y

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if here:
                y.sum().item()
            return y + 1

    with torch.no_grad():
        return calls(ol.graph(Outer(), on_refusal="split"))


def unsettled() -> Report:
    """One process does other work at each call, by a random number of Python."""
    here = last()

    def f(x: Tensor) -> Tensor:
        y = x * 1
        dist.all_reduce(y)
        return y + 1 + (0 * y * random.random() if here else 0)

    return calls(ol.graph(f, on_refusal="eager"))


class Flag:
    on = False
    total: Tensor


def unsettled_once(folder: Path) -> Report:
    """The captured run of one process differs from the run before it, and later ones do not."""
    here = folder / f"here-{dist.get_rank()}"

    def f(x: Tensor) -> Tensor:
        y = x * 1
        dist.all_reduce(y)
        return y * 1 + 1 if os.path.exists(here) else y + 1

    def before(i: int) -> None:
        if last() and i == 3:
            here.touch()

    return calls(ol.graph(f, on_refusal="eager"), before)


def other_size() -> Report:
    """The last batch of one process has fewer rows."""
    fast: Any = ol.graph(lambda x: reduced(x.sum(0)))
    right = True
    for i in range(16):
        short = last() and i in (6, 9, 11, 13, 14)
        expected = sum((given(i, r).sum(0) for r in range(dist.get_world_size())), torch.zeros(()))
        if i in (6, 9, 11, 13, 14):
            n = dist.get_world_size() - 1
            expected = expected - given(i, n).sum(0) + given(i, n, 2).sum(0)
        right &= torch.equal(fast(given(i, rows=2 if short else 4)), expected + 1)
    return report(fast, right=right)


def counts_differ() -> Report:
    """One process has warmed up another size in between."""
    fast: Any = ol.graph(lambda x: reduced(x.sum(0)))
    for i in range(12):
        fast(given(i, rows=2 if last() and i == 1 else 4))
    return report(fast)


def full_pool() -> Report:
    pool = ol.Pool(max_bytes=1 if last() else None)
    return calls(ol.graph(reduced, pool=pool))


def evicted() -> Report:
    """One process has another callable that wants the room."""
    pool = ol.Pool(max_bytes=1 << 15 if last() else None)
    fast: Any = ol.graph(reduced, pool=pool)
    other: Any = ol.graph(lambda x: x * 2, pool=pool, outputs="static", warmup=1)
    right = True
    for i in range(16):
        right &= torch.equal(fast(given(i, rows=334)), total(i, 334) + 1)
        if last() and i > 5:
            other(torch.ones(4000))
    return report(fast, right=right, evictions=fast.stats().evictions)


def ahead_of_one() -> Report:
    fast: Any = ol.graph(reduced)
    refused = ""
    if last():
        try:
            fast.capture(given(0))
        except ol.CaptureError as error:
            refused = error.code
    return calls(fast, refused=refused)


def ahead_of_all() -> Report:
    fast: Any = ol.graph(reduced)
    fast.capture(given(0))
    return calls(fast)


def ahead_refused() -> Report:
    here = last()

    def f(x: Tensor) -> Tensor:
        y = x * 1
        dist.all_reduce(y)
        if here:
            y.sum().item()
        return y + 1

    fast: Any = ol.graph(f, on_refusal="eager")
    try:
        fast.capture(given(0))
    except ol.CaptureError as error:
        return calls(fast, refused=error.code)
    return calls(fast, refused="")


def raises() -> Report:
    """One process raises in its callable in the call of the capture, before its collective."""
    flag = Flag()

    def f(x: Tensor) -> Tensor:
        if flag.on:
            raise ValueError("of the user's")
        return reduced(x)

    fast: Any = ol.graph(f)
    raised = ""
    for i in range(9):
        flag.on = last() and i == 3
        try:
            fast(given(i))
        except (ValueError, ol.CaptureError) as error:
            raised = str(error)
    return report(fast, raised=raised)


def _read_on(turned: Callable[[int], bool]) -> Report:
    """Calls that read a flag, which the caller turns on at some."""
    scale = Flag()

    def f(x: Tensor) -> Tensor:
        y = x * (1 if not scale.on else 1.0)
        dist.all_reduce(y)
        return y + 1

    def before(i: int) -> None:
        scale.on = turned(i)

    return calls(ol.graph(f), before, 16)


def guard_fails() -> Report:
    """After the capture, state that one process read changes: it runs eagerly meanwhile."""
    return _read_on(lambda i: last() and i >= 6)


def in_the_background() -> Report:
    """A thread's runs would meet calls of the other process."""
    fast = ol.graph(reduced, capture="background")
    return calls(fast, lambda i: time.sleep(0.01), count=20)


def other_mode() -> Report:
    """All processes change the same state at the same call, and record anew."""
    return _read_on(lambda i: i >= 6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def step_over(model: Any, item: bool = False) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if item:
            loss.item()
        optimizer.step()
        return loss.detach()

    return step


def trained(wrap: Callable[[nn.Module], Any], item: bool, count: int) -> Report:
    model, other = wrap(network()), wrap(network())
    fast: Any = ol.graph(step_over(model, item), on_refusal="eager")
    eager, right = step_over(other), True
    for i in range(count):
        x = given(i) / 100
        right &= torch.equal(fast(x), eager(x))
    return report(fast, right=right)


def sharded(module: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, reshard_after_forward=False)


def unused(module: nn.Module) -> Any:
    return DDP(module, find_unused_parameters=True)


def joined() -> Report:
    """Uneven numbers of batches under `Join`, which shadows collectives of the others."""
    from torch.distributed.algorithms.join import Join

    model, other = DDP(network()), DDP(network())
    fast: Any = ol.graph(step_over(model), on_refusal="eager")
    for wrapped, step in ((model, fast), (other, step_over(other))):
        with Join([wrapped]):
            for i in range(18 if last() else 15):
                step(given(i) / 100)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return report(fast, right=all(torch.equal(a, b) for a, b in pairs))


def of_two() -> Report:
    """The processes 0 and 1 alone share a collective, and 2 has nothing to say."""
    group = dist.new_group([0, 1])

    def f(x: Tensor) -> Tensor:
        y = x * 1
        dist.all_reduce(y, group=group)
        return y + 1

    fast: Any = ol.graph(f)
    for i in range(6 if dist.get_rank() < 2 else 0):
        fast(given(i))
    return report(fast)


def in_a_row() -> Report:
    """0 and 1 share a collective, 1 and 2 another; what 2 cannot is told to 0, too."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    here, mine = last(), [pair for pair in pairs if dist.get_rank(pair) >= 0]

    def f(x: Tensor) -> Tensor:
        y = x * 1
        for group in mine:
            dist.all_reduce(y, group=group)
        if here:
            y.sum().item()
        return y + 1

    fast: Any = ol.graph(f, on_refusal="eager")
    for i in range(6):
        fast(given(i))
    return report(fast)


def local() -> Report:
    """A callable without collectives, called by one process alone."""
    fast: Any = ol.graph(lambda x: x * 2 + 1)
    for i in range(6 if last() else 0):
        fast(given(i))
    return report(fast)


SITUATIONS: dict[str, Callable[[], Report]] = {
    "alike": lambda: calls(ol.graph(reduced)),
    "refused-raise": refused_here("raise"),
    "refused-eager": refused_here("eager"),
    "refused-split": split_module,
    "refused-before": refused_before,
    "refused-with-state": refused_with_state,
    "unsettled": unsettled,
    "unsettled-once": lambda: unsettled_once(FOLDER),
    "other-size": other_size,
    "counts-differ": counts_differ,
    "full-pool": full_pool,
    "evicted": evicted,
    "ahead-of-one": ahead_of_one,
    "ahead-of-all": ahead_of_all,
    "ahead-refused": ahead_refused,
    "raises": raises,
    "guard-fails": guard_fails,
    "other-mode": other_mode,
    "in-the-background": in_the_background,
    "ddp": lambda: trained(DDP, False, 18),
    "ddp-refused": lambda: trained(DDP, last(), 18),
    "ddp-unused": lambda: trained(unused, False, 18),
    "fsdp": lambda: trained(sharded, False, 10),
    "fsdp-refused": lambda: trained(sharded, last(), 10),
    "joined": joined,
    "local": local,
    "of-two": of_two,
    "in-a-row": in_a_row,
}


def ended(situation: Callable[[], Report]) -> Report:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = situation()
        except ol.GraphError as error:
            found = {"raised": str(error)}
        except Exception as error:  # noqa: BLE001  gloo's
            found = {"hung": f"{type(error).__name__}: {error}"[:200]}
    found = {k: v() if callable(v) else v for k, v in found.items()}
    found["warned"] = [str(w.message) for w in caught if isinstance(w.message, ol.GraphWarning)]
    return found


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    ranks._SOON, ranks._LATE, ranks._AHEAD = 1.0, 2.0, 2.0  # no test waits longer
    found: dict[str, Report] = {}
    timeout = timedelta(seconds=SECONDS)
    for name in names:
        store = dist.FileStore(str(folder / f"store-{name}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        random.seed(rank)
        found[name] = ended(SITUATIONS[name])
        (folder / f"{rank}.json").write_text(json.dumps(found))
        (folder / f"{name}-{rank}").touch()
        while len([*folder.glob(f"{name}-[0-9]")]) < world:  # none goes while another is at work
            time.sleep(0.01)
        dist.destroy_process_group()
    os._exit(0)  # threads of gloo's may abort Python's own end


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or [*SITUATIONS])

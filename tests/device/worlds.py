"""The ways in which compiled code is recorded, each a world that the same programs run in.

backend  ``torch.compile(f, backend="onelaunch")``
policy   ``mode="reduce-overhead"`` with `cudagraph_policy`; on the emulated device see inductor.py
whole    ``ol.graph(f, compile=True)``
plain    ``ol.graph(f)``
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as config
from torch._inductor import cudagraph_utils

import onelaunch as ol
from onelaunch.dynamo import cudagraph_policy, onelaunch
from onelaunch.dynamo.backend import regions
from onelaunch.runtime.graphed import Graphed

from .inductor import reduce_overhead
from .regions import F

HAS_HOOK = hasattr(cudagraph_utils, "CUDAGraphPolicy")
"""Whether Inductor asks a policy: since torch 2.12."""


class World:
    """A world in force. What differs from that of the backend is told by a subclass.

    Attributes:
        late: the calls of a signature before its first replay.
        cuts: whether Dynamo breaks a callable where it must, and the rest is recorded.
        joined: whether a forward and its backward are one recording.
        keeps: whether a second backward of one forward may come.
    """

    late, cuts, joined, keeps = 3, True, True, True

    def compile(self, f: F, **options: Any) -> Any:
        """Return a callable, recorded; `dynamic` is `torch.compile`'s, all else our own."""
        dynamic = options.pop("dynamic", None)
        return torch.compile(f, backend=onelaunch, dynamic=dynamic, options=options or None)

    def made(self) -> list[Graphed[..., Any]]:
        """The graphed callables so far."""
        return regions.graphs()

    def recordings(self) -> list[ol.Recording]:
        """Their recordings."""
        return [recording for graphed in self.made() for recording in graphed.recordings]

    def replays(self) -> int:
        """The launches of these."""
        return sum(recording.replays for recording in self.recordings())

    def least(self, calls: int) -> int:
        """The replays of that many forwards without gradients."""
        return calls - self.late

    def least_trained(self, pairs: int) -> int:
        """The replays of that many forwards and backwards. A recording counts the pair once."""
        return pairs - self.late if self.joined else 2 * (pairs - self.late) + 1

    def reset(self) -> None:
        """Free all recordings."""
        torch._dynamo.reset()


class Policy(World):
    """AOTAutograd's first call is under a mode of its own, and code comes without autograd."""

    late, joined, keeps = 4, False, False

    def __init__(self, device: torch.device) -> None:
        self._emulated = device.type == "tape"
        self._policies: list[Any] = []

    def compile(self, f: F, **options: Any) -> Any:
        """See `World.compile`."""
        dynamic = options.pop("dynamic", None)
        self._policies.append(cudagraph_policy(**options))
        if self._emulated:
            return reduce_overhead(f, self._policies[-1], dynamic=dynamic)
        config.cudagraph_policy = self._policies[-1]
        return torch.compile(f, mode="reduce-overhead", dynamic=dynamic)

    def reset(self) -> None:
        """See `World.reset`."""
        super().reset()
        for policy in self._policies:
            policy.reset()


class Whole(World):
    """The callable is one recording."""

    cuts = False

    def __init__(self, compile: bool) -> None:
        self._options = {"compile": True} if compile else {}
        self._made: list[Any] = []

    def compile(self, f: F, **options: Any) -> Any:
        """See `World.compile`."""
        options.pop("dynamic", None)
        made: Any = ol.graph(f, **self._options, **options)
        self._made.append(made)
        return made

    def made(self) -> list[Any]:
        """See `World.made`."""
        return self._made

    def reset(self) -> None:
        """See `World.reset`."""
        for graphed in self._made:
            graphed.reset()
        super().reset()

    def forget(self) -> None:
        """Let go of the callables."""
        self._made.clear()


@contextmanager
def entered(name: str, device: torch.device) -> Iterator[World]:
    """A world by its name, with nothing compiled so far, and nothing left of it afterwards."""
    torch._dynamo.reset()
    whole = name in ("whole", "plain")
    world = Policy(device) if name == "policy" else Whole(name == "whole") if whole else World()
    with config.patch(cudagraph_policy=None) if HAS_HOOK else torch.enable_grad():
        yield world
    world.reset()

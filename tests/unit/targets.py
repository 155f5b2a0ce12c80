"""Factories, of which each test of the command has a copy; see `conftest.py`."""

import sys
import time

import torch
from torch import nn


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    return net, (torch.ones(2, 32),)


def trained():
    return model()[0].train(), (torch.ones(2, 32),)


def with_kwargs():
    return torch.clamp, (torch.ones(2),), {"min": 0.5}


def alone():
    return nn.Linear(8, 3)


def one_tensor():
    return nn.Linear(8, 3), torch.ones(2, 8)


def four():
    return 1, 2, 3, 4


def backwards():
    return (torch.ones(2, 8),), nn.Linear(8, 3)


def odd_kwargs():
    return nn.Linear(8, 3), (torch.ones(2, 8),), [1]


def broken():
    raise LookupError("no weights here")


def mismatched():
    return nn.Linear(8, 3), (torch.ones(2, 7),)


class Mute(Exception):
    def __str__(self):
        raise LookupError("no words")


def mute():
    def call(x):
        raise Mute

    return call, (torch.ones(2),)


def fewer():
    return torch.add, (torch.ones(2),)


def raises():
    def call(x):
        raise LookupError("no weights here")

    return call, (torch.ones(2),)


def no_tensor():
    return len, ([1, 2],)


def nothing():
    return lambda: None, ()


def trains():
    layer = nn.Linear(8, 3)

    def step(x):
        layer(x).sum().backward()
        return x * 2

    return step, (torch.ones(2, 8),)


def talks():
    def call(x):
        print("chat" + "ter")
        return x * 2

    return call, (torch.ones(2, 8),)


def reads():
    print("making it")

    def double(x):
        print("doubling")
        return x * x.sum().item()

    return double, (torch.ones(2),)


def slow():
    def call(x):
        print("here", file=sys.stderr, flush=True)  # of stdout nothing is shown
        time.sleep(60)
        return x + 1

    return call, (torch.ones(2),)


def leaves():
    raise SystemExit(0)


def quits():
    return lambda x: exit(0), (torch.ones(2),)


def sized(width: int, *rest: int, depth: int = 1) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Linear(width, depth), (torch.ones(2, width),)


number = 3
net = nn.Linear(8, 3)

"""Every workload of the benchmarks, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from examples import bert, cnn, digits, layers, mlp, resnet, rnn

WORKLOADS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "linear_small": layers.linear_small,
    "linear": layers.linear,
    "conv": layers.conv,
    "conv2d": layers.conv2d,
    "sine": layers.sine,
    "mlp": mlp.model,
    "cnn": cnn.model,
    "rnn": rnn.model,
    "digits": digits.model,
    "resnet50_small": resnet.small,
    "resnet50": resnet.model,
    "resnext101": resnet.resnext,
    "bert": bert.model,
}

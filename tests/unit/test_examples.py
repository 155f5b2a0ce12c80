"""The examples are the models that the documents name."""

from __future__ import annotations

import pytest
import torch

from examples import digits, resnet
from examples.workloads import WORKLOADS

OUTPUTS = {
    "linear_small": (10,),
    "linear": (32, 500),
    "conv": (16, 64, 222, 222),
    "conv2d": (4, 16, 30, 30),
    "sine": (5,),
    "mlp": (32, 10),
    "cnn": (1, 10),
    "rnn": (10, 10),
    "digits": (1, 10),
    "resnet50_small": (1, 1000),
    "resnet50": (1, 1000),
    "resnext101": (64, 2),
    "bert": (1, 16, 768),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_runs_and_has_its_shape(name: str) -> None:
    call, args = WORKLOADS[name]()
    with torch.no_grad():
        result = call(*args)
    output = result.last_hidden_state if name == "bert" else result
    assert tuple(output.shape) == OUTPUTS[name]
    assert output.isfinite().all()


def test_parameter_counts() -> None:
    with torch.device("meta"):
        models = resnet.resnet50(), resnet.resnext101_32x8d()
    assert [sum(p.numel() for p in m.parameters()) for m in models] == [25_557_032, 88_791_336]


def test_the_digits_are_read() -> None:
    images, labels = digits.digits()
    net, _ = digits.model()
    assert digits.accuracy(net, images[1500:], labels[1500:]) > 0.85

"""Metrics in the text of Prometheus, and for its client where that is installed."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

import onelaunch as ol

HAS_CLIENT = importlib.util.find_spec("prometheus_client") is not None
SAMPLE = re.compile(r'onelaunch_\w+\{\w+="([^"\\]|\\.)*"(,\w+="[^"]*")*\} [\d.e+-]+')


def warm(name: str = "double") -> Any:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.__name__ = name
    fast = ol.graph(double, warmup=1)
    for _ in range(4):
        fast(torch.ones(3))
    return fast


def test_the_text() -> None:
    lines = warm().metrics().splitlines()
    names: list[str] = []
    for line in lines:
        if line.startswith("# HELP "):
            names.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2] == names[-1]
            assert (line.split()[3] == "counter") == names[-1].endswith("_total")
        else:
            assert SAMPLE.fullmatch(line)
            assert line.startswith(names[-1] + "{")
    assert len(names) == len(set(names))
    assert {"onelaunch_replays_total", "onelaunch_pool_bytes"} <= set(names)
    assert 'onelaunch_replays_total{callable="double"} 3' in lines
    assert 'onelaunch_warmup_calls_total{callable="double"} 1' in lines
    assert not [line for line in lines if line.startswith("onelaunch_padded_ratio")]


def test_names_are_escaped() -> None:
    assert '{callable="a\\"b\\\\c\\n"} 3' in warm('a"b\\c\n').metrics()


def test_several_callables_share_the_families() -> None:
    model: Any = ol.graph(torch.nn.ReLU())
    text = ol.Metrics(warm(), model, other=warm()).text()
    assert text.count("# TYPE onelaunch_replays_total counter\n") == 1
    for name, replays in (("double", 3), ("ReLU", 0), ("other", 3)):
        assert f'onelaunch_replays_total{{callable="{name}"}} {replays}\n' in text


def test_two_of_one_name() -> None:
    with pytest.raises(ol.ArgumentError, match=r"two callables are named 'double'"):
        ol.Metrics(warm(), warm())
    with pytest.raises(ol.ArgumentError, match=r"got a ReLU, which is not graphed"):
        ol.Metrics(torch.nn.ReLU())


@pytest.mark.skipif(not HAS_CLIENT, reason="needs prometheus-client")
def test_the_client_collects_them() -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    fast = warm()
    buckets = ol.graph(torch.sin, buckets=ol.Buckets(0, (2,)), warmup=1)
    for rows in (1, 1, 0):
        buckets(torch.ones(rows, 2))
    metrics = ol.Metrics(fast, sized=buckets)
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics)
    fast(torch.ones(3))
    assert registry.get_sample_value("onelaunch_replays_total", {"callable": "double"}) == 4
    reason = {"callable": "sized", "reason": "empty"}
    assert registry.get_sample_value("onelaunch_eager_calls_total", reason) == 1
    theirs, ours = generate_latest(registry).decode(), metrics.text()
    assert [f.samples for f in text_string_to_metric_families(theirs)] == [
        f.samples for f in text_string_to_metric_families(ours)
    ]

"""The figures of graphed callables in the names and the text of Prometheus."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from onelaunch.errors import ArgumentError, describe_type


class _Metric(NamedTuple):
    """A metric: its name, kind and description, and the labels beside `callable`."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()


_METRICS = (
    _Metric("replays", "counter", "Launches of recordings."),
    _Metric("warmup_calls", "counter", "Calls that ran the callable itself before a capture."),
    _Metric("eager_calls", "counter", "Other calls that ran it, by reason.", ("reason",)),
    _Metric("captures", "counter", "Recordings made."),
    _Metric("capture_seconds", "counter", "Seconds of all captures."),
    _Metric("evictions", "counter", "Recordings freed to keep max_bytes."),
    _Metric("recordings", "gauge", "Existing recordings."),
    _Metric("padded_ratio", "gauge", "Share of padding in the rows of all buckets, 0 to 1."),
    _Metric("waiting_requests", "gauge", "Requests in the queues of batchers."),
    _Metric("pool_bytes", "gauge", "Device bytes of the pool, which callables may share."),
    _Metric("driver_bytes", "gauge", "Bytes that the driver took outside the pool."),
)
"""The metrics, each the value of the same name in the figures of a callable."""


class Metrics:
    """The figures of graphed callables for Prometheus, read anew each time.

    Args:
        callables: graphed functions and modules, each under its own name in the label `callable`.
        named: name -> a graphed function or module, under that name.

    Raises:
        ArgumentError: OL401, two callables of the same name, or a callable that is not graphed.

    Serve `text()` at ``/metrics``. Where the package prometheus-client is installed, this is also a
    collector for it. Values are those of `stats()`; a replay counts nothing more for it.

    Example:
        >>> import torch, onelaunch as ol
        >>> metrics = ol.Metrics(ol.graph(torch.sin), loss=ol.graph(torch.cos))
        >>> print(metrics.text().splitlines()[2])
        onelaunch_replays_total{callable="sin"} 0
    """

    def __init__(self, *callables: object, **named: object) -> None:
        self._graphed: dict[str, Any] = {}
        for name, each in (*((None, each) for each in callables), *named.items()):
            graphed: Any = getattr(each, "__graphed__", each)
            if not hasattr(type(graphed), "readiness"):
                fix = "pass what ol.graph returns"
                raise ArgumentError(
                    "OL401", f"got {describe_type(each)}, which is not graphed", fix=fix
                )
            name = name or graphed._name
            if name in self._graphed:
                fix = f"name them: ol.Metrics(first={name}, second={name})"
                raise ArgumentError("OL401", f"two callables are named {name!r}", fix=fix)
            self._graphed[name] = graphed

    def text(self) -> str:
        """Return the metrics in Prometheus' text format, version 0.0.4."""
        lines: list[str] = []
        for metric, samples in self._samples():
            name = f"onelaunch_{metric.name}" + "_total" * (metric.kind == "counter")
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
            for labels, value in samples:
                shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                lines.append(f"{name}{{{shown}}} {value}")
        return "\n".join(lines) + "\n"

    def collect(self) -> Generator[Any]:
        """Yield the metrics for prometheus-client: ``REGISTRY.register(ol.Metrics(fast))``."""
        # By its name: the core imports nothing but torch, and only who asks for this needs it.
        core: Any = importlib.import_module("prometheus_client.core")
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        for metric, samples in self._samples():
            labels, name = ("callable", *metric.labels), f"onelaunch_{metric.name}"
            family = kinds[metric.kind](name, metric.text, labels=labels)
            for values, value in samples:
                family.add_metric(list(values.values()), value)
            yield family

    def _samples(self) -> Generator[tuple[_Metric, list[tuple[dict[str, str], float]]]]:
        """Yield each metric with its samples: labels and a value."""
        figures = {name: _figures(graphed) for name, graphed in self._graphed.items()}
        for metric in _METRICS:
            samples: list[tuple[dict[str, str], float]] = []
            for name, values in figures.items():
                for label, value in values[metric.name].items():
                    more = dict.fromkeys(metric.labels, label)
                    samples.append(({"callable": name, **more}, value))
            yield metric, samples


def _figures(graphed: Any) -> dict[str, Mapping[str, float]]:
    """Return the values of each metric by its second label, which is empty for most."""
    stats, batchers = graphed.stats(), list(getattr(graphed, "_batchers", ()))
    names = "replays", "warmup_calls", "captures", "capture_seconds", "evictions", "driver_bytes"
    return {
        **{name: {"": getattr(stats, name)} for name in names},
        "eager_calls": stats.eager_reasons,
        "recordings": {"": len(stats.recordings)},
        "padded_ratio": {"": stats.padding} if stats.sizes else {},
        "waiting_requests": {"": sum(map(len, batchers))} if batchers else {},
        "pool_bytes": {"": graphed.memory_bytes},
    }


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""The rule on launches: what one launch would make of many small kernels."""

from __future__ import annotations

from onelaunch.doctor.slow.machine import LAUNCH_US
from onelaunch.doctor.slow.record import Record
from onelaunch.rules.finding import Finding

_MANY = 100


def many_tiny_kernels(record: Record) -> list[Finding]:
    """OL614: many operations that take less time than their launches."""
    launches = record.launches
    host_us = launches.count * LAUNCH_US
    if launches.count < _MANY or launches.busy_us >= host_us:
        return []
    spot, here = max(launches.at.values(), key=lambda place: place[1])
    what = (
        f"{launches.count} operations ({here} of them here), a launch each: about "
        f"{host_us / 1e3:.1f} ms of launches for {launches.busy_us / 1e3:.2g} ms of work on an "
        "A100; as a graph they are one launch"
    )
    return [spot.finding("OL614", what, None, "run")]

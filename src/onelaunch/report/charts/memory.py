"""The memory that engines hold between calls; onelaunch's by recording."""

from __future__ import annotations

import re

from onelaunch.bench.rows import Comparison
from onelaunch.report.cells import in_order
from onelaunch.report.cells import memory as in_bytes
from onelaunch.report.charts.chart import Chart, Spec, in_rows, x_axis

HEAD = ("engine", "recording", "nodes", "memory")
_ON = re.compile(r" on [\w:]+")  # the device, which is the same in all
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def memory(comparison: Comparison) -> Chart | None:
    """Draw a bar for each recording, and for each engine without; None where none holds any."""
    found: list[tuple[str, str, str, int, int]] = []
    for row in in_order(comparison):
        found += [
            (row.title, r.signature, str(r.nodes), r.pool_bytes, r.driver_bytes)
            for r in row.recordings
        ]
        if not row.recordings and row.memory_bytes:
            found.append((row.title, "", "", row.memory_bytes, 0))
    largest = max((pool + driver for *_, pool, driver in found), default=0)
    if not largest:
        return None
    titles = [title for title, *_ in found]
    divisor, unit = next(one for one in UNITS if largest >= one[0])
    best = comparison.best.title if comparison.best is not None else None
    values: list[Spec] = [
        {
            "name": f"{title}: {_ON.sub('', signature)}" if titles.count(title) > 1 else title,
            "shown": in_bytes(pool + driver),
            "best": title == best,
            "pool": pool / divisor,
            "all": (pool + driver) / divisor,
        }
        for title, signature, _, pool, driver in found
    ]
    in_driver = any(driver for *_, driver in found)
    return Chart(
        name="memory",
        title="Memory between calls",
        caption="Beyond the model, while nothing runs: of onelaunch by recording, of the others "
        "in all.",
        alternative=f"Bars of the memory of {len(found)} engines and recordings, up to "
        f"{in_bytes(largest)}.",
        spec=in_rows(values, _layers(in_driver), x_axis(unit, domainMax=largest / divisor)),
        head=HEAD,
        rows=tuple(
            (title, signature, nodes, in_bytes(pool + driver))
            for title, signature, nodes, pool, driver in found
        ),
        words=(1,),
        key=(("accent-soft", "in the pool"), ("host", "taken by the driver")) if in_driver else (),
    )


def _layers(in_driver: bool) -> list[Spec]:
    bar: Spec = {"type": "bar", "height": 10, "yOffset": 5, "cornerRadius": 1}
    pool: Spec = {
        "name": "memory",
        "mark": {**bar, "color": "var(--accent-soft)"},
        "encoding": {"x": "pool"},
    }
    driver: Spec = {
        "mark": {**bar, "color": "var(--host)"},
        "encoding": {"x": "pool", "x2": {"field": "all"}},
    }
    return [pool, driver] if in_driver else [pool]

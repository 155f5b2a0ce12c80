"""Show a result of `results/engines.json` as `onelaunch compare` shows its own.

python -m benchmarks.show cnn
python -m benchmarks.show cnn --report build/demo_gpu.html
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.render import RESULTS
from onelaunch.tools.bench import Comparison
from onelaunch.tools.cli.progress import WIDTH
from onelaunch.tools.report.page import page
from onelaunch.tools.report.terminal import show


def committed(workload: str) -> Comparison:
    """Read the comparison of a workload, without the bare replays, which only mark a limit.

    Raises:
        KeyError: the workload was not measured.
    """
    results = json.loads((RESULTS / "engines.json").read_text())
    data = results["workloads"][workload] | {"environment": results["environment"]}
    comparison = Comparison.from_json(json.dumps(data))
    rows = tuple(row for row in comparison if not row.engine.startswith("bare"))
    return replace(comparison, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--report", type=Path, help="write it here as an HTML page, too")
    options = parser.parse_args()
    document = committed(options.workload).document()
    show(document, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if options.report is not None:
        options.report.write_text(page(document))


if __name__ == "__main__":
    main()

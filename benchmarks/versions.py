"""Write what the tests gave on a release of torch to benchmarks/results/torch_versions.json.

    scripts/test --torch 2.15.0 --record            # calls this at its end
    python -m benchmarks.versions run.xml again.xml

The files are pytest's (``--junitxml``), of runs with the torch that is installed here. A test
counts as in the last of them: a second run of what failed (``--lf``) can follow a whole one.
"""

from __future__ import annotations

import argparse
import json
import platform
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).parent / "results" / "torch_versions.json"
SUITES = ("unit", "compat", "device")


def rows_of(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table: a release, and how many tests of each suite passed."""
    return [
        (
            f"{version}, Python {row['python']}",
            *(_passed(row["suites"][suite]) for suite in SUITES),
            row["gpu"] or "CPU",
        )
        for version, row in results.items()
    ]


def _passed(suite: dict[str, int]) -> str:
    failed = f", {suite['failed']} failed" if suite["failed"] else ""
    return f"{suite['passed']:,}{failed}"


def counts(files: Sequence[Path]) -> dict[str, dict[str, int]]:
    """How many tests of each suite passed, failed and were skipped."""
    outcomes: dict[tuple[str, str], str] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            outcomes[case.get("classname", ""), case.get("name", "")] = outcome(case)
    found = {suite: Counter[str]() for suite in SUITES}
    for (module, _), what in outcomes.items():
        suite = module.removeprefix("tests.").partition(".")[0]
        if suite in found:
            found[suite][what] += 1
    words = ("passed", "failed", "skipped")
    return {suite: {word: found[suite][word] for word in words} for suite in SUITES}


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def release() -> str:
    """The torch that is installed here, whatever it was built for."""
    return torch.__version__.partition("+")[0]


def record(files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Add the counts to `out`, in place of earlier ones of this release."""
    data: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    data[release()] = {
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "suites": counts(files),
    }
    ordered = sorted(data, key=lambda version: tuple(map(int, version.split(".")[:2])))
    out.write_text(json.dumps({version: data[version] for version in ordered}, indent=1) + "\n")
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    print(release(), record(args.files, args.out)[release()])


if __name__ == "__main__":
    main()

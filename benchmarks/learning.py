"""PPO on CartPole, `examples/train_rl.py`, by every engine: `results/learning.json`.

    python -m benchmarks.learning                     # about a minute on an H200

The same seed for all; the curve is the mean return of the episodes that ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.processes import parsed
from examples.train_rl import ENGINES, ENVIRONMENTS, HORIZON, ITERATIONS
from examples.train_rl import main as train
from onelaunch.tools.bench.environment import environment


def measure(engines: list[str], iterations: int) -> dict[str, Any]:
    curves = train(engines, iterations)
    return {
        "benchmark": "learning",
        "environment": environment(),
        "steps of an iteration": ENVIRONMENTS * HORIZON,
        "engines": {
            name: {"steps per second": curve.steps_per_second, "returns": curve.returns}
            for name, curve in curves.items()
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parsed(parser, "learning", argv)
    engines = options.engines.split(",")
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"no engine is called {', '.join(unknown)}: {', '.join(ENGINES)}")
    found = measure(engines, options.iterations)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

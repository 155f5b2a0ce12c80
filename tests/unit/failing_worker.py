"""A worker whose engine fails in the way that its name says, and one that only speaks as one.

With ``plain`` as its first argument it imports nothing and answers as its engine's name says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def plain(name: str) -> None:
    """Answer as a worker does, without torch."""
    timing = {"median_us": 9.0, "spread_us": 1.0, "samples": 2}
    row = {"engine": name, "title": "T", "status": "ok", "wall": timing, "host": None, "gpu": None}
    state = {"running": True, "settled": False, "versions": "Python 3, torch 2", "found": row}
    for count, order in enumerate(sys.stdin):
        if name == "hangs" or (name == "hangs later" and count):
            time.sleep(600)
        if name == "dies later" and count:
            os.kill(os.getpid(), signal.SIGBUS)
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "exits":
            print("a library that ends the process", file=sys.stderr)
            os._exit(3)
        if name == "raises":
            print('{"failed": "ImportError: no such target"}', flush=True)
            return
        with open(os.environ["ORDERS"], "a") as file:
            file.write(f"{name} {order}")
        print(json.dumps(state), flush=True)


def real() -> None:
    """Serve orders with engines that fail once they are built or called."""
    import math
    import resource
    from dataclasses import dataclass

    import torch

    from onelaunch.tools.bench.engines import ENGINES
    from onelaunch.tools.bench.engines.engine import Built, Mode
    from onelaunch.tools.bench.worker import main
    from onelaunch.tools.bench.workload import Workload

    @dataclass(frozen=True)
    class Failing:
        name: str
        title: str = "made to fail"
        mode: Mode = "no_grad"

        def missing(self, device: torch.device) -> str | None:
            return None

        def build(self, workload: Workload) -> Built:
            if self.name == "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.name == "takes all memory":
                held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 28), -1))
                torch.ones(1 << 32)
            if self.name == "gives NaN":
                return Built(lambda *args: workload.fn(*args) * math.nan)
            print("what an engine prints is no answer")
            assert sys.stdin.read() == ""
            return Built(workload.fn)

        def code(self, workload: Workload) -> str:
            return "y = model(x)"

    ENGINES[sys.argv[1]] = Failing(sys.argv[1])
    main()


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        real()

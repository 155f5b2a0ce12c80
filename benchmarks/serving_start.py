"""Where a replica's start goes, phase by phase, in fresh processes.

    python -m benchmarks.serving_start onelaunch FOLDER --since 1700000000.0    # one process

`benchmarks.serving` runs these, with a cache of Inductor's that is empty at first and full later.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENGINES = ("eager", "onelaunch", "onelaunch-later", "onelaunch-compile")
COLD = "onelaunch-compile, cold"
LARGEST = {False: (8, 64), True: (2, 16)}
SIZES = {False: ((1, 8), (16, 64)), True: ((1, 2), (8, 16))}
"""Small or not -> the buckets: rows and lengths."""
TOLERANCE = 5e-2


def start(engine: str, folder: Path, since: float, small: bool, seconds: float) -> dict[str, Any]:
    """Start as a replica does: import, make the model, load its weights, answer, and get ready.

    Args:
        folder: has the weights, and gets the answer.
        since: when the process was started.
        seconds: how long `compile="later"` may take at most.
    """
    phases: dict[str, float] = {}
    last = since

    def done(phase: str) -> None:
        nonlocal last
        now = time.time()
        phases[phase], last = now - last, now

    done("Python")
    import torch

    done("import torch")
    from transformers import BertModel  # noqa: F401

    from examples.bert import minilm

    done("import transformers")
    if engine.startswith("onelaunch"):
        import onelaunch  # noqa: F401
    done("import onelaunch")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.zeros(1, device=device)
    done("CUDA context")
    with torch.device("cpu"):
        model = minilm(*((1, 24) if small else (6, 384))).eval().requires_grad_(False)
    done("make the model")
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True, weights_only=True))
    model.to(device, dtype)
    done("weights")
    rows, length = LARGEST[small]
    tokens = torch.arange(1, rows * length + 1).view(rows, length).to(device)
    mask = torch.ones_like(tokens)
    with torch.inference_mode():
        fast = _engine(engine, model, small)
        answer = fast(tokens, mask).float().cpu()
        done("first answer")
        _get_ready(engine, fast, (tokens, mask), seconds)
        done("ready")
    torch.save(answer, folder / f"{engine}.pt")
    return phases


def _engine(engine: str, model: Any, small: bool) -> Any:
    if engine == "eager":
        return model
    import onelaunch as ol

    if engine == "onelaunch-later":
        return ol.graph(model, compile="later", warmup=1)
    if engine == "onelaunch-compile":  # no check of cuDNN's masks fits into compiled code
        import torch

        torch.backends.cuda.enable_cudnn_sdp(False)
    buckets = ol.Buckets(dim=(0, 1), sizes=SIZES[small], pad={"mask": (None, 0)})
    return ol.graph(model, buckets=buckets, warmup=1, compile=engine == "onelaunch-compile")


def _get_ready(engine: str, fast: Any, example: tuple[Any, Any], seconds: float) -> None:
    """Capture all sizes; with `compile="later"`, call until compiled code has taken over."""
    if not engine.startswith("onelaunch"):
        return
    fast.warm_up([example])
    deadline = time.time() + seconds
    while engine == "onelaunch-later" and fast.stats().captures < 2 and time.time() < deadline:
        time.sleep(0.02)
        fast(*example)


# The parent of the processes.


def starts(folder: Path, gpu: bool, small: bool, rounds: int, seconds: float) -> dict[str, Any]:
    """Start each engine so many times, in turn; each row has the start that was the shortest.

    The first start fills Inductor's cache, or without a GPU the caches of the file system.
    """
    import torch

    from examples.bert import minilm
    from onelaunch.tools.bench.precision import relative_error

    torch.manual_seed(0)
    torch.save(minilm(*((1, 24) if small else (6, 384))).state_dict(), folder / "weights.pt")
    engines = [name for name in ENGINES if gpu or name != "onelaunch-compile"]
    found: dict[str, list[dict[str, float]]] = {}
    if gpu:
        found[COLD] = [process("onelaunch-compile", folder, small, seconds)]
    for _ in range(rounds):
        for engine in engines:
            found.setdefault(engine, []).append(process(engine, folder, small, seconds))
    expected = torch.load(folder / "eager.pt")
    rows: dict[str, Any] = {}
    for engine, runs in found.items():
        phases = min(runs, key=until_answer)
        answer = torch.load(folder / f"{engine.partition(',')[0]}.pt")
        error = relative_error([answer], [expected])
        rows[engine] = {
            "phases": phases,
            "first answer": until_answer(phases),
            "right": error <= TOLERANCE,
            "all": [until_answer(run) for run in runs],
        }
    return {"rows": rows, "sizes": SIZES[small], "shape": LARGEST[small]}


def until_answer(phases: dict[str, float]) -> float:
    """Seconds from the start of the process to its first answer."""
    return sum(phases.values()) - phases["ready"]


def process(engine: str, folder: Path, small: bool, seconds: float) -> dict[str, float]:
    """Start one process; its seconds of each phase."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    command = [sys.executable, "-m", "benchmarks.serving_start", engine, str(folder)]
    command += ["--seconds", str(seconds), *(["--small"] if small else [])]
    command += ["--since", str(time.time())]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--since", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    print(json.dumps(start(given.engine, given.folder, given.since, given.small, given.seconds)))


if __name__ == "__main__":
    main()

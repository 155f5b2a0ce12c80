"""One way to a first replay, in a fresh process that times its own imports.

    python benchmarks/first_replay_fresh.py onelaunch inference

`benchmarks.first_replay` runs this.
"""

import json
import sys
import time

WARM_UPS = 3
COMPILERS = ("torch._dynamo", "torch._inductor", "sympy")


def main(engine: str, kind: str) -> dict[str, object]:
    """Time an MLP from before the engine's import to the end of its first replay.

    Args:
        engine: ``"eager"``, ``"onelaunch"``, ``"by-hand"`` or ``"make_graphed_callables"``.
        kind: ``"inference"``, ``"pair"`` (forward and backward) or ``"step"`` (with Adam).
    """
    started = time.perf_counter()
    import torch
    from torch import nn

    imported = time.perf_counter()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    layers = nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(32, 1024, device=device)
    optimizer = torch.optim.Adam(model.parameters(), capturable=cuda) if kind == "step" else None

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    def step(x: torch.Tensor) -> torch.Tensor:
        assert optimizer is not None
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def pair(forward: "nn.Module", x: torch.Tensor) -> None:
        forward(x).sum().backward()  # with a given gradient torch imports sympy

    def eager(x: torch.Tensor) -> None:
        if kind == "step":
            step(x)
        elif kind == "pair":
            pair(model, x)
        else:
            model(x)

    def ours() -> None:
        import onelaunch as ol

        if kind == "step":
            whole = ol.graph(step, capturable=True)
            while whole.stats().replays < 1:
                whole(x)
            return
        fast = ol.graph(model)
        while fast.stats().replays < (2 if kind == "pair" else 1):  # the second has a backward
            if kind == "pair":
                pair(fast, x)
            else:
                fast(x)

    def by_hand() -> None:
        static, stream = x.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                eager(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager(static)
        static.copy_(x)
        graph.replay()
        sync()

    def of_torch() -> None:
        fast = torch.cuda.make_graphed_callables(model, (x,))
        pair(fast, x)

    run = {"eager": lambda: eager(x), "onelaunch": ours, "by-hand": by_hand}.get(engine, of_torch)
    before = time.perf_counter()
    with torch.set_grad_enabled(kind != "inference"):
        eager(x)
        sync()
        eager_s = time.perf_counter() - before
        there = {name for name in COMPILERS if name in sys.modules}
        start, cpu = time.perf_counter(), time.process_time()
        run()
        sync()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "import_torch_seconds": imported - started,
        "eager_seconds": eager_s,
        "compilers": sorted({name for name in COMPILERS if name in sys.modules} - there),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

"""A function as one recording of the CUDA driver, for the tests of that driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from onelaunch.driver.cuda import CudaDriver
from onelaunch.driver.cuda.graph import CudaGraph
from onelaunch.driver.cuda.memory import CudaPool
from onelaunch.driver.protocol import InPlace

DEVICE = torch.device("cuda", 0)


@dataclass
class Recorded:
    """A function as one recording with a port for each argument and one for its result."""

    driver: CudaDriver
    fn: Callable[..., Tensor]
    args: Sequence[Tensor]
    pool: CudaPool
    travel: str = "node"
    generators: Sequence[torch.Generator] = ()
    graph: CudaGraph = field(init=False)
    static: Tensor = field(init=False)

    def __post_init__(self) -> None:
        with self.driver.exclusive(), torch.no_grad():
            self.driver.run_on_capture_stream(lambda: self.fn(*self.args), DEVICE)
            self.graph, self.static = self.driver.capture(self.body, self.pool, self.generators)

    def body(self, capture) -> Tensor:
        inside = []
        for x in self.args:
            if self.travel == "node":
                touched = self.driver.region(x)
                buffer = self.driver.empty(touched.stop - touched.start, DEVICE)
                capture.input(x, buffer, "node")
                inside.append(self.driver.alias(buffer, x.dtype, x.shape, x.stride(), 0))
            else:
                buffer = torch.empty_like(x, device=DEVICE)
                capture.input(x, buffer, self.travel)
                inside.append(buffer)
        out = self.fn(*inside)
        nbytes = self.driver.region(out).stop - self.driver.region(out).start
        capture.output(self.driver.alias(out, torch.uint8, (nbytes,), (1,), 0))
        return out

    def rebind(self, state: Sequence[Tensor] = (), outputs: int | None = None) -> CudaGraph:
        in_place = InPlace(0, outputs)
        with self.driver.exclusive(), torch.no_grad():
            again = self.driver.rebind(self.graph, self.body, state, self.generators, in_place)
        assert again is self.graph
        return again

    def __call__(self, *args: Tensor) -> Tensor:
        target = torch.empty_like(self.static)
        self.graph.launch(args, (target,))
        return target


@torch.no_grad()
def mlp() -> nn.Module:
    layers = [nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(DEVICE).requires_grad_(False)


def works(driver: CudaDriver, pool: CudaPool) -> None:
    """Eager work, a capture and random numbers, as if nothing had happened."""
    torch.manual_seed(5)
    first = torch.rand(8, device=DEVICE)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(8, device=DEVICE))
    x = torch.randn(32, 1024, device=DEVICE)
    model = mlp()
    graphed = Recorded(driver, lambda x: model(x) + torch.rand_like(x[:, :10]), [x], pool)
    torch.manual_seed(6)
    expected = model(x) + torch.rand_like(x[:, :10])
    torch.manual_seed(6)
    torch.testing.assert_close(graphed(x), expected)
    del graphed.static
    graphed.graph.reset()


def check_displaced_and_empty_ports(driver: CudaDriver, pool: CudaPool) -> None:
    base = torch.randn(64, device=DEVICE)

    def body(capture):
        whole = driver.empty(base.nbytes, DEVICE)
        capture.input(base[16:32], whole, "node", 64)
        nothing = driver.empty(0, DEVICE)
        capture.input(base[:0], nothing, "node")
        capture.output(driver.empty(0, DEVICE))
        capture.output(whole, 64)

    graph, _ = driver.capture(body, pool)
    assert graph.nodes == (2 if graph.travels[0] == "node" else 0)
    source, target = torch.randn(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    graph.launch((source[16:32], source[:0]), (target[:0], target[16:32]))
    assert torch.equal(source, target)


def check_random_numbers(driver: CudaDriver, pool: CudaPool) -> None:
    extra = torch.Generator(DEVICE).manual_seed(11)

    def noise(x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x, 0.4) + torch.randn_like(x)
        return y + torch.rand(x.shape, device=DEVICE, generator=extra)

    x = torch.randn(333, device=DEVICE)
    graphed = Recorded(driver, noise, [x], pool, generators=(extra,))
    plain = Recorded(driver, lambda x: torch.rand_like(x), [x], pool)

    def sequence(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(9)
        extra.manual_seed(10)
        got = []
        for _ in range(5):
            got += [a(x), torch.randn(7, device=DEVICE), b(x)]
        return [*got, torch.cuda.get_rng_state(), extra.get_state()]

    eager = sequence(noise, lambda x: torch.rand_like(x))
    replayed = sequence(graphed, plain)
    for a, b in zip(eager, replayed, strict=True):
        assert torch.equal(a, b)

"""Products that share a workspace, with kernels of Python's in the place of a device's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onelaunch.driver.cuda import workspaces
from onelaunch.driver.edges import Access, NodeGroup

SIZE = 1 << 20
Words = tuple[int, ...]
Kernel = Callable[["Machine", int, int, int], None]


def plain(machine: Machine, workspace: int, out: int, number: int) -> None:
    """Needs no workspace."""
    machine.store(out, number * 3)


def working(machine: Machine, workspace: int, out: int, number: int) -> None:
    """Goes through the second half of 64 KiB of its workspace."""
    machine.store(workspace + 32 * 1024, number * 5)
    machine.store(workspace + 64 * 1024 - 8, 1)
    machine.store(out, machine.load(workspace + 32 * 1024) + machine.load(out))


def elsewhere(machine: Machine, workspace: int, out: int, number: int) -> None:
    """Writes where its workspace was first, whatever it is pointed at."""
    machine.store(machine.region.start + 8, number)
    machine.store(out, number * 7)


class Machine:
    """Memory, and a graph whose kernels have three words as arguments: workspace, result, number.

    Attributes:
        graph, executable: node -> its arguments.
    """

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.workspace = torch.zeros(SIZE, dtype=torch.uint8)
        self.results = torch.zeros(len(kernels), dtype=torch.int64)
        start, out = self.workspace.data_ptr(), self.results.data_ptr()
        self.region = Access(start, start + SIZE, True)
        self.graph: dict[int, Words] = {n: (start, out + 8 * n, n + 1) for n in range(len(kernels))}
        self.executable = dict(self.graph)
        self.enabled = dict.fromkeys(self.graph, True)
        self.groups = [
            NodeGroup(n, n + 1, [Access(at, at + 8, True)], "aten::mm", [self.region])
            for n, (_, at, _) in self.graph.items()
        ]

    def store(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def load(self, address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    def launch(self, *_: Any) -> tuple[int]:
        for node, arguments in self.executable.items():
            if self.enabled[node]:
                self.kernels[node](self, *arguments)
        return (0,)

    def read(self, node: int) -> Any:
        """In the place of `KernelNode.read`."""
        raw = b"".join(word.to_bytes(8, "little") for word in self.graph[node])
        blocks = [ctypes.create_string_buffer(raw, len(raw))]

        def setter(executable: int | None) -> Callable[[], None]:
            where = self.graph if executable is None else self.executable

            def store() -> None:
                words = (blocks[0].raw[at : at + 8] for at in range(0, len(raw), 8))
                where[node] = tuple(int.from_bytes(w, "little") for w in words)

            return store

        def word(block: int, at: int) -> Any:
            return ctypes.c_uint64.from_buffer(blocks[block], at)

        name = self.kernels[node].__name__
        return SimpleNamespace(name=name, shape=(1,), blocks=blocks, word=word, setter=setter)

    def bindings(self) -> Any:
        """In the place of `nodes`."""
        out = self.results.data_ptr()
        spans = range(*self.region[:2]), range(out, out + 8 * len(self.graph))
        return SimpleNamespace(
            KernelNode=SimpleNamespace(read=self.read),
            kind=lambda node: "KERNEL",
            set_enabled=lambda executable, node, on: self.enabled.update({node: on}),
            launcher=lambda executable: (self.launch, None),
            stream_handle=lambda stream: None,
            apply=lambda setters: [setter() for setter in setters],
            is_address=lambda word: any(word in span for span in spans),
        )


def shared(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[list[Access]]:
    """What products write besides their results, once they share the workspace."""
    monkeypatch.setattr(workspaces, "nodes", machine.bindings())
    monkeypatch.setattr(workspaces, "raw_stream", lambda device: 0)
    handles, blocks = list(machine.graph), [(machine.region.start, SIZE)]
    device = torch.device("cpu")
    workspaces.Workspaces(machine.groups, handles, 1, blocks, device).share()
    assert all(machine.enabled.values())
    return [group.hidden for group in machine.groups]


def outcome(machine: Machine, arguments: dict[int, Words]) -> Tensor:
    machine.results.zero_()
    machine.executable = arguments
    machine.launch()
    return machine.results.clone()


def test_products_get_parts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([working, plain, working, plain, working])
    before = dict(machine.graph)
    found = shared(machine, monkeypatch)
    assert machine.executable == before
    assert found[1] == found[3] == []
    parts = [accesses for number in (0, 2, 4) for accesses in found[number]]
    assert len(parts) == 3
    assert all(a.stop <= b.start for a, b in pairwise(sorted(parts)))
    assert {a.stop - a.start for a in parts} == {32 * 1024}
    for number in (0, 2, 4):
        assert machine.graph[number][0] + 32 * 1024 == found[number][0].start
    assert torch.equal(outcome(machine, machine.graph), outcome(machine, before))


def test_more_products_than_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([working] * 40)
    found = shared(machine, monkeypatch)
    assert len({accesses[0] for accesses in found}) == SIZE // (64 * 1024)
    assert all(machine.region.start <= a.start < a.stop <= machine.region.stop for (a,) in found)


def test_a_product_that_writes_elsewhere_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([elsewhere] * 3)
    before = dict(machine.graph)
    found = shared(machine, monkeypatch)
    assert machine.graph == before == machine.executable
    assert found[1:] == [[machine.region]] * 2


def test_only_products_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([plain, plain])
    for group in machine.groups:
        group.name = "aten::index"
    assert shared(machine, monkeypatch) == [[machine.region]] * 2


@pytest.mark.parametrize("at", [0, 4, 12])
def test_addresses_are_found_at_any_place(at: int) -> None:
    region = Access(0x7F12_0000_0000, 0x7F12_0010_0000, True)
    word = (region.start + 64).to_bytes(8, "little")
    raw = bytes([1]) * at + word + bytes([2]) * 8
    assert workspaces.pointers(raw, region) == [at]
    blank = workspaces.without_addresses(raw, range(*region[:2]).__contains__)
    assert blank == bytes([1]) * at + bytes(8) + bytes([2]) * 8

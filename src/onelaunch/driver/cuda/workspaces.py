"""A workspace that products share, so that they need not wait for each other.

All products of a stream are handed the same workspace of cuBLAS. Most write nothing there, and the
others a small part at its beginning. Which part does not depend on their numbers: a product that is
launched alone, twice, over a workspace full of a mark, shows it. Those that write are pointed at
parts of their own, further behind in the same memory, if they give the same bits there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.streams import bindings, raw_stream
from onelaunch.driver.edges import Access, NodeGroup

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear")
)
_MARKS = 0x5AC3_A53C_0FF1_E1D5, 0x35A6_C95A_F00E_1E2A
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
_PART_BYTES = 1 << 16  # unit of the parts of a workspace
_MOST_PARTS = 32
_WORD = 8


@dataclass
class Workspace:
    """The products that point at a workspace, by their kernels and arguments."""

    region: Access
    alike: dict[Hashable, list[NodeGroup]] = field(default_factory=dict)


class Workspaces:
    """The workspaces of a graph. `executable`: of the nodes `handles`. `blocks`: the (address,
    bytes) of each block that the capture allocated."""

    def __init__(
        self,
        groups: Sequence[NodeGroup],
        handles: Sequence[int],
        executable: int,
        blocks: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self._handles = handles
        self._executable = executable
        self._device = device
        self._kinds = {node: nodes.kind(node) for node in handles}
        self._by_region = _workspaces(groups, blocks)
        is_address = cache(nodes.is_address)
        for group in groups:
            for hidden in group.hidden if group.name in _PRODUCTS else ():
                if hidden in self._by_region:
                    work = _work(self._members(group), hidden, is_address)
                    self._by_region[hidden].alike.setdefault(work, []).append(group)

    def share(self) -> None:
        """Give each product a part of its own, in `hidden` and in the arguments of its nodes. Waits
        for the current stream. All nodes of the executable are enabled afterwards."""
        workspaces = [workspace for workspace in self._by_region.values() if workspace.alike]
        if not workspaces:
            return
        self._enable(self._handles, False)
        try:
            for workspace in workspaces:
                self._share(workspace)
        finally:
            self._enable(self._handles, True)

    def _share(self, workspace: Workspace) -> None:
        region, parts = workspace.region, dict[Hashable, tuple[int, int]]()
        for work, products in workspace.alike.items():
            part = self._written(region, products[0])
            if part is None:
                for group in products:
                    group.hidden.remove(region)
            else:
                parts[work] = part
        nbytes = max((stop for _, stop in parts.values()), default=0)
        size = -(-nbytes // _PART_BYTES) * _PART_BYTES
        count = min(_MOST_PARTS, (region.stop - region.start) // size) if size else 0
        number = 0
        for work, (start, stop) in parts.items():
            products, same = workspace.alike[work], False
            for group in products if count > 1 else ():
                by = size * (number % count)
                if by and not same and not (same := self._is_same(group, region, by)):
                    break
                if by:
                    nodes.apply(self._shifted(group, region, by, None))
                group.hidden.remove(region)
                first = region.start + by
                group.hidden.append(Access(first + start, first + stop, True))
                number += 1

    def _written(self, region: Access, group: NodeGroup) -> tuple[int, int] | None:
        """Find the bytes `[start, stop)` of a workspace that a product writes; None if none."""
        memory, touched = self._over(region, torch.int64), None
        for mark in _MARKS:
            memory.fill_(mark)
            self._launch(group)
            changed = memory != mark
            touched = changed if touched is None else touched | changed
        assert touched is not None
        places = touched.nonzero()
        if not len(places):
            return None
        first, last = int(places[0]), int(places[-1])
        return _WORD * first, _WORD * (last + 1)

    def _is_same(self, group: NodeGroup, region: Access, by: int) -> bool:
        """Tell whether a product gives and writes the same bits further behind."""
        results = [
            self._over(Access(a.start, a.stop, True), torch.uint8)
            for a in group.accesses or ()
            if a.writes
        ]
        before = [t.clone() for t in results]

        def run() -> list[Tensor]:
            for t, was in zip(results, before, strict=True):
                t.copy_(was)
            written.append(self._written(region, group))
            for t, was in zip(results, before, strict=True):
                t.copy_(was)
            self._launch(group)
            return [t.clone() for t in results]

        written: list[tuple[int, int] | None] = []
        expected = run()
        back = self._shifted(group, region, 0, self._executable)
        nodes.apply(self._shifted(group, region, by, self._executable))
        try:
            moved = run()
        finally:
            nodes.apply(back)
        there = written[0] and (written[0][0] + by, written[0][1] + by)
        return there == written[1] and all(map(torch.equal, moved, expected))

    def _shifted(
        self, group: NodeGroup, region: Access, by: int, executable: int | None
    ) -> list[nodes.Setter]:
        """Prepare the calls that move a group's pointers into a workspace."""
        setters: list[nodes.Setter] = []
        for node in self._members(group):
            if self._kinds[node] == "MEMSET":
                if region.start <= nodes.memset_address(node) < region.stop:
                    setters.append(nodes.memset_setter(executable, node, by))
                continue
            kernel = nodes.KernelNode.read(node)
            assert kernel is not None  # `_work` has read it
            for block, raw in enumerate(kernel.blocks):
                for at in pointers(bytes(raw), region):
                    kernel.word(block, at).value += by
            setters.append(kernel.setter(executable))
        return setters

    def _members(self, group: NodeGroup) -> Sequence[int]:
        return self._handles[group.first : group.last]

    def _launch(self, group: NodeGroup) -> None:
        members = self._members(group)
        self._enable(members, True)
        launch, exec_ = nodes.launcher(self._executable)
        (code,) = launch(exec_, nodes.stream_handle(raw_stream(self._device)))
        if code:
            raise nodes.failure("cuGraphLaunch", code)
        self._enable(members, False)

    def _enable(self, members: Iterable[int], enabled: bool) -> None:
        for node in members:
            if self._kinds[node] != "EMPTY":
                nodes.set_enabled(self._executable, node, enabled)

    def _over(self, region: Access, dtype: torch.dtype) -> Tensor:
        nbytes = (region.stop - region.start) // dtype.itemsize * dtype.itemsize
        make: Callable[..., Any] = bindings._construct_storage_from_data_pointer
        storage = make(region.start, self._device, nbytes)
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage)


def _workspaces(
    groups: Sequence[NodeGroup], blocks: Sequence[tuple[int, int]]
) -> dict[Access, Workspace]:
    """Find the blocks of this capture that several products point at."""
    counts: dict[Access, int] = {}
    own = {(start, start + nbytes) for start, nbytes in blocks}
    for group in groups:
        for hidden in group.hidden if group.name in _PRODUCTS else ():
            large = _LEAST_BYTES <= hidden.stop - hidden.start <= _MOST_BYTES
            if large and (hidden.start, hidden.stop) in own:
                counts[hidden] = counts.get(hidden, 0) + 1
    return {hidden: Workspace(hidden) for hidden, count in counts.items() if count > 1}


def _work(members: Sequence[int], region: Access, is_address: Callable[[int], bool]) -> Hashable:
    """Tell what nodes do, but for the addresses in their arguments. Nodes that do not tell are
    like no others."""
    steps: list[Hashable] = []
    for node in members:
        kind = nodes.kind(node)
        kernel = nodes.KernelNode.read(node) if kind == "KERNEL" else None
        if kernel is not None:
            blocks = tuple(without_addresses(bytes(raw), is_address) for raw in kernel.blocks)
            steps.append((kernel.name, kernel.shape, blocks))
        elif kind == "MEMSET":
            steps.append(("memset", nodes.memset_address(node) - region.start))
        else:
            return node
    return tuple(steps)


def without_addresses(raw: bytes, is_address: Callable[[int], bool]) -> bytes:
    """Blank the words of arguments that are addresses of the device."""
    words = bytearray(raw)
    for at in range(0, len(raw) - _WORD + 1, 4):
        word = int.from_bytes(raw[at : at + _WORD], "little")
        # Up to 57 bits: other words are numbers, and the driver need not be asked.
        if 1 << 32 <= word < 1 << 57 and is_address(word):
            words[at : at + _WORD] = bytes(_WORD)
    return bytes(words)


def pointers(raw: bytes, region: Access) -> list[int]:
    """List the offsets of the words of arguments that point into a region."""
    words = ((at, raw[at : at + _WORD]) for at in range(0, len(raw) - _WORD + 1, 4))
    return [
        at for at, word in words if region.start <= int.from_bytes(word, "little") < region.stop
    ]

"""Whether kernels write the workspace that their arguments point at.

All products of a stream are handed the same workspace of cuBLAS, and most need none. Launched alone
over a workspace full of a mark, twice, a product that leaves both marks whole writes nothing there.
What a product touches does not depend on its numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.streams import bindings
from onelaunch.driver.edges import Access, NodeGroup

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear")
)
_MARKS = 0x5AC3_A53C_0FF1_E1D5, 0x35A6_C95A_F00E_1E2A
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
_WORD = 8


def drop_unused(
    groups: Sequence[NodeGroup],
    handles: Sequence[int],
    executable: int,
    blocks: Sequence[tuple[int, int]],
    index: int,
) -> None:
    """Take workspaces out of `hidden` of products that do not write them. Waits for the stream.

    Args:
        executable: of the nodes `handles`; all are enabled afterwards.
        blocks: the (address, bytes) of what was allocated in the capture.
    """
    products = {hidden: list[NodeGroup]() for hidden in _workspaces(groups, blocks)}
    for group in groups:
        for hidden in group.hidden:
            if hidden in products and group.name in _PRODUCTS:
                products[hidden].append(group)
    if not any(products.values()):
        return
    alike: dict[tuple[Access, Hashable], list[NodeGroup]] = {}
    for hidden, users in products.items():
        for group in users:
            alike.setdefault((hidden, _work(handles[group.first : group.last])), []).append(group)
    written = _written(
        [(hidden, same[0]) for (hidden, _), same in alike.items()], handles, executable, index
    )
    for ((hidden, _), same), used in zip(alike.items(), written, strict=True):
        if not used:
            for group in same:
                group.hidden.remove(hidden)


def _workspaces(groups: Sequence[NodeGroup], blocks: Sequence[tuple[int, int]]) -> set[Access]:
    """Find the blocks of this capture that several products point at."""
    seen, several = set[Access](), set[Access]()
    own = {(start, start + nbytes) for start, nbytes in blocks}
    for group in groups:
        if group.name in _PRODUCTS:
            for hidden in group.hidden:
                large = _LEAST_BYTES <= hidden.stop - hidden.start <= _MOST_BYTES
                if large and (hidden.start, hidden.stop) in own:
                    (several if hidden in seen else seen).add(hidden)
    return several


def _work(members: Sequence[int]) -> Hashable:
    """Tell what nodes do, but for the addresses in their arguments."""
    found: list[Hashable] = []
    for node in members:
        kernel = nodes.KernelNode.read(node) if nodes.kind(node) == "KERNEL" else None
        if kernel is None:
            return node
        numbers = b"".join(map(bytes, kernel.blocks))
        found.append((kernel.name, kernel.shape, _without_addresses(numbers)))
    return tuple(found)


def _without_addresses(raw: bytes) -> bytes:
    """Blank the words of arguments that could be addresses of the device."""
    words = bytearray(raw)
    for at in range(0, len(raw) - _WORD + 1, 4):
        if raw[at + 4 : at + _WORD] in _tops(raw) and nodes.is_address(
            int.from_bytes(raw[at : at + _WORD], "little")
        ):
            words[at : at + _WORD] = bytes(_WORD)
    return bytes(words)


def _tops(raw: bytes) -> set[bytes]:
    """List the upper halves that addresses of the device may have: 0x00007Fxx as a rule."""
    return {raw[at : at + 4] for at in range(4, len(raw) - 3, 4) if raw[at + 2 : at + 4] == b"\0\0"}


def _written(
    tries: Sequence[tuple[Access, NodeGroup]], handles: Sequence[int], executable: int, index: int
) -> list[bool]:
    """Launch groups alone, and tell which of them write their workspace."""
    device = torch.device("cuda", index)
    found = torch.zeros(len(tries), dtype=torch.bool, device=device)
    launch, exec_ = nodes.launcher(executable)
    stream = nodes.stream_handle(torch.cuda.current_stream(index).cuda_stream)

    working = {node for node in handles if nodes.kind(node) != "EMPTY"}

    def enable(members: Sequence[int], enabled: bool) -> None:
        for node in members:
            if node in working:
                nodes.set_enabled(executable, node, enabled)

    enable(handles, False)
    try:
        for number, (hidden, group) in enumerate(tries):
            memory, members = _over(hidden, device), handles[group.first : group.last]
            enable(members, True)
            for mark in _MARKS:
                memory.fill_(mark)
                (code,) = launch(exec_, stream)
                if code:
                    raise nodes.failure("cuGraphLaunch", code)
                found[number] |= (memory != mark).any()
            enable(members, False)
        return found.tolist()
    finally:
        enable(handles, True)


def _over(region: Access, device: torch.device) -> Tensor:
    nbytes = (region.stop - region.start) // _WORD * _WORD
    storage: Any = bindings._construct_storage_from_data_pointer(region.start, device, nbytes)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage)

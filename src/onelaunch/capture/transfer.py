"""The transfer of a recording from the objects of one request to those of the next."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from onelaunch.call.tree import Constant, Container, Same, Tree
from onelaunch.capture.io_plan import Held, HeldView, HostConstant, Memory
from onelaunch.capture.recording import CapturedCall
from onelaunch.driver.protocol import Travel
from onelaunch.state.counterparts import Counterparts


def is_transferable(captured: CapturedCall) -> bool:
    """Return whether a recording relies on no object in a way that cannot be transferred."""
    return (
        captured.pair is None
        and captured.bucket is None
        and not captured.optimizers
        and not captured.statics
        and not captured.lasting
        and not captured.values
        and not captured.followed
        and Travel.ADDRESS not in captured.inputs.travels
        and captured.guard.is_transferable
    )


def transferred(captured: CapturedCall, parts: Counterparts) -> CapturedCall | None:
    """Return the same recording over other objects; None if its guard tells them apart.

    Tensors that the recording reads by address must have changed places already.
    """
    guard = captured.guard.transferred(parts)
    if guard is None:
        return None
    storage = captured.driver.storage
    homes = {storage(new): new for _, new in parts.tensors()}

    def moved(t: Tensor) -> Tensor:
        """Return the counterpart of a tensor, or of the one that it is a view of."""
        new = parts.of(t)
        return homes.get(storage(t), t) if new is t else new

    outputs = [
        replace(output, memory=_transferred_memory(output.memory, parts))
        for output in captured.outputs.made
    ]
    return replace(
        captured,
        hidden=[parts.slot(slot) for slot in captured.hidden],
        outputs=replace(captured.outputs, made=outputs),
        tree=_transferred_tree(captured.tree, parts),
        state=[
            s._replace(slot=parts.slot(s.slot), tree=_transferred_tree(s.tree, parts))
            for s in captured.state
        ],
        guard=guard,
        moves=tuple(map(parts.slot, captured.moves)),
        counts=[count.at(parts.slot(count.slot)) for count in captured.counts],
        written=[moved(t) for t in captured.written],
        version_bumped=[moved(t) for t in captured.version_bumped],
        untraced=[parts.of(t) for t in captured.untraced],
        inputs=replace(captured.inputs),
    )


def _transferred_memory(memory: Memory, parts: Counterparts) -> Memory:
    match memory:
        case Held(tensor) | HostConstant(tensor) | HeldView(tensor, _):
            return replace(memory, tensor=parts.of(tensor))
        case _:
            return memory


def _transferred_tree(tree: Tree, parts: Counterparts) -> Tree:
    if isinstance(tree, Container):
        return tree._replace(children=tuple(_transferred_tree(c, parts) for c in tree.children))
    if isinstance(tree, Same):
        return tree._replace(value=parts.of(tree.value))
    if isinstance(tree, Constant) and tree.by_identity:
        return Constant(parts.of(tree.value))
    return tree

"""The memory of a run between two writes: who wrote it, and how many read it.

No tensor is kept. A storage is known by a weak reference, which reserves its address only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.driver.aten import Operator
from onelaunch.tools.profiler.counting import plain

if TYPE_CHECKING:
    from onelaunch.tools.doctor.slow.products import Product


@dataclass(eq=False, slots=True)
class Value:
    """The contents of memory between two writes.

    Attributes:
        owner: the path of the module whose parameter or buffer it is; also of a copy in another
            dtype, as autocast makes them.
        product: the matrix product or convolution that gave it.
        after: the convolution that it comes from by element-wise steps and norms.
        branches: the convolutions whose sum it is, batch norms in between allowed.
        links: the values between the branches and this value.
        reads: the number of operations that read it, views not among them.
    """

    owner: str | None = None
    product: Product | None = None
    after: Product | None = None
    branches: tuple[Product, ...] = ()
    links: tuple[Value, ...] = ()
    reads: int = 0


@dataclass(slots=True)
class FlowStep:
    """One operation as the flow sees it.

    Attributes:
        read: the values that it read, each once.
        made: the values that it wrote.
    """

    read: list[Value] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)


class Flow:
    """The values of a run, by their storage."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[StorageWeakRef, Value]] = {}

    def of(self, t: Tensor) -> Value:
        """Return the present value of a tensor's memory."""
        storage = t.untyped_storage()
        known = self._values.get(storage._cdata)
        return known[1] if known is not None else self.write(t)

    def write(self, t: Tensor) -> Value:
        """Return a new value in a tensor's memory."""
        storage = t.untyped_storage()
        known = self._values.get(storage._cdata)
        value = Value()
        reference = StorageWeakRef(storage) if known is None else known[0]
        self._values[storage._cdata] = reference, value
        return value

    def step(
        self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> FlowStep | None:
        """Follow an operation; return None if it makes views only."""
        outs = [t for name in op.outs for t in plain(kwargs.get(name))]
        read = [t for t in plain((args, kwargs)) if not any(t is out for out in outs)]
        made = plain(result)
        written = plain(op.written(args, kwargs))
        places = {t.untyped_storage()._cdata for t in read}
        fresh = [t for t in made if t.untyped_storage()._cdata not in places]
        if made and not fresh and not written:
            return None
        step = FlowStep(list({id(value): value for value in map(self.of, read)}.values()))
        for value in step.read:
            value.reads += 1
        targets = {t.untyped_storage()._cdata: t for t in (*written, *fresh)}
        step.made = [self.write(t) for t in targets.values()]
        return step

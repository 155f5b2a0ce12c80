"""The facts about a value that the source shows: is it a tensor, and where is its memory."""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "unknown",
    "plain",  # surely no tensor: None, a string, a shape, a dtype
    "number",  # a bool, int or float of Python
    "tensor",  # a tensor on the device
    "host",  # a tensor that is, or may be, on the host
    "tuple",
    "list",
    "dict",
    "set",
    "iterator",
    "module",  # of torch.nn; `target` is its class's name
    "class",  # of the file; `target` is it
    "instance",  # of a class of the file; `target` is the class
    "function",  # of the file; `target` is it, `bound` its object
    "generator",  # of torch
    "rng",  # of Python or NumPy
    "stream",  # or an event of a device
]


class Value(NamedTuple):
    """Knowledge of a value.

    Attributes:
        mask: whether it is a tensor of bools.
        flag: whether it is a bool of Python.
        given: whether it is an argument of the graphed function, or a view of one.
        drawn: whether it holds random numbers of the host.
        shaped: whether it was computed from the sizes of tensors.
        address: whether it is the address of a tensor.
        made: whether it is surely a new tensor, the result of an operation.
        argument: of what is not known, whether it is an argument, or the result of arithmetic on
            one, which is `made`, too: a tensor, an array or a number.
        registered: whether it is a parameter or buffer of a module.
        moving: the name of a number that changes between calls, and that it was computed from.
        place: where it is kept between calls: ``"self.cache"``, or the name of a global.
        parts: those of a tuple; of a list, one for all.
        target: what it stands for; see `Kind`.
        bound: the object of a bound method.
    """

    kind: Kind = "unknown"
    mask: bool = False
    flag: bool = False
    given: bool = False
    drawn: bool = False
    shaped: bool = False
    address: bool = False
    made: bool = False
    argument: bool = False
    registered: bool = False
    moving: str | None = None
    place: str | None = None
    parts: tuple[Value, ...] = ()
    target: Any = None
    bound: Value | None = None

    @property
    def is_tensor(self) -> bool:
        """True if it is surely a tensor, on the device or not."""
        return self.kind in ("tensor", "host")

    @property
    def is_plain(self) -> bool:
        """True if it is surely neither a tensor nor holds one."""
        return self.kind in ("plain", "number")


UNKNOWN = Value()
PLAIN = Value("plain")
NUMBER = Value("number")
ARGUMENT = Value(argument=True)
COMPUTED = Value(argument=True, made=True)
FLAG = Value("number", flag=True)
TENSOR = Value("tensor")
MASK = Value("tensor", mask=True)
HOST = Value("host")


def join(a: Value, b: Value) -> Value:
    """Return what is known of a value that is one of two."""
    if a == b:
        return a
    if a.target != b.target:
        return UNKNOWN
    if a.is_tensor and b.is_tensor:
        kind: Kind = "tensor" if a.kind == b.kind == "tensor" else "host"
    elif a.kind == b.kind:
        kind = a.kind
    elif a.is_plain and b.is_plain:
        kind = "plain"
    else:
        return UNKNOWN
    parts = a.parts == b.parts or len(a.parts) == len(b.parts)
    return Value(
        kind,
        mask=a.mask and b.mask,
        flag=a.flag or b.flag,
        given=a.given and b.given,
        drawn=a.drawn and b.drawn,
        shaped=a.shaped or b.shaped,
        address=a.address and b.address,
        made=a.made and b.made,
        registered=a.registered and b.registered,
        moving=a.moving or b.moving,
        place=a.place if a.place == b.place else None,
        parts=tuple(map(join, a.parts, b.parts)) if parts else (),
        target=a.target,
        bound=a.bound if a.bound is b.bound else None,
    )


def joined(values: list[Value]) -> Value:
    """Return what is known of a value that is one of several; nothing of one of none."""
    return reduce(join, values) if values else UNKNOWN


def element(value: Value) -> Value:
    """Return what is known of the elements of what is iterated over."""
    if value.is_tensor:
        return value._replace(place=None)
    if value.kind in ("tuple", "list", "set", "iterator"):
        return joined(list(value.parts))
    if value.is_plain:
        return NUMBER._replace(shaped=True) if value.shaped else UNKNOWN
    return UNKNOWN


def computed(values: list[Value]) -> Value:
    """Return what is known of a result of arithmetic on values."""
    moving = next((v.moving for v in values if v.moving), None)
    if any(v.kind == "tensor" for v in values):
        return TENSOR._replace(moving=moving, made=True)
    if any(v.kind == "host" for v in values):
        return HOST._replace(drawn=any(v.drawn for v in values))
    if values and all(v.is_plain for v in values):
        kind: Kind = "number" if all(v.kind == "number" for v in values) else "plain"
        return Value(
            kind,
            shaped=any(v.shaped for v in values),
            address=any(v.address for v in values),
            moving=moving,
        )
    return COMPUTED if any(v.argument for v in values) else UNKNOWN

"""Objects that are values: NumPy's numbers, `Decimal`, dates, and the like.

Two objects of a class are the same value if pickle writes the same for both. `==` is weaker:
`Decimal("2") == Decimal("2.0")`, and a class may leave parts of its objects out.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

Bits = Callable[[object], "tuple[object, ...] | None"]
"""A function that returns the key of a value, by type and bits; None for an object."""

_CODE = type | types.BuiltinFunctionType | types.FunctionType


@functools.lru_cache(maxsize=1024)
def is_value_kind(kind: type) -> bool:
    """Return whether the objects of a class are values that can never change. It has `==` and a
    hash, and no attribute, slot or item that can be set. A `__setattr__` that refuses does not
    count, as `object.__setattr__` sets all the same."""
    return compares(kind) and not (hasattr(kind, "__setitem__") or has_members(kind))


@functools.lru_cache(maxsize=1024)
def compares(kind: type) -> bool:
    """Return whether a class has no attributes, and an `==` and a hash of its own."""
    return (
        kind.__dictoffset__ == 0
        and kind.__eq__ is not object.__eq__
        and kind.__hash__ not in (None, object.__hash__)
        and not issubclass(kind, type | tuple | types.BuiltinFunctionType | types.MethodType)
    )


@functools.lru_cache(maxsize=1024)
def has_members(kind: type) -> bool:
    """Return whether the objects of a class have `__slots__`, or members that C stores."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return any(isinstance(member, types.MemberDescriptorType) for member in members)


def written_bits(value: Any, bits: Bits) -> tuple[object, ...] | None:
    """Return a key of pickle's text for a value; None if there is none, or if it contains an object
    that is no value. Costs a microsecond. `bits`: returns the key of a part."""
    dtype: Any = getattr(value, "dtype", None)
    if hasattr(dtype, "hasobject") and hasattr(value, "tobytes"):  # NumPy's: a tenth of the time
        return None if dtype.hasobject else (type(value), dtype, value.tobytes())
    try:
        written = value.__reduce_ex__(4)
    except TypeError:
        return None  # it refuses to be written
    return _key(written, bits)


def _key(part: Any, bits: Bits) -> tuple[object, ...] | None:
    kind = type(part)
    if kind is tuple or kind is list:
        return _joined(kind, part, bits)
    if kind is dict:
        return _joined(kind, [*part, *part.values()], bits)
    return ("is", part) if isinstance(part, _CODE) else bits(part)


def _joined(kind: type, parts: Iterable[Any], bits: Bits) -> tuple[object, ...] | None:
    keys = [_key(part, bits) for part in parts]
    return None if None in keys else (kind, *keys)

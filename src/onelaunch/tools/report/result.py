"""A result as data: JSON and back, and a document for people."""

from __future__ import annotations

import functools
import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from onelaunch.tools.report.document import Document

_SCALARS: dict[Any, tuple[type, ...]] = {
    **{kind: (kind,) for kind in (bool, int, str)},
    float: (float, int),
}


class Result:
    """A dataclass that goes to JSON and back, and shows itself."""

    noun: ClassVar[str]

    def document(self) -> Document:
        """Return it for people, as the command prints it and ``--report`` writes it."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(cast(Any, self))

    def to_json(self) -> str:
        """Write it as JSON text; `from_json` gives an equal one."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        data = json.loads(text)
        try:
            return made(cls, data)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not {cls.noun} in JSON: {error}") from error


def made(kind: Any, data: Any) -> Any:
    """Make a value of a type from its JSON; fields that it lacks have their defaults.

    Raises:
        KeyError: it lacks a field that has no default.
        ValueError: a word is not known, of another release, say.
        TypeError: it is of another form.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if data is None else made(next(p for p in inside if p is not NoneType), data)
    if origin is tuple:
        kinds = [inside[0]] * len(data) if inside[-1] is ... else inside
        return tuple(map(made, kinds, data))
    if origin is Literal and data not in inside:
        raise ValueError(f"{data!r:.40} is none of {', '.join(map(str, inside))}")
    if kind in _SCALARS and type(data) not in _SCALARS[kind]:
        raise TypeError(f"{data!r:.40} is no {kind.__name__}")
    if not is_dataclass(kind):
        return data
    if not isinstance(data, dict):
        raise TypeError(f"{data!r:.40} is no object")
    found = cast("dict[str, Any]", data)
    types, needed = _fields(kind)
    for name in needed:
        found[name]  # raises KeyError
    return cast(Any, kind)(**{name: made(types.get(name), one) for name, one in found.items()})


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the types of a dataclass's fields by their names, and those without a default."""
    needed = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    return get_type_hints(kind), tuple(needed)

"""`Ragged`: sizes that vary independently, as the nodes and edges of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from onelaunch.errors import ArgumentError
from onelaunch.sizes.buckets import Buckets, Fills, Key

Names = Mapping[Key, str | Sequence[str | None]]


@dataclass(frozen=True, init=False)
class Ragged(Buckets):
    """Sizes that vary independently, with arguments that name rows: graphs and packed sequences.

    Args:
        sizes: size -> its bucket sizes, as in `Buckets`: ``{"nodes": (64, 256), "edges": (512,)}``.
            Every combination is a bucket.
        dims: argument -> the size that each of its dimensions follows: ``{"x": "nodes"}`` for the
            first, ``{"edge_index": (None, "edges")}`` for the second. Others are not padded.
        index: argument of integers -> the size whose rows they name, from 0. Each call is checked
            on the device, as in eager. Its padding names the last row of the bucket, which is
            never real: 64 nodes serve up to 63.
        pad, independent: as in `Buckets`; `pad` names no index.
        overflow: ``"eager"`` or ``"raise"``, as in `Buckets`.

    Raises:
        ArgumentError: OL401 for sizes, names or dimensions that are not valid.

    Example:
        >>> graphs = Ragged(
        ...     sizes={"nodes": (64, 256), "edges": (512,)},
        ...     dims={"x": "nodes", "edge_index": (None, "edges")},
        ...     index={"edge_index": "nodes"},
        ... )
        >>> graphs.choose((64, 512))
        (256, 512)
    """

    names: tuple[str, ...]
    index: Mapping[Key, int] = field(hash=False)
    """Argument -> the number of the size whose rows it names."""

    def __init__(
        self,
        sizes: Mapping[str, Sequence[int]],
        dims: Names,
        *,
        index: Mapping[Key, str] | None = None,
        pad: Fills | None = None,
        overflow: Literal["eager", "raise"] = "eager",
        independent: bool = False,
    ) -> None:
        known = _mapping("sizes", sizes, 'sizes={"nodes": (64, 256), "edges": (512,)}')
        names = tuple(map(str, known))
        given = _mapping("dims", dims, 'dims={"x": "nodes", "edge_index": (None, "edges")}')
        rows = _mapping("index", index or {}, 'index={"edge_index": "nodes"}')
        if overflow not in ("eager", "raise"):
            fix = 'overflow is one of "eager", "raise"'
            raise ArgumentError("OL401", f"overflow={overflow!r}", fix=fix)
        for key in rows:
            if key not in given or key in (pad or {}):
                what = f"index names {key!r}, which {'pad' if key in given else 'no dims'} names"
                fix = f"dims={{{key!r}: ...}}, and no pad of it: its padding names a spare row"
                raise ArgumentError("OL401", what, fix=fix)
        super().__init__(
            tuple(range(len(names))),
            [*sizes.values()],
            dims={key: _dims(names, key, value) for key, value in given.items()},
            pad=pad,
            overflow=overflow,
            independent=independent,
        )
        named = {key: _place(names, "index", key, value) for key, value in rows.items()}
        spare = tuple(int(place in named.values()) for place in range(len(names)))
        for name, least, more in zip(names, self.sizes, spare, strict=True):
            if least[0] <= more:
                what = f"{name} of bucket size 1, whose only row is for padding"
                raise ArgumentError("OL401", what, fix="bucket sizes of at least 2")
        settings = {"dim": (), "names": names, "index": named, "spare": spare}
        for name, value in settings.items():
            object.__setattr__(self, name, value)


def _mapping(option: str, given: object, fix: str) -> dict[Key, object]:
    if not isinstance(given, Mapping) or (not given and option != "index"):
        raise ArgumentError("OL401", f"{option}={given!r:.60}", fix=fix)
    return dict(cast("Mapping[Key, object]", given))


def _place(names: Sequence[str], option: str, key: Key, name: object) -> int:
    """Return the number of a size."""
    if name not in names:
        what = f"{option}={{{key!r}: {name!r}}}"
        raise ArgumentError("OL401", what, fix=f"one of {', '.join(map(repr, names))}")
    return names.index(cast(str, name))


def _dims(names: Sequence[str], key: Key, value: object) -> tuple[tuple[int, ...] | None, ...]:
    """Return the dimensions of an argument that follow each size, as `Buckets` takes them."""
    several = isinstance(value, tuple | list)
    shape = list(cast("Sequence[object]", value)) if several else [value]
    places = [None if name is None else _place(names, "dims", key, name) for name in shape]
    by_place = [tuple(d for d, p in enumerate(places) if p == place) for place in range(len(names))]
    return tuple(dims or None for dims in by_place)

"""The choice of the tests that run: without `--thorough` each test, but not each combination."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

WAY = "world"
"""The parameter that says how compiled code is recorded. Its first value is `backend`."""
ON_DEVICE = ("tape", "cuda")
SEEDS = {"seed", "part"}
"""Parameters that number random programs."""


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests that run everywhere.

    - Plain CPU tensors beside a device: the first case of each file, and tests marked `cpu`.
    - Ways to record compiled code: all on `backend`, each other way on one combination of the rest.
    - Tests of another file that run once more, with an option on: one combination of each.
    - Of seeds and parts the first.
    - Two parameters: cases in which each value occurs; three and more: each pair of values.
    - Nothing that is marked `thorough`.
    """
    kept = [item for item in items if item.get_closest_marker("thorough") is None]
    for choose in (_first_seeds, _on_devices, _ways, _once_more, _covering_cases):
        kept = choose(kept)
    return kept


def params_of(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test: name -> value."""
    return dict(getattr(getattr(item, "callspec", None), "params", {}))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _values(item: pytest.Item) -> dict[str, Hashable]:
    """Name of each parameter -> its value's identity, which all tests of a function share."""
    return {name: id(value) for name, value in params_of(item).items()}


def _without(item: pytest.Item, *names: str) -> tuple[Hashable, ...]:
    values = _values(item).items()
    return (_function(item), *((name, value) for name, value in values if name not in names))


def _first_seeds(items: list[pytest.Item]) -> list[pytest.Item]:
    first: dict[tuple[str, str], object] = {}
    dropped: set[pytest.Item] = set()
    for item in items:
        for name in SEEDS & params_of(item).keys():
            value = params_of(item)[name]
            if first.setdefault((_function(item), name), value) != value:
                dropped.add(item)
    return [item for item in items if item not in dropped]


def _on_devices(items: list[pytest.Item]) -> list[pytest.Item]:
    elsewhere = {
        _without(item, "device") for item in items if params_of(item).get("device") in ON_DEVICE
    }
    first: dict[str, pytest.Item] = {}
    for item in items:
        if params_of(item).get("device") == "cpu":
            first.setdefault(item.nodeid.partition("::")[0], item)
    return [
        item
        for item in items
        if params_of(item).get("device") != "cpu"
        or _without(item, "device") not in elsewhere
        or item.get_closest_marker("cpu") is not None
        or first[item.nodeid.partition("::")[0]] is item
    ]


def _ways(items: list[pytest.Item]) -> list[pytest.Item]:
    groups: defaultdict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        params = params_of(item)
        if params.get(WAY, "backend") != "backend":
            groups[(_function(item), params.get("device"), params[WAY])].append(item)
    return _rotated(items, groups.values())


def _once_more(items: list[pytest.Item]) -> list[pytest.Item]:
    groups: defaultdict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        made_in, module = getattr(item, "function", None), getattr(item, "module", None)
        if getattr(made_in, "__module__", None) != getattr(module, "__name__", None):
            groups[(_function(item), params_of(item).get("device"))].append(item)
    return _rotated(items, groups.values())


def _rotated(items: list[pytest.Item], groups: Iterable[list[pytest.Item]]) -> list[pytest.Item]:
    """The tests of no group, and one of each group: of the first its first, and so on in turn."""
    dropped = {
        item
        for number, group in enumerate(groups)
        for item in group
        if item is not group[number % len(group)]
    }
    return [item for item in items if item not in dropped]


def _covering_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    groups: defaultdict[tuple[int, Hashable], list[pytest.Item]] = defaultdict(list)
    for item in items:
        params = params_of(item)
        count = len(params.keys() - {"device", WAY})
        if count >= 2:
            key = (_function(item), *(params.get(name) for name in ("device", WAY)))
            groups[count, key].append(item)
    dropped = {
        item
        for (count, _), group in groups.items()
        for item in set(group) - _covering(group, values=1 if count == 2 else 2)
    }
    return [item for item in items if item not in dropped]


def _covering(group: Iterable[pytest.Item], values: int) -> set[pytest.Item]:
    """Tests of a group in which each value occurs, or each combination of so many `values`."""
    found_in = {item: set(itertools.combinations(_values(item).items(), values)) for item in group}
    missing = set().union(*found_in.values())
    found: set[pytest.Item] = set()
    while missing:
        best = max(found_in, key=lambda item: len(found_in[item] & missing))
        found.add(best)
        missing -= found_in[best]
    return found

"""The line that changes an attribute, a variable or an item, found in code that ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onelaunch.source import changed_at, line_of
from onelaunch.state.slots import Slot

Change = Callable[[Any, Any], None]


def of_both(o: Any, d: Any) -> None:
    d["n"] = d["n"] + 1  # item
    o.n += 1  # attribute


def by_name(o: Any, d: Any) -> None:
    d["n"] *= 2  # item
    setattr(o, "n", o.n + 1)  # attribute  # noqa: B010


def in_the_dict(o: Any, d: Any) -> None:
    o.__dict__["n"] = len(d)  # attribute
    d["n"] = o.n  # item


def by_methods(o: Any, d: Any) -> None:
    d["n"].append(o)  # item
    o.n.append(1)  # attribute


def of_what_they_hold(o: Any, d: Any) -> None:
    o.n[len(d)] = 1  # attribute
    d["n"][o] = 1  # item


def beside_constants(o: Any, d: Any) -> None:
    d[1] = "n"
    o.m = "n"
    del d["n"]  # item
    del o.n  # attribute


def after_tests(o: Any, d: Any) -> None:
    _ = o.n is None and setattr(o, "n", 0)
    _ = d["n"] is None and d.update(n=0)
    o.n += 1  # attribute
    d["n"] += 1  # item


@pytest.mark.parametrize(
    "change",
    [of_both, by_name, in_the_dict, by_methods, of_what_they_hold, beside_constants, after_tests],
)
@pytest.mark.parametrize("item", [False, True])
def test_an_attribute_is_told_from_an_item(change: Change, item: bool) -> None:
    place = changed_at([change.__code__], "n", item)
    assert place == line_of(change, "# item" if item else "# attribute")


def only_items(o: Any, d: Any) -> None:
    d["n"] = d["n"] + o


def only_attributes(o: Any, d: Any) -> None:
    o.n = o.n + d


def test_a_line_that_changes_the_other_kind_is_not_named() -> None:
    assert changed_at([only_items.__code__], "n") is None
    assert changed_at([only_attributes.__code__], "n", item=True) is None


@pytest.mark.parametrize(
    ("slot", "word", "item"),
    [
        (Slot("item", {}, "n", "model.n", object()), "n", False),
        (Slot("item", {}, "n", "n", None), "n", False),
        (Slot("cell", None, None, "n of f", None), "n", False),
        (Slot("contents", None, repr, "model.n", None), "n", False),
        (Slot("item", {}, "n", "model.kept['n']", None), "n", True),
        (Slot("item", [], 0, "model.kept[0]", None), 0, True),
    ],
)
def test_what_code_calls_a_slot(slot: Slot, word: object, item: bool) -> None:
    assert (slot.word, slot.is_item) == (word, item)

"""Reads of runs: whether one run has read more than others."""

from __future__ import annotations

import types

import pytest

from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use


def reads(**facts: object) -> Reads:
    """Make reads of a run that has read a bit."""
    made = Reads(backward=bool(facts.get("backward")))
    made.takes_functions = "cond" if facts.get("takes_functions") else None
    made.codes.add(reads.__code__)
    if facts.get("code"):
        made.codes.add(pytest.raises.__code__)
    if facts.get("name"):
        made.loose.add("scale")
    if facts.get("attribute"):
        made.owner(STATE).names["scale"] = Use.READ
    if facts.get("item"):
        made.items[id(STATE), "key"] = Use.READ
    if facts.get("whole"):
        made.whole.add(id(STATE))
    return made


STATE = types.SimpleNamespace(scale=1.0)


@pytest.mark.parametrize(
    "fact", ["backward", "takes_functions", "code", "name", "attribute", "item", "whole"]
)
def test_what_counts_as_more(fact: str) -> None:
    held = {id(STATE)}
    assert reads(**{fact: True}).exceeds(reads(), held)
    assert not reads(**{fact: True}).exceeds(reads(**{fact: True}), held)
    assert not reads().exceeds(reads(**{fact: True}), held)

"""Locks of our threads, and a fork of the process by another thread while one of them is held."""

from __future__ import annotations

import os
import threading
import weakref

_conditions: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
_held = threading.local()


def condition() -> threading.Condition:
    """Make a condition that no fork leaves held in the child, where its thread is gone."""
    condition = threading.Condition()
    _conditions.add(condition)
    return condition


def _hold_all() -> None:
    _held.conditions = list(_conditions)
    for one in _held.conditions:
        one.acquire()


def _let_all_go() -> None:
    for one in _held.conditions:
        one.release()
    del _held.conditions


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_hold_all, after_in_parent=_let_all_go, after_in_child=_let_all_go)

"""The identity of an object without an audit event, which `id` raises. With an audit hook in
Python, as filelock has one, `id` takes ten times as long."""

from __future__ import annotations

from collections.abc import Callable

from onelaunch.native import FAILURES, compiled

identity: Callable[[object], int]
try:
    identity = compiled("call_events").identity
except FAILURES:
    identity = id

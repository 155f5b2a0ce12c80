"""`id` without an audit event: with an audit hook in Python, as filelock has one, it would take ten
times as long."""

from __future__ import annotations

import builtins
from collections.abc import Callable

from onelaunch.native import FAILURES, compiled

id: Callable[[object], int]
try:
    id = compiled("call_events").identity
except FAILURES:
    id = builtins.id

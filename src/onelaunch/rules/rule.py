"""The form of a rule, and its documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["blocks-capture", "silently-wrong", "slow"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule, documented.

    The examples are whole programs: each defines ``model``, a callable, and ``args``, the tuple of
    its arguments. The tests run both: the doctor finds the rule's fault in `example`, and not in
    `instead`.

    Attributes:
        code: its code, such as ``"OL101"``.
        name: its name, which reads as "allow <name>": ``"host-read"``.
        severity: what the fault does.
        title: the fault, in a few words.
        what: what the rule finds.
        why: why the fault matters.
        problems: known problems: what it does not find, or finds needlessly; empty for none.
        fix: the code to write instead, in a line.
        example: a program with the fault.
        instead: the program without it.
    """

    code: str
    name: str
    severity: Severity
    title: str
    what: str
    why: str
    problems: str = ""
    fix: str
    example: str
    instead: str

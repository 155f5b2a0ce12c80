"""The form of a rule, and its documentation."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.finding import Severity


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
        same_as: codes of rules that name the same fault at the same line, such as a capture's
            refusal where a bare graph is silent. Only the finding of the other rule is shown.
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
    same_as: tuple[str, ...] = ()


def of_error(
    code: str,
    what: str,
    example: str = "",
    instead: str = "",
    *,
    problems: str = "",
    severity: Severity = "blocks-capture",
    same_as: tuple[str, ...] = (),
) -> Rule:
    """Make the rule of an error: its name, title, reason and fix are the catalogue's."""
    entry = CATALOGUE[code]
    return Rule(
        code=code,
        name=entry.rule,
        severity=severity,
        title=entry.title,
        what=what,
        why=entry.why,
        problems=problems,
        fix=entry.fix,
        example=example.strip(),
        instead=instead.strip(),
        same_as=same_as,
    )

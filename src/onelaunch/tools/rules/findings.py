"""Findings under their rules: names, one fault that several rules name, a choice of rules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from onelaunch.finding import Finding
from onelaunch.tools.rules import RULES


def names_of(finding: Finding) -> tuple[str, ...]:
    """Return the names of the rules that name a fault, its own first."""
    return tuple(RULES[code].name for code in finding.codes)


def under(finding: Finding, codes: Collection[str]) -> Finding | None:
    """Return a finding as one of these rules alone; None if none of them names it."""
    code, *causes = [code for code in finding.codes if code in codes] or [""]
    if not code:
        return None
    rule = RULES[code]
    named = {"name": rule.name, "severity": rule.severity, "causes": tuple(causes)}
    return replace(finding, code=code, **named)


def merged(findings: list[Finding]) -> list[Finding]:
    """Return each fault once, with all means that found it; in the order of files and lines."""
    known: dict[tuple[str, str, int], Finding] = {}
    for finding in findings:
        before = known.get(finding.key)
        known[finding.key] = finding if before is None else before.also(finding)
    for key in list(known):
        finding = known[key]
        for code in RULES[finding.code].same_as if finding.file else ():
            same = known.get((code, *key[1:]))
            if same is not None:
                known[same.key] = _because(same, finding)
                del known[key]
                break
    return sorted(known.values(), key=lambda f: (f.file, f.line, f.code))


def _because(finding: Finding, cause: Finding) -> Finding:
    """Return a finding with that of another rule on the same fault.

    The fix of a refusal that knows no better than its rule gives way to the cause's.
    """
    both = finding.also(cause)
    if cause.code in finding.causes:
        return both
    causes = tuple(dict.fromkeys((*finding.causes, *cause.codes)))
    vague = finding.severity == "blocks-capture" and finding.fix == RULES[finding.code].fix
    fix = cause.fix if vague else finding.fix
    return replace(both, what=f"{finding.what}; {cause.what}", fix=fix, causes=causes)

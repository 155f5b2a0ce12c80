"""Findings as SARIF 2.1.0, with all that GitHub's code scanning asks for.

The format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. What GitHub reads of
it: https://docs.github.com/code-security/reference/code-scanning/sarif-files/sarif-support
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import linecache
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from onelaunch.rules import RULES
from onelaunch.rules.document import markdown, programs, sections, sentence
from onelaunch.rules.finding import Finding
from onelaunch.rules.rule import Rule, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: dict[Severity, str] = {
    "blocks-capture": "error",
    "silently-wrong": "warning",
    "slow": "note",
}
_PROBLEMS = {"error": "error", "warning": "warning", "note": "recommendation"}
_MOST = 1024  # characters that GitHub takes of a description
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?: in |: |\Z)")
Json = dict[str, Any]


def to_sarif(findings: Sequence[Finding], file: str) -> Json:
    """Return findings as a SARIF log.

    Args:
        file: the file for findings without a line: GitHub refuses a log that has a result without
            a place.
    """
    index = {code: number for number, code in enumerate(RULES)}
    seen = Counter[str]()
    driver = {
        "name": "onelaunch",
        "version": _version(),
        "rules": [_rule(rule) for rule in RULES.values()],
    }
    results = [_result(finding, index[finding.code], file, seen) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> Json:
    level = LEVELS[rule.severity]
    texts = {**sections(rule), **programs(rule)}
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": sentence(rule.title)[:_MOST]},
        "fullDescription": {"text": sentence(rule.what or rule.why)[:_MOST]},
        "help": {
            "text": "\n\n".join(f"{title}\n{text}" for title, text in texts.items()),
            "markdown": markdown(rule),
        },
        "defaultConfiguration": {"level": level},
        "properties": {
            "tags": ["cuda-graphs", rule.severity],
            "precision": "high",
            "problem.severity": _PROBLEMS[level],
        },
    }


def _result(finding: Finding, index: int, file: str, seen: Counter[str]) -> Json:
    place = _place(finding, file)
    result: Json = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{sentence(finding.what)} Fix: {finding.fix}"},
        "locations": [place],
        "partialFingerprints": {"onelaunch/v1": _fingerprint(finding, seen)},
        "properties": {"foundBy": list(finding.found_by), "causes": list(finding.causes)},
    }
    below = () if finding.library is None else (finding.library,)
    if finding.calls or below:
        way = [*_steps(finding.calls), place, *_steps(below)]
        steps = [{"location": location} for location in way]
        result["codeFlows"] = [{"threadFlows": [{"locations": steps}]}]
    return result


def _place(finding: Finding, file: str) -> Json:
    if finding.file:
        return _location(finding.file, finding.line, finding.column, finding.source)
    return _location(file or ".", 1, 1)


def _steps(lines: Iterable[str]) -> Iterator[Json]:
    """Return the lines on the way to a finding, ``file:12 in forward``, as locations."""
    for text in lines:
        match = _PLACE.match(text)
        if match is not None:
            yield {**_location(match["file"], int(match["line"]), 1), "message": {"text": text}}


def _location(file: str, line: int, column: int, source: str = "") -> Json:
    """Return a place, from a column to the end of the line."""
    text = linecache.getline(file, line).rstrip() or " " * (column - 1) + source
    region = {
        "startLine": line,
        "startColumn": column,
        "endLine": line,
        "endColumn": max(len(text) + 1, column),
    }
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(file)}, "region": region}}


def _uri(file: str) -> str:
    path = PurePath(file)
    return Path(file).as_uri() if path.is_absolute() else quote(path.as_posix())


def _fingerprint(finding: Finding, seen: Counter[str]) -> str:
    """Return what stays the same of a finding while lines above it come and go."""
    known = "\0".join((finding.code, PurePath(finding.file).as_posix(), finding.source))
    seen[known] += 1
    return hashlib.sha256(known.encode()).hexdigest()[:16] + f":{seen[known]}"


def _version() -> str:
    try:
        return importlib.metadata.version("onelaunch")
    except importlib.metadata.PackageNotFoundError:  # of a source tree
        return "0"

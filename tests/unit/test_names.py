"""What code does with a number of a name: count it, use it, rewrite it."""

from __future__ import annotations

import types

import pytest

from onelaunch.names import only_counts, rewrites


@pytest.mark.parametrize(
    ("line", "counts", "again"),
    [
        ("self.n += 1", True, True),
        ("self.n = (self.n + k) % 3", True, True),
        ("self.n += len(x)", True, True),
        ("self.n += 1; self.n(x)", True, True),  # a method of that name
        ("self.n += 1; x *= self.n", False, True),
        ("self.n = f(self.n)", False, True),
        ("return x * self.n", False, False),
        ("self.n = len(x); return x * self.n", False, False),
        ("self.n = len(x)", True, False),
        ("return lambda: self.n", False, False),
    ],
)
def test_an_attribute(line: str, counts: bool, again: bool) -> None:
    code = code_of(line)
    assert only_counts(code, "n") is counts
    assert rewrites(code, "n") is again


@pytest.mark.parametrize(
    ("line", "counts", "again"),
    [
        ("d['n'] += 1", True, True),
        ("self.d['n'] += 1", True, True),
        ("d[0] += len(x)", True, True),
        ("d['n'] += 1; return x * d['n']", False, True),
        ("self.q[0] = d['n']", False, True),
        ("d['n'] = len(x)", False, False),
        ("return x * d['n']", False, False),
    ],
)
def test_an_item(line: str, counts: bool, again: bool) -> None:
    code = code_of(line)
    assert only_counts(code, "d", items=True) is counts
    assert rewrites(code, "d", items=True) is again


def code_of(line: str) -> types.CodeType:
    namespace: dict[str, types.FunctionType] = {}
    exec(f"def fn(self, d, x, k, f): {line}", namespace)
    return namespace["fn"].__code__

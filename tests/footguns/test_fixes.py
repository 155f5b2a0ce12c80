"""The fix of each finding is tried: pasted into the program with the fault, it ends the fault.

The doctor is silent on what comes out, a graph by hand replays it right, and `ol.graph` gives what
the program with the fault gives in eager.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.tools.doctor.diagnose import diagnose
from onelaunch.tools.doctor.emulated import streams
from onelaunch.tools.doctor.replay import by_driver
from onelaunch.tools.rules.rule import Rule
from tests.footguns.pasted import PASTED, Paste, joined, pasted
from tests.footguns.programs import bare, load
from tests.footguns.test_footguns import RAISED, SILENT, WITH_PROGRAMS, device_for

CALLS = 12
"""A schedule moves in the tenth."""


def test_the_fix_of_each_rule_is_pasted() -> None:
    assert PASTED.keys() == {rule.code for rule in WITH_PROGRAMS}


@pytest.mark.parametrize("rule", WITH_PROGRAMS, ids=lambda rule: rule.code)
def test_a_fix_that_is_pasted_ends_the_fault(rule: Rule, tmp_path: Path) -> None:
    paste, device = PASTED[rule.code], device_for(rule)
    module = load(rule.example, tmp_path / "bad.py", device)
    found = [f for f in diagnose(module.model, module.args).findings if rule.code in f.codes]
    fix = found[0].fix
    text = pasted(rule.example, paste, fix)
    torch.manual_seed(0)
    good = load(text, tmp_path / "good.py", device)
    for finding in diagnose(good.model, good.args).findings:
        assert rule.code not in finding.codes
        assert finding.severity != "blocks-capture"
    if rule.code in SILENT | RAISED:
        replayed = bare(text, rule, tmp_path / "bare.py", device, by_driver)
        assert replayed.refused is None
        assert replayed.differences == ()

    call = joined(paste.call, fix)
    torch.manual_seed(0)
    bad = load(text if paste.moves else rule.example, tmp_path / "eager.py", device)
    expected = Calls(bad, paste, call if paste.moves else "y = fast(*args)", paste.bad)
    expected.make(bad.model)
    seen = Calls(good, paste, call, paste.good)
    graphed: Any = ol.graph(good.model, on_refusal="raise")
    exec(joined(paste.setup, fix), {**vars(good), "fast": graphed})
    seen.make(graphed)
    assert graphed.stats().replays > CALLS / 2
    if rule.code == "OL503":  # no two calls are at one time
        results = [y.unique().tolist() for y in seen.results]
        assert len(set(map(tuple, results))) == CALLS
        return
    seen.check(expected)
    if paste.moves:
        assert not torch.equal(seen.results[-1], seen.results[-2])


class Calls:
    """The calls of a program, and what a caller sees of them."""

    def __init__(self, module: ModuleType, paste: Paste, call: str, then: str) -> None:
        self._names, self._paste, self._call, self._then = vars(module), paste, call, then
        self.results: list[Any] = []
        self.printed = ""
        self.kept: Any = None

    def make(self, fn: Any) -> None:
        """Call it again and again, as the caller's code says."""
        names = {**self._names}

        def fast(*args: Any) -> Any:
            names["given"] = fn(*args)
            return names["given"]

        torch.manual_seed(1)
        printed = io.StringIO()
        with redirect_stdout(printed), streams():
            for _ in range(CALLS):
                args = names["args"]
                if self._paste.fresh:
                    args = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in args)
                names.update(fast=fast, args=args, x=args[0])
                names.pop("y", None)
                exec(self._call, names)
                names.setdefault("y", names["given"])
                exec(self._then, names)
                self.results.append(own(names["y"]))
                if self._paste.fresh:
                    names["args"] = self._names["args"]
        self.printed = printed.getvalue()
        self.kept = own(eval(self._paste.kept, names))

    def check(self, other: Calls) -> None:
        """Compare what a caller sees."""
        torch.testing.assert_close(self.results, other.results)
        torch.testing.assert_close(self.kept, other.kept)
        assert self.printed == other.printed


def own(value: Any) -> Any:
    """Return a result that no later call can change, on the host."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, torch.Size) or not isinstance(value, list | tuple):
        return value if not isinstance(value, torch.Size) else tuple(value)
    return [own(v) for v in value]

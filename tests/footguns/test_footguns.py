"""Each rule's example and the code to write instead, as whole programs.

The doctor finds the fault of the one at its line, and not in the other. A graph captured by hand of
the one raises, or gives something else than eager; of the other it is right.

SILENT: a replay gives other results, or leaves another state, than eager.
ERRORS RAISED: the capture raises.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from onelaunch import testing
from onelaunch.tools.doctor.diagnose import diagnose
from onelaunch.tools.doctor.replay import by_driver
from onelaunch.tools.rules import RULES
from onelaunch.tools.rules.findings import names_of
from onelaunch.tools.rules.rule import Rule
from tests.footguns.programs import BEYOND, bare, by_hand, fault_lines, load, workload_of

NOT_SLOW = [rule for rule in RULES.values() if rule.severity != "slow"]
"""What is slow has tests of its own."""
WITH_PROGRAMS = [rule for rule in NOT_SLOW if rule.code not in BEYOND]
RAISED = {"OL101", "OL102", "OL103", "OL106", "OL109"}
"""The capture raises, with or without onelaunch."""
OURS = {
    "OL108": "nobody can clone an iterator by hand either",
    "OL112": "the backward is outside of the graph",
    "OL114": "the forward is right; gradients do not reach the parameter",
    "OL116": "the forward is right; the backward is outside of the graph",
    "OL122": "the rate changes in the tenth call",
}
"""code -> why `ol.graph` refuses what a few replays of the forward alone get right."""
PYTHON_ALONE = {"OL308", "OL513"}
"""No tensor and no state shows the harm: what Python does besides is not done. See below."""
SILENT = {rule.code for rule in WITH_PROGRAMS} - RAISED - OURS.keys() - PYTHON_ALONE


def rules(codes: set[str]) -> pytest.MarkDecorator:
    chosen = [rule for rule in WITH_PROGRAMS if rule.code in codes]
    assert {rule.code for rule in chosen} == codes
    return pytest.mark.parametrize("rule", chosen, ids=[rule.code for rule in chosen])


def device_for(rule: Rule) -> str:
    """The plain CPU; the emulated device for what a CPU does not refuse."""
    testing.install()
    return "tape" if rule.code in ("OL103", "OL104") else "cpu"


# What there is.


@pytest.mark.parametrize("rule", NOT_SLOW, ids=lambda rule: rule.code)
def test_every_rule_has_programs_or_a_reason(rule: Rule) -> None:
    assert bool(rule.example) == bool(rule.instead) == (rule.code not in BEYOND)
    if rule.code.startswith("OL5"):  # silent: documented with what ol.graph makes of it
        assert all((rule.title, rule.what, rule.why, rule.fix))
        assert "ol.graph" in rule.why


def test_no_reason_is_for_a_rule_that_is_gone() -> None:
    assert BEYOND.keys() <= RULES.keys()


# The doctor.


@rules({rule.code for rule in WITH_PROGRAMS})
def test_the_fault_is_found_at_its_line(rule: Rule, tmp_path: Path) -> None:
    module = load(rule.example, tmp_path / "bad.py", device_for(rule))
    findings = diagnose(module.model, module.args).findings
    found = [f for f in findings if rule.code in f.codes]
    assert found
    assert {f.source for f in found} <= fault_lines(rule)
    assert all(rule.name in names_of(f) for f in found)
    if rule.code in SILENT and rule.code.startswith("OL5"):
        assert all("replay" in f.found_by for f in found), "a replay confirms it"
    lines = [(f.file, f.line) for f in findings if f.severity != "slow"]
    assert len(set(lines)) == len(lines), "no fault is listed twice"


@rules({rule.code for rule in WITH_PROGRAMS})
def test_the_other_program_is_without_the_fault(rule: Rule, tmp_path: Path) -> None:
    module = load(rule.instead, tmp_path / "good.py", device_for(rule))
    found = diagnose(module.model, module.args).findings
    assert not [f for f in found if rule.code in f.codes]
    if rule.code.startswith("OL5"):
        assert found == ()


# SILENT


@rules(SILENT)
@pytest.mark.parametrize("device", ["cpu", "tape"])
def test_a_bare_replay_differs_from_eager(rule: Rule, device: str, tmp_path: Path) -> None:
    testing.install()
    if rule.code == "OL511":
        device = "cpu"  # the emulated device has no generators of its own
    if rule.code == "OL104":
        device = "tape"  # a CPU's own tensors are no host tensors to it
    replayed = bare(rule.example, rule, tmp_path / "bad.py", device, by_driver)
    assert replayed.differences or (rule.code == "OL120" and replayed.refused)


@rules(SILENT | RAISED)
@pytest.mark.parametrize("device", ["cpu", "tape"])
def test_a_bare_replay_of_the_other_is_right(rule: Rule, device: str, tmp_path: Path) -> None:
    testing.install()
    device = device_for(rule) if rule.code in RAISED else device
    replayed = bare(rule.instead, rule, tmp_path / "good.py", device, by_driver)
    assert replayed.refused is None
    assert replayed.differences == ()


def test_a_print_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in ((RULES["OL513"].example, "called\n"), (RULES["OL513"].instead, "")):
        workload = workload_of(load(text, tmp_path / "prints.py", "cpu"))
        workload()
        assert capsys.readouterr().out == expected
        recording = by_driver(workload)
        capsys.readouterr()
        recording.launch()
        assert capsys.readouterr().out == ""
        recording.close()


def test_a_hook_inside_is_not_run(tmp_path: Path) -> None:
    module = load(RULES["OL308"].example, tmp_path / "hooks.py", "cpu")
    module.model(*module.args)
    assert len(module.shapes) == 1
    recording = by_driver(workload_of(module))
    before = len(module.shapes)
    recording.launch()
    assert len(module.shapes) == before
    recording.close()


# ERRORS RAISED


@rules(RAISED)
def test_a_bare_capture_raises(rule: Rule, tmp_path: Path) -> None:
    replayed = bare(rule.example, rule, tmp_path / "bad.py", device_for(rule), by_driver)
    assert replayed.refused is not None


# torch.cuda.graph itself.

# OL106: torch.manual_seed in a capture is not refused there, and its replays differ from eager.
REFUSED_BY_CUDA = (RAISED - {"OL106"}) | {"OL120", "OL511"}


@pytest.mark.gpu
@rules((SILENT | {"OL106"}) - REFUSED_BY_CUDA)
def test_a_cuda_graph_by_hand_differs_from_eager(rule: Rule, tmp_path: Path) -> None:
    replayed = bare(rule.example, rule, tmp_path / "bad.py", "cuda", by_hand)
    assert replayed.refused is None
    assert replayed.differences


@pytest.mark.gpu
@rules(REFUSED_BY_CUDA)
def test_cuda_refuses_a_capture(rule: Rule, tmp_path: Path) -> None:
    """Through the driver, which leaves the process in order where a capture fails."""
    assert bare(rule.example, rule, tmp_path / "bad.py", "cuda", by_driver).refused is not None


@pytest.mark.gpu
@rules(SILENT | RAISED)
def test_a_cuda_graph_by_hand_of_the_other_is_right(rule: Rule, tmp_path: Path) -> None:
    replayed = bare(rule.instead, rule, tmp_path / "good.py", "cuda", by_hand)
    assert replayed.refused is None
    assert replayed.differences == ()


@pytest.mark.gpu
@rules({rule.code for rule in WITH_PROGRAMS})
def test_the_fault_is_found_on_a_gpu(rule: Rule, tmp_path: Path) -> None:
    module = load(rule.example, tmp_path / "bad.py", "cuda")
    found = [f for f in diagnose(module.model, module.args).findings if rule.code in f.codes]
    assert found
    assert {f.source for f in found} <= fault_lines(rule)

"""A diagnosis as text, in the terminal and as JSON."""

from __future__ import annotations

import io
import json
import linecache
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.error_catalogue import CATALOGUE
from onelaunch.finding import Finding
from onelaunch.tools.doctor.diagnosis import Diagnosis, Pieces, together
from onelaunch.tools.doctor.source.comments import kept
from onelaunch.tools.doctor.source.scan import scan
from onelaunch.tools.doctor.spot import shown as shown_as
from onelaunch.tools.report.terminal import show
from onelaunch.tools.rules import RULES
from onelaunch.tools.rules.document import markdown
from onelaunch.tools.rules.findings import merged, names_of
from onelaunch.tools.rules.selection import chosen, code_of, named, nearest

BLOCKING = named("blocks-capture")
NOT_SLOW = BLOCKING | named("silently-wrong")
FILE = shown_as(__file__)
READ = Finding(
    code="OL101",
    name="host-read",
    severity="blocks-capture",
    what="the host reads a tensor in a capture: .item()",
    file="model.py",
    line=3,
    column=16,
    source="return x * x.sum().item()",
    fix="x * x.sum()",
    found_by=("run", "capture"),
)
LISTED = Finding(
    code="OL309",
    name="growing-list",
    severity="silently-wrong",
    what="a list grows",
    file="model.py",
    line=2,
    column=5,
    source="seen.append(1)",
    fix="append it after the call",
    found_by=("source",),
    calls=("main.py:40 in step", "net.py:7 in forward"),
    library="lib/loop.py:9: seen.append(1)",
)
OFF = replace(
    READ, file="", line=0, column=0, source="", what="a setting is off", found_by=("run",)
)
SOURCE = "def f(x):\n    seen.append(1)\n    return x * x.sum().item()\n"


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the findings, in the current folder."""
    monkeypatch.chdir(tmp_path)
    linecache.clearcache()
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    return file


class Gate(nn.Module):
    """A module that reads twice, once by way of a function."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return scaled(x)
        return x


def scaled(x: Tensor) -> Tensor:
    ä = x.sum().item()
    return x * ä


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


@pytest.fixture(scope="module")
def gate() -> Diagnosis:
    """A real diagnosis."""
    return ol.diagnose(Gate().eval(), (torch.ones(4),)).only(BLOCKING)


def shown(diagnosis: Diagnosis, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(diagnosis.document(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_diagnosis_names_lines_columns_and_the_way_there(gate: Diagnosis) -> None:
    asked, read = sorted(gate.findings, key=lambda finding: finding.source)
    assert (asked.line, asked.column) == (line_of("if x.mean() > 0:"), 12)
    assert (read.line, read.column) == (line_of("ä = x.sum().item()"), 9)  # not 10, of bytes
    assert read.source == "ä = x.sum().item()"
    assert read.calls == (f"{FILE}:{line_of('return scaled(x)')} in forward",)
    assert read.found_by == ("run",)
    assert asked.found_by == ("run", "capture")
    assert not gate.clean
    assert gate.replayed is False
    assert gate.target == "Gate"
    assert gate.environment["torch"] == torch.__version__


def test_code_in_a_file_that_is_not_python(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It's a page:\ndef f(x): return x * x.sum().item()\n")
    made: dict[str, Any] = {}
    exec(compile("\ndef f(x): return x * x.sum().item()", str(page), "exec"), made)
    (found,) = ol.diagnose(made["f"], (torch.ones(3),)).only(BLOCKING).findings
    assert (found.line, found.source) == (2, "def f(x): return x * x.sum().item()")


def test_the_text_has_four_parts_for_each_finding(gate: Diagnosis) -> None:
    summary, *lines = str(gate.only({"OL101"})).splitlines()
    assert summary == "Gate: 2 findings block a capture. Graphed, a call is not one launch."
    asked = next(f for f in gate.findings if f.source.startswith("if"))
    assert lines[:4] == [
        "[OL101] host-read: the host reads a tensor in a capture: its truth",
        f"  where: {FILE}:{asked.line}: if x.mean() > 0:",
        f"  why:   {RULES['OL101'].why}",
        f"  fix:   {asked.fix}",
    ]
    assert len(lines) == 8 + len(gate.in_pieces.splitlines())


def test_what_has_no_line_or_is_a_librarys_says_so() -> None:
    text = str(Diagnosis("f", (OFF, LISTED)))
    assert "[OL101] host-read: a setting is off\n  why:" in text
    where = "  where: model.py:2: seen.append(1)\n  below: lib/loop.py:9: seen.append(1)\n  why:"
    assert where in text


def test_a_clean_diagnosis() -> None:
    found = ol.diagnose(nn.ReLU().eval(), (torch.ones(4),)).only(BLOCKING)
    assert found.clean
    assert found.replayed
    looked = "an eager run, a capture and bare replays"
    text = f"ReLU: nothing found in {looked}. Graphed, a call is one launch."
    assert str(found) == text
    assert shown(found) == f"{text}\n"


@pytest.mark.parametrize(
    ("findings", "replayed", "text"),
    [
        ((READ,), None, "1 finding blocks a capture."),
        (
            (READ, READ, LISTED),
            False,
            "2 findings block a capture, 1 is silently wrong. Graphed, a call is not one launch.",
        ),
        ((LISTED,) * 2, True, "2 findings are silently wrong. Graphed, a call is one launch."),
        ((), None, "nothing found in the source."),
    ],
)
def test_the_summary(findings: tuple[Finding, ...], replayed: bool | None, text: str) -> None:
    assert Diagnosis("f", findings, replayed, ("source",)).summary == f"f: {text}"


def test_a_summary_of_many_targets_counts_them() -> None:
    summary = Diagnosis(", ".join(f"{name}.py" for name in "abcde"), (), None, ("source",)).summary
    assert summary == "a.py and 4 more: nothing found in the source."


def test_the_view() -> None:
    diagnosis = Diagnosis("model.py:f", (LISTED, READ, replace(READ, line=9)), False)
    assert shown(diagnosis).splitlines() == [
        "Blocks a capture",
        "",
        "OL101 host-read",
        "  what:  the host reads a tensor in a capture: .item()",
        "  where: model.py:3:16",
        "         return x * x.sum().item()",
        "                    ^",
        "  why:   the value exists only once the device has run, and a replay runs no",
        "         Python that could wait for it: the branch or number of the capture",
        "         would be repeated in every call",
        "  fix:   x * x.sum()",
        "  found: by an eager run and a capture",
        "",
        "OL101 host-read",
        "  what:  the host reads a tensor in a capture: .item()",
        "  where: model.py:9:16",
        "         return x * x.sum().item()",  # that line is another: its column is not marked
        "  fix:   x * x.sum()",
        "  found: by an eager run and a capture",
        "",
        "Silently wrong under a bare graph",
        "",
        "OL309 growing-list",
        "  what:  a list grows",
        "  where: model.py:2:5",
        "         seen.append(1)",
        "         ^",
        "  way:   main.py:40 in step",
        "         net.py:7 in forward",
        "  below: lib/loop.py:9: seen.append(1)",
        "  why:   a replay runs no Python, so the list, dict or set stays as the capture",
        "         left it",
        "  fix:   append it after the call",
        "  found: by the source",
        "",
        *textwrap.wrap(diagnosis.in_pieces, 80),
        "",
        diagnosis.summary,
        "onelaunch explain OL101 prints the whole rule, with an example.",
    ]


def test_the_view_of_what_has_no_line() -> None:
    assert "  what:  a setting is off\n  why:" in shown(Diagnosis("f", (OFF,)))


def test_the_column_is_marked_below_letters_and_tabs(model: Path) -> None:
    model.write_text("def f(x):\n\tü = 2; x.item()\n")
    linecache.clearcache()
    found = replace(READ, line=2, column=9, source="ü = 2; x.item()")
    assert "         ü = 2; x.item()\n                ^\n" in shown(Diagnosis("f", (found,)))


def test_a_long_line_is_cut_and_markup_is_text(model: Path) -> None:
    line = f"y = x[/bold].item() + {'1 + ' * 40}1"
    model.write_text(line + "\n")
    linecache.clearcache()
    text = shown(Diagnosis("f", (replace(READ, line=1, column=5, source=line),)))
    assert f"         {line[:70]}…\n             ^\n" in text


def test_several_as_one() -> None:
    twice = replace(READ, found_by=("source",))
    first = Diagnosis("a", (LISTED, READ), True, ("run", "capture"), environment={"torch": "2"})
    both = together([Diagnosis("src", (twice,), None, ("source",)), first])
    assert both.target == "src, a"
    assert both.findings == (LISTED, replace(READ, found_by=("source", "run", "capture")))
    assert both.replayed is True
    assert both.means == ("source", "run", "capture")
    assert both.environment == {"torch": "2"}
    blocked = replace(first, target="b", replayed=False, pieces=Pieces(2, ("b.py:1: f(x)",)))
    one = together([first, blocked])
    assert one.replayed is False
    assert one.summary.endswith("Graphed, not every call is one launch.")
    assert one.in_pieces.startswith('With on_refusal="split" a call is 2 launches')
    assert together([blocked, blocked]).in_pieces.startswith("Diagnose one alone")


def test_a_fault_that_two_rules_name_is_one_finding(model: Path) -> None:
    model.write_text("import random\n\ndef f(x):\n    return x * random.random()\n")
    program: dict[str, Any] = {}
    exec(compile(model.read_text(), "model.py", "exec"), program)
    diagnosis = ol.diagnose(program["f"], (torch.ones(3),)).only(NOT_SLOW)
    (found,) = diagnosis.findings
    assert found.codes == ("OL117", "OL502")
    assert names_of(found) == ("runs-differ", "host-random")
    assert set(found.found_by) == {"run", "capture", "replay"}
    assert "[OL117, OL502] runs-differ, host-random: " in str(diagnosis)
    assert "OL117 runs-differ\nOL502 host-random\n  what:" in shown(diagnosis)
    assert Diagnosis.from_json(diagnosis.to_json()).findings == (found,)
    assert json.loads(diagnosis.to_json())["findings"][0]["causes"] == ["OL502"]
    again = together([diagnosis, Diagnosis("model.py", tuple(scan(["model.py"])))])
    assert again.findings == (found,)

    silent = diagnosis.only({"OL502", "OL503"}).findings[0]
    assert (silent.code, silent.name, silent.severity) == ("OL502", "host-random", "silently-wrong")
    assert silent.causes == ()
    assert diagnosis.only({"OL503"}).clean
    assert diagnosis.only(chosen((), ("OL117",))).findings == (silent,)
    assert diagnosis.only(chosen(("silently-wrong",), ())).findings == (silent,)

    for name in ("runs-differ", "host-random", "OL502"):
        model.write_text(f"\n\n\n{found.source}  # onelaunch: allow {name} -- a test\n")
        assert kept([found]) == []
    model.write_text(f"\n\n\n{found.source}  # onelaunch: allow clock -- a test\n")
    assert kept([found]) == [found]


def test_the_fix_is_that_of_the_rule_which_knows_more() -> None:
    own = replace(READ, code="OL117", name="runs-differ", fix=RULES["OL117"].fix)
    cause = replace(LISTED, code="OL503", file=own.file, line=own.line, fix="read it before")
    (found,) = merged([own, cause])
    assert (found.codes, found.fix) == (("OL117", "OL503"), "read it before")
    (found,) = merged([replace(own, fix="draw on the device"), cause])
    assert found.fix == "draw on the device"


def test_two_faults_of_a_line_are_two_findings() -> None:
    other = replace(LISTED, file=READ.file, line=READ.line)
    assert [f.code for f in merged([READ, other])] == ["OL101", "OL309"]


def test_what_split_makes_of_it() -> None:
    parts = Pieces(launches=3, outside=("a.py:7: x.item()", "b.py:2: print(x)"))
    lines = ["  a.py:7: x.item()", "  b.py:2: print(x)"]
    here = Diagnosis("f", (READ,), False, pieces=parts)
    head = 'With on_refusal="split" a call is 3 launches; what runs as it is:'
    assert here.in_pieces.splitlines() == [head, *lines]
    assert str(here).endswith(f"\n{here.in_pieces}")
    assert f"\n\n{here.in_pieces}\n\nf: 1 finding" in shown(here)
    one = replace(here, pieces=replace(parts, launches=1))
    assert one.in_pieces.startswith('With on_refusal="split" a call is 1 launch; what runs as it ')
    assert json.loads(here.to_json())["pieces"]["outside"] == [
        "a.py:7: x.item()",
        "b.py:2: print(x)",
    ]
    assert together([here, Diagnosis("src", (), None, ("source",))]).pieces == parts
    assert together([here, here]).pieces is None  # of which of them?


def test_what_split_does_not_help() -> None:
    parts = Pieces(launches=0, outside=("a.py:7: x.item()",))
    nothing = Diagnosis("f", (READ,), False, pieces=parts)
    head = 'With on_refusal="split" a call is no launch, and runs as it is throughout, because of:'
    assert nothing.in_pieces.splitlines() == [head, "  a.py:7: x.item()"]
    unknown = replace(nothing, pieces=None)
    assert unknown.in_pieces.startswith('What on_refusal="split" makes of it is not known')
    assert unknown.in_pieces in str(unknown)
    assert replace(unknown, findings=(LISTED,)).in_pieces == ""
    assert replace(unknown, replayed=None).in_pieces == ""  # of files


def test_a_call_that_has_no_piece() -> None:
    def listed(x: Tensor) -> Any:
        return x.tolist()

    class Listed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.tolist()

    for fn in (listed, Listed().eval()):
        pieces = ol.diagnose(fn, (torch.ones(3),)).pieces
        assert pieces is not None
        assert pieces.launches == 0
        assert [line.rpartition(": ")[2] for line in pieces.outside] == ["return x.tolist()"]


class Halves(nn.Module):
    """A layer before a read, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.second(x)


def test_a_real_diagnosis_counts_the_pieces() -> None:
    parts = ol.diagnose(Halves().eval().requires_grad_(False), (torch.ones(2, 4),)).pieces
    assert parts is not None
    assert parts.launches == 2
    (outside,) = parts.outside
    assert outside.endswith(f"test_doctor_output.py:{line_of('if x.sum() > 0:')}: if x.sum() > 0:")


PIECES_FIRST = """
import sys, torch, onelaunch as ol
assert ol.diagnose(lambda x: (x * 2).tolist(), (torch.ones(3),)).pieces is not None
trees = sys.modules["torch._inductor.cudagraph_trees"]
assert hasattr(trees.local, "tree_manager_containers"), "another thread's"
"""


FIRST = "import torch, onelaunch as ol; ol.diagnose(lambda x: x * 2, (torch.ones(3),))"


@pytest.mark.parametrize("code", [FIRST, pytest.param(PIECES_FIRST, marks=pytest.mark.thorough)])
def test_a_diagnosis_is_the_first_thing_that_a_process_does(code: str) -> None:
    """Dynamo is imported under its watch, and asks for folders of modules that are half there.
    Inductor's own graphs are of the thread that imports them first, and the pieces are compiled in
    one that has ended by then: https://github.com/pytorch/pytorch/issues/123177."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Which rules a word names.


def test_rules_are_named_by_code_name_severity_and_beginning() -> None:
    assert named("OL101") == named("ol101") == named("host-read") == named("Host_Read") == {"OL101"}
    assert named("OL1") == {code for code in RULES if code.startswith("OL1")}
    assert named("OL") == set(RULES)
    assert named("blocks-capture") >= {"OL101", "OL102"}
    assert "OL309" not in named("blocks-capture")
    assert named("host") == named("OL9") == named("") == named("101") == set()


def test_codes_are_found_by_name_too() -> None:
    assert code_of("[ol101]") == code_of("host_read") == "OL101"
    assert code_of("OL401") == "OL401"  # an error, and no rule
    assert code_of("host") is None
    assert nearest("host-rread") == "host-read"
    assert nearest("OL1001") in RULES
    assert nearest("OL11") in CATALOGUE
    assert nearest("OL999") is None  # no code has two of its digits
    assert nearest("zzz") is None


def test_every_rule_has_a_name_of_its_own_and_a_documentation() -> None:
    names = [rule.name for rule in RULES.values()]
    assert len(set(names)) == len(names)
    for rule in RULES.values():
        text = markdown(rule)
        for title in ("What it finds", "Why it matters", "What to write"):
            assert f"\n## {title}\n\n" in text, rule.code
        assert text.count("```python\n") == bool(rule.example) + bool(rule.instead), rule.code


# What `graph` raises.


@pytest.mark.parametrize("kind", [nn.Module, "function"])
def test_a_refused_capture_has_the_doctors_finding(kind: Any, gate: Diagnosis) -> None:
    fn: Any = Gate().eval() if kind is nn.Module else lambda x: scaled(x)
    fast = ol.graph(fn, warmup=1)
    fast(torch.ones(4))
    with pytest.raises(ol.CaptureError) as raised:
        fast(torch.ones(4))
    finding = raised.value.finding
    assert finding is not None
    doctors = [f for f in gate.findings if f.line == finding.line]
    assert [(f.code, f.source, f.what, f.fix) for f in doctors] == [
        (finding.code, finding.source, finding.what, finding.fix)
    ]
    assert Path(finding.file).samefile(__file__)
    assert finding.found_by == ("capture",)


def test_a_whole_step_that_hands_out_its_loss() -> None:
    """Its backward has used the graph up; the doctor runs none of its own over it."""
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    diagnosis = ol.diagnose(step, (torch.ones(2, 3),))
    assert diagnosis.replayed
    assert not [f for f in diagnosis.findings if f.severity == "blocks-capture"]

"""The doctor's rules on the source, and its comments."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import onelaunch as ol
from onelaunch import testing
from onelaunch.errors import ArgumentError
from onelaunch.finding import Finding
from onelaunch.tools.doctor.diagnose import diagnose
from onelaunch.tools.doctor.diagnosis import Diagnosis
from onelaunch.tools.doctor.source import lint
from onelaunch.tools.doctor.source.comments import allowed, kept
from onelaunch.tools.doctor.source.scan import scan, scan_text
from onelaunch.tools.rules import FOUND_IN_FILES, RULES
from onelaunch.tools.rules.selection import chosen
from tests.unit.source_programs import FILES, FORWARDS, HEAD, of_forward

PROGRAMS = {name: of_forward(body) for name, body in FORWARDS.items()}
PROGRAMS |= {name: HEAD + text for name, text in FILES.items()}
ROOT = Path(__file__).parents[2]


def expected(text: str) -> list[tuple[str, int]]:
    """The faults that a program marks."""
    lines = enumerate(text.splitlines(), start=1)
    marked = ((re.search(r"#!((?: OL\d+)+)$", line), number) for number, line in lines)
    return [(code, number) for found, number in marked if found for code in found[1].split()]


def found_in(text: str) -> list[tuple[str, int]]:
    return sorted((f.code, f.line) for f in scan_text("program.py", text.encode()))


def test_a_form_feed_ends_no_line() -> None:
    text = f"import torch\n\f# \x1c\u2028\n{next(iter(PROGRAMS.values()))}"
    for finding in scan_text("program.py", text.encode()):
        assert finding.source == text.split("\n")[finding.line - 1].strip()


@pytest.mark.parametrize("name", PROGRAMS)
def test_faults_are_found_and_nothing_else(name: str) -> None:
    assert found_in(PROGRAMS[name]) == sorted(expected(PROGRAMS[name]))


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks"])
def test_nothing_is_found_in_our_own_files(folder: str) -> None:
    assert scan([ROOT / folder]) == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_are_python(name: str) -> None:
    compile(PROGRAMS[name], name, "exec")


GRAPHED = "\nimport onelaunch\nfast = onelaunch.graph(model)\n"


@pytest.mark.parametrize("code", sorted(FOUND_IN_FILES))
def test_a_rule_that_is_found_in_files_finds_its_example(code: str) -> None:
    """And nothing in the program to write instead."""
    rule = RULES[code]
    assert code in {found for found, _ in found_in(rule.example + GRAPHED)}
    assert found_in(rule.instead + GRAPHED) == []


def test_the_rules_of_the_lint_are_those_found_in_files() -> None:
    assert set(re.findall(r'"(OL\d+)"', Path(lint.__file__).read_text())) == FOUND_IN_FILES


NO_TAPE = {"numpy", "array", "not_capturing", "not_capturing_and"}
"""Programs that the emulated device cannot run: no NumPy, and no function of CUDA's own."""


@pytest.mark.parametrize("name", sorted(FORWARDS.keys() - NO_TAPE))
def test_a_capture_confirms(name: str) -> None:
    """What is found blocks a capture, and where nothing is found, nothing does."""
    testing.install()
    code = PROGRAMS[name].replace("torch.cuda.", "torch.tape.")
    program: dict[str, Any] = {}
    exec(compile(code, name, "exec"), program)
    fast: Any = ol.graph(program["Net"]().to("tape"), on_refusal="raise")
    x = torch.arange(8.0, device="tape").view(2, 4)
    codes = {OURS.get(code, code) for code, _ in expected(PROGRAMS[name])}
    blocking = {code for code in codes if code.startswith("OL1")}
    refused: set[str] = set()
    try:
        with torch.no_grad():
            for _ in range(6):
                fast(x)
    except ol.CaptureError as error:
        refused = {error.code}
    assert refused <= blocking
    assert bool(refused) == bool(blocking)
    assert refused or fast.stats().replays


OURS = {"OL502": "OL117", "OL503": "OL117"}
"""What a bare graph gets wrong in silence, a capture of ours refuses: two of its runs differ."""


def test_a_finding_names_its_place_and_the_way_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(HEAD + FILES["helper_of_forward"])
    first = scan(["net.py"])[0]
    line = len(HEAD.splitlines()) + 3
    assert (first.code, first.name, first.severity) == ("OL101", "host-read", "blocks-capture")
    assert (first.file, first.line, first.column) == ("net.py", line, 16)
    assert first.source == "return v / v.max().item()  #! OL101"
    assert first.found_by == ("source",)
    assert first.calls == (f"net.py:{line + 7} in forward",)
    assert first.fix


def test_the_line_and_column_are_those_of_the_run(tmp_path: Path) -> None:
    """So that a fault found by both is one finding."""
    text = """
    import onelaunch as ol
    @ol.graph
    def read(x):
        y = (
            x.sum()
            .item()
        )
        if (
            x.sum()
            > 0
        ):
            y += 1
        assert x.any()
        return x[x > 0], f"{x.sum()}", not x.all()
    model = read.__wrapped__
    """
    ran = {f.key: f for f in diagnosed(tmp_path, text)}
    read = scan([tmp_path / "program_of_test.py"])
    assert {f.line for f in read} == {7, 10, 14, 15}
    for finding in read:
        assert finding.key in ran
    assert [f.column for f in read[:2]] == [ran[f.key].column for f in read[:2]]


def diagnosed(tmp_path: Path, text: str) -> list[Finding]:
    """The findings of a program's `model`, called with a tensor."""
    file = tmp_path / "program_of_test.py"
    file.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location("program_of_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(diagnose(module.model, (torch.ones(2, 4),)).findings)


def not_slow(tmp_path: Path, text: str) -> list[Finding]:
    return [f for f in diagnosed(tmp_path, text) if f.severity != "slow"]


def test_a_diagnosis_finds_what_ran(tmp_path: Path) -> None:
    text = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.verbosity = 0

        def forward(self, x):
            self.calls += 1
            if self.verbosity > 2:
                print(x)
                self.calls += 1
            return helper(x)

        def other(self, x):
            self.calls += 1

    def helper(x):
        log.append(1)
        return x * 2

    log = []
    model = Net()
    """
    assert {(f.code, f.line) for f in not_slow(tmp_path, text)} == {("OL501", 10), ("OL309", 20)}


def test_branches_that_are_not_taken_are_read_in_files(tmp_path: Path) -> None:
    text = """
    import torch

    class Net(torch.nn.Module):
        normalizes = False

        def forward(self, x):
            y = torch.relu(x)
            if self.normalizes:
                y = y / y.max().item()
            return y

    model = Net()
    """
    assert not [f for f in diagnosed(tmp_path, text) if f.severity == "blocks-capture"]
    (found,) = scan([tmp_path / "program_of_test.py"])
    assert (found.code, found.line) == ("OL101", 10)


def test_a_diagnosis_knows_its_entry(tmp_path: Path) -> None:
    text = """
    def inner(x):
        x.relu_()
        return x

    def model(x):
        return inner(x * 2).view(-1), x.view(-1)
    """
    assert [(f.code, f.line) for f in not_slow(tmp_path, text)] == [("OL506", 7)]


def test_a_diagnosis_finds_faults_of_functions_inside_others(tmp_path: Path) -> None:
    text = """
    def make():
        log = []
        def step(x):
            log.append(x.sum())
            return x * 2
        return step

    def net():
        rows = []
        class Net(torch.nn.Module):
            def forward(self, x):
                rows.append(x.sum())
                return first(x)
        return Net()

    import torch
    first, model = make(), net()
    """
    found = [(f.codes, f.line) for f in not_slow(tmp_path, text)]
    assert found == [(("OL309",), 5), (("OL105", "OL309"), 13)]


@pytest.mark.parametrize("code", ["x.to('cpu')", "x.to(device='cpu')", "x.to(torch.device('cpu'))"])
def test_a_copy_to_the_host_is_found_on_the_host(tmp_path: Path, code: str) -> None:
    """There it copies nothing."""
    text = f"import torch\ndef model(x):\n    return {code} + 1\n"
    (found,) = not_slow(tmp_path, text)
    assert (found.code, found.line, found.found_by) == ("OL103", 3, ("run",))


def test_the_host_as_a_variable_is_the_device_on_the_host(tmp_path: Path) -> None:
    text = """
    import torch
    device = torch.device("cpu")
    def model(x):
        return x.to(device).to(x.device, torch.float32).to("cuda" if x.is_cuda else x) + 1
    """
    assert not not_slow(tmp_path, text)


def test_comments_allow(tmp_path: Path) -> None:
    text = of_forward(
        "y = x.item()  # onelaunch: allow host-read -- once, at the start\n"
        "# onelaunch: allow host-copy, data-dependent-shape -- it is small\n"
        "# and it is rare\n"
        "z = x.cpu(), x.nonzero()\n"
        "w = x.item()  # onelaunch: allow OL101 -- by code\n"
        "v = x.item()  # onelaunch: allow host-copy -- another rule\n"
        "\n"
        "# onelaunch: allow host-read -- not right above it\n"
        "\n"
        "u = x.item()"
    )
    file = tmp_path / "net.py"
    file.write_text(text)
    found = scan([file])
    first = text.splitlines().index("    def forward(self, x: Tensor):") + 2
    assert [f.line - first for f in found] == [5, 9]
    assert not any(map(allowed, found))


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        ("allow host-read", "its comment lacks a reason: `allow host-read -- why`"),
        ("allow host-read --", "its comment lacks a reason: `allow host-read -- why`"),
    ],
)
def test_a_comment_that_allows_nothing_is_told(tmp_path: Path, comment: str, says: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(of_forward(f"y = x.item()  # onelaunch: {comment}"))
    (finding,) = scan([file])
    assert finding.what == f"`.item()` reads a tensor on the host; {says}"
    assert kept([finding]) == [finding]


def test_comments_allow_what_a_run_found(tmp_path: Path) -> None:
    text = """
    def model(x):
        y = x.sum().item()  # onelaunch: allow host-read -- it is meant so
        return x * x.sum().item()
    """
    found = [f for f in diagnosed(tmp_path, text) if f.code == "OL101"]
    assert [f.line for f in found] == [4]


def test_folders_are_scanned(tmp_path: Path) -> None:
    fault = of_forward("return x.item()")
    for name in (
        "a.py",
        "inner/b.py",
        "build/c.py",
        ".venv/d.py",
        "inner/skip/e.py",
        "f.txt",
        "env/pyvenv.cfg",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(fault)
    (tmp_path / "env" / "g.py").write_text(fault)
    names = [Path(f.file).name for f in scan([tmp_path])]
    assert names == ["a.py", "c.py", "b.py", "e.py"]
    assert len(scan([tmp_path, tmp_path / "a.py"])) == 4
    assert len(scan([tmp_path / ".venv", tmp_path / "env"])) == 2  # which are named


@pytest.mark.parametrize(
    ("text", "says"),
    [("def f(:\n", "is not Python"), ("x = 1\0", "is not Python"), (None, "there is no file")],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "net.py"
    if text is not None:
        file.write_text(f"import torch  # def forward\n{text}")
    with pytest.raises(ArgumentError, match=says) as raised:
        scan([file])
    assert raised.value.code == "OL401"
    assert raised.value.fix


def test_a_file_in_a_folder_that_is_not_python_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch  # def forward\ndef f(:\n")
    (tmp_path / "b.py").write_text(of_forward("x.item()"))
    unread: list[ArgumentError] = []
    assert [f.code for f in scan([tmp_path], unread=unread)] == ["OL101"]
    assert [error.where for error in unread] == [f"{tmp_path / 'a.py'}:2"]


def test_what_is_named_is_python(tmp_path: Path) -> None:
    for name, text in (("plain.py", "x = [\n"), ("net.ipynb", '{"cells": [null]}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ArgumentError, match="Python"):
            scan([tmp_path / name])


def test_deep_nesting_is_survived() -> None:
    deep = " + ".join(["x"] * 900)
    assert found_in(of_forward(f"return {deep}")) == []


@pytest.mark.parametrize("name", ["net.py", "latin.py"])
def test_encodings(tmp_path: Path, name: str) -> None:
    latin = name == "latin.py"
    text = ("# -*- coding: latin-1 -*-\n# \xe9" if latin else "# \xe9") + of_forward("x.item()")
    (tmp_path / name).write_bytes(text.encode("latin-1" if latin else "utf-8"))
    assert [f.code for f in scan([tmp_path / name])] == ["OL101"]


def test_rules_are_chosen() -> None:
    texts = [HEAD + FILES[name] for name in ("address", "helper_of_forward")]
    findings = [f for text in texts for f in scan_text("program.py", text.encode())]
    diagnosis = Diagnosis("program.py", tuple(findings))
    codes = {"OL101", "OL309", "OL510"}

    def left(select: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> set[str]:
        return {f.code for f in diagnosis.only(chosen(select, ignore)).findings}

    assert left() == codes
    assert left(("OL5",)) == {"OL510"}
    assert left(("OL5", "growing-list")) == {"OL309", "OL510"}
    assert left(("host-read",)) == {"OL101"}
    assert left(("OL3", "OL5"), ("growing-list",)) == {"OL510"}
    assert left(("OL101",), ("OL1",)) == set()


def test_nothing_imports_torch() -> None:
    program = (
        "import sys\n"
        "from onelaunch.tools.doctor.source.scan import scan\n"
        "scan([sys.argv[1]])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    file = str(ROOT / "tests" / "unit" / "source_programs.py")
    subprocess.run([sys.executable, "-c", program, file], check=True, cwd=ROOT / "src")


@pytest.mark.thorough
def test_a_thousand_files_take_seconds(tmp_path: Path) -> None:
    """A thousand of 200 lines: a few seconds, 10 at most; generous, as other things run too. In a
    process of its own, as the command has: among the million objects of one that has run other
    tests, Python's garbage collector takes longer than the rules."""
    text = HEAD
    for number, body in enumerate(FORWARDS.values()):
        if len(text.splitlines()) < 200:
            text += of_forward(body).removeprefix(HEAD).replace("class Net", f"class Net{number}")
    for number in range(1000):
        (tmp_path / f"net_{number}.py").write_text(text)
    program = (
        "import ast, sys, time\n"
        "from pathlib import Path\n"
        "from onelaunch.tools.doctor.source.scan import scan\n"
        "begin = time.process_time()\n"
        "for file in Path(sys.argv[1]).iterdir():\n"
        "    ast.parse(file.read_bytes())\n"
        "parsed = time.process_time()\n"
        "findings = scan([sys.argv[1]])\n"
        "print(len(findings), parsed - begin, time.process_time() - parsed)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    told = subprocess.run(command, check=True, cwd=ROOT / "src", capture_output=True, text=True)
    findings, parsed, seconds = map(float, told.stdout.split())
    assert findings == 1000 * len(expected(text))
    assert seconds < 60
    assert seconds < 10 * parsed

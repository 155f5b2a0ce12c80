"""Results for the tests of reports: as on a GPU, with every part filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onelaunch.finding import Finding
from onelaunch.tools.bench import Comparison, Row, Timing
from onelaunch.tools.bench.profile import Limit
from onelaunch.tools.checklist.plan import Plan, Trial
from onelaunch.tools.doctor.diagnosis import Diagnosis
from onelaunch.tools.report.document import Span, Timeline
from onelaunch.tools.report.page import page
from onelaunch.tools.report.result import Result

HOSTILE = "</script><img src=x onerror=window.hit=1><b a='\"`${1}`&amp; \\u003c <!-- "


def page_of(result: Result) -> str:
    """The page of a result."""
    return page(result.document())


def timed(name: str, wall: float, *, fresh: bool = True, noisy: bool = False) -> Row:
    return Row(
        engine=name,
        title=f"the {name}",
        status="ok",
        error=3e-7,
        fresh_output=fresh,
        build_seconds=0.5,
        wall=Timing(wall, 0.4, 20),
        host=Timing(wall / 2, 0.4, 20),
        gpu=Timing(wall / 3, 0.4, 20),
        noisy=noisy,
        memory_bytes=3 << 20,
        code=f"y = {name}(x)",
        notes=("a <note>",),
    )


def timeline(name: str, kernels: int, pace: float) -> Timeline:
    """Make a timeline whose kernels of 2 us begin every `pace` us."""
    spans = [Span(f"{name} call", "host", 0.0, kernels * pace)]
    spans += [Span("launch", "host", i * pace, pace / 2, 1) for i in range(kernels)]
    spans += [Span("a kernel", "gpu", 5.0 + i * pace, 2.0) for i in range(kernels)]
    return Timeline(name, f"the {name}", kernels * pace + 8.0, tuple(spans))


def named(found: Comparison, text: str) -> Comparison:
    """Add a text to all names of a comparison: of engines and spans."""
    rows = tuple(
        replace(row, title=f"{row.title} {text}", code=f"{row.code} {text}") for row in found.rows
    )
    timelines = tuple(
        replace(line, title=text, spans=tuple(replace(span, name=text) for span in line.spans))
        for line in found.timelines
    )
    return replace(found, rows=rows, timelines=timelines)


def comparison(text: str = "net") -> Comparison:
    """Make a comparison whose texts hold `text`."""
    return Comparison(
        workload=text,
        rows=(
            timed("eager", 90.0),
            timed("slow", 400.0, noisy=True),
            timed("quick", 30.0),
            timed("static", 20.0, fresh=False),
            Row("off", "the off", "wrong", "relative error 1.0e-01 is above 1.0e-04", error=0.1),
            Row("broken", "the broken", "failed", f"ValueError: {text}"),
            Row("absent", "the absent", "missing", "needs an NVIDIA GPU"),
        ),
        profile=Limit("launches", 71.0, 15.0, 14),
        tolerance=1e-4,
        remarks=(f"a remark {text}",),
        environment={"gpu": "Some GPU", "torch": "2.11", "triton": None, "cpu": text},
        rounds=12,
        timelines=(timeline("eager", 20, 6.0), timeline("quick", 20, 2.1)),
    )


def plan(text: str = "net") -> Plan:
    """Make a plan of two steps that were kept, and one trial of each other outcome."""
    first = Trial("fold", f"Norms folded {text}", "kept", "4 of 4 norms", 2e-7, us(90), us(60))
    return Plan(
        workload=text,
        steps=("fold", "one-launch"),
        trials=(
            first,
            Trial("tf32", "TF32", "no gain", f"it is not faster {text}", 2e-7, us(60), us(61)),
            Trial("int8", "INT8", "wrong", "relative error 3.1e-02", 3.1e-2, us(60), None),
            Trial("fp8", "FP8", "failed", "RuntimeError: no", None, None, None),
            Trial("merge", "branches merged", "not possible", "no branches", None, None, None),
            Trial("one-launch", "One launch", "kept", None, 2e-7, us(60), us(21)),
            Trial("fold", "Norms folded again", "kept", None, 2e-7, us(28), us(21), "recheck"),
            Trial("fold", "all that is kept", "kept", None, 2e-7, us(90), us(20), "final"),
        ),
        max_error=1e-3,
        error=2e-7,
        eager=us(90),
        result=us(20),
        environment={"gpu": "Some GPU", "torch": "2.11"},
        remarks=(f"a remark {text}",),
    )


def us(median: float) -> Timing:
    return Timing(median, 0.4, 20)


def diagnosis(text: str = "net") -> Diagnosis:
    """Make a diagnosis with a finding of each severity."""
    return Diagnosis(
        target=text,
        findings=(
            finding("OL101", "host-read", "blocks-capture", text),
            finding("OL513", "host-print", "silently-wrong", text),
            finding("OL602", "grad-mode", "slow", text),
        ),
        replayed=False,
        means=("source", "run"),
        environment={"torch": "2.11"},
    )


def finding(code: str, name: str, severity: object, text: str) -> Finding:
    assert severity in ("blocks-capture", "silently-wrong", "slow")
    return Finding(
        code=code,
        name=name,
        severity=severity,
        what=f"`.item()` reads a tensor {text}",
        file="models/net.py",
        line=12,
        column=9,
        source=f"if x.sum().item() > 0:  # {text}",
        fix=f"`torch.where(x > 0, a, b)` {text}",
        found_by=("source", "run"),
        calls=("models/net.py:30 in forward", f"models/net.py:12 in {text}"),
        library="torch/nn/linear.py:1",
    )


PAGES: dict[str, Callable[[str], str]] = {
    "comparison": lambda text: page_of(named(comparison(text), text)),
    "plan": lambda text: page_of(plan(text)),
    "diagnosis": lambda text: page_of(diagnosis(text)),
}

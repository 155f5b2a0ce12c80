"""The table, the page and the figures in the documents say what the data says."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import render
from benchmarks.engines import ORDER, engines_for
from benchmarks.picture import ENGINES as ENGINES_DRAWN
from benchmarks.show import committed
from examples.workloads import WORKLOADS
from onelaunch.tools.bench import ENGINES, Comparison, Row, Timing
from onelaunch.tools.bench.shown import cells, timing, verdict
from onelaunch.tools.bench.timeline import MOST, Span, Timeline
from onelaunch.tools.doctor.diagnosis import Diagnosis
from onelaunch.tools.report.page import prose, text
from onelaunch.tools.report.terminal import show
from onelaunch.tools.report.units import memory
from tests.unit import reported
from tests.unit.reported import page_of, timed

COMPARISON = reported.comparison("<net>")


def printed(comparison: Comparison, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO())
    show(comparison.document(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_verdict_names_the_best_and_the_quicker_that_overwrites() -> None:
    assert [*verdict(COMPARISON)] == [
        "Fastest correct engine: the quick, 30.0 us per call, 3.00x eager.",
        "the static takes 20.0 us, if you are done with each result before the next call "
        "overwrites it.",
    ]
    chance = Comparison("w", (timed("eager", 90.0, noisy=True), timed("quick", 30.0)))
    assert not any("3.00x" in said for said in verdict(chance))
    assert any("may be chance" in said for said in verdict(chance))
    nothing = Comparison("w", (Row("a", "A", "missing", "no GPU"),))
    assert "No engine was right" in next(verdict(nothing))


def test_the_headline_is_over_eager_in_the_same_grad_mode() -> None:
    """The engines record for no backward, and neither does the bound; eager with gradients does."""
    both = replace(COMPARISON, rows=(*COMPARISON.rows, timed("no_grad", 60.0)))
    answer = next(verdict(both))
    assert answer.endswith("30.0 us per call, 3.00x eager, 2.00x eager without gradients.")
    page = page_of(both)
    assert f"<h1>{answer.replace(' us', ' µs')}</h1>" in page
    assert "<dt>eager</dt><dd>90.0 µs, 3.00x</dd>" in page
    assert "<dt>eager without gradients</dt><dd>60.0 µs, 2.00x</dd>" in page


def test_the_table_has_every_row_the_paragraph_and_the_code() -> None:
    text = printed(COMPARISON)
    assert text.index("bound by launches") < text.index("the static") < text.index("the quick")
    assert text.index("the slow") < text.index("wrong: relative error") < text.index("missing:")
    for part in ("30.0 us ±0.2", "3.0e-07", "3 MiB", "noisy", "y = quick(x)", "a remark", "<net>"):
        assert part in text


def test_on_a_cpu_each_engine_is_one_line_of_80_columns() -> None:
    """Nothing wraps and nothing is cut off; engines without times have their reason below."""
    rows = [
        Row(
            engine.name,
            engine.title,
            "ok",
            error=1e-7,
            fresh_output=engine.name != "onelaunch-static",
            build_seconds=71.0,
            wall=Timing(119_000, 75_800, 9),
            host=Timing(249, 129_789_000, 9),
            noisy=True,
            memory_bytes=408 << 10,
        )
        for engine in ENGINES.values()
        if engine.missing(torch.device("cpu")) is None and engine.name != "onelaunch-max-autotune"
    ]
    text = printed(Comparison("w", (*rows, Row("a", "A", "missing", "no GPU"))), width=80)
    lines = text.splitlines()
    for row in rows:
        overwritten = " *" if row.fresh_output is False else ""
        line = next(line for line in lines if line.startswith(f"{row.title}{overwritten}  "))
        assert " ".join(line.split()).endswith("~119 ms ±37.9 249 us 1.0e-07 71.0 s 408 KiB")
    assert any(line.split() == ["A", "missing:", "no", "GPU"] for line in lines)
    assert "*: the next call overwrites the result." in lines


def test_code_is_printed_as_it_is_pasted_and_a_long_one_is_folded() -> None:
    """No line is cut or wrapped, however narrow the terminal; of 90 lines ten are enough."""
    line = f"y = quick({', '.join(f'argument_{i}' for i in range(12))})"
    best = replace(timed("quick", 30.0), code=line)
    assert line in printed(Comparison("w", (best,)), width=40).splitlines()
    long = "\n".join(f"line_{i} = {i}" for i in range(90))
    text = printed(Comparison("net.py:model", (replace(best, code=long),)))
    assert text.endswith("line_9 = 9\n# and 80 lines more: --json and --report write all\n")
    page = page_of(Comparison("net.py:model", (replace(best, code=long),)))
    assert "<summary>The code, in 90 lines</summary>" in page
    assert "line_89 = 89" in page


RESULTS = [reported.comparison, reported.plan, reported.diagnosis]


@pytest.mark.parametrize("make", RESULTS)
def test_every_result_goes_to_json_and_back(make: Callable[[], Any]) -> None:
    found = make()
    kind = type(found)
    assert kind.from_json(found.to_json()) == found
    lacking = json.loads(found.to_json())
    del lacking[next(iter(lacking))]
    more = {**json.loads(found.to_json()), "unknown": 1}
    for wrong in ("{}", "[1]", json.dumps(lacking), json.dumps(more), "7", "no JSON"):
        with pytest.raises(ValueError, match=kind.noun if wrong != "no JSON" else None):
            kind.from_json(wrong)


@pytest.mark.parametrize(
    ("make", "known", "other", "said"),
    [
        (
            reported.comparison,
            '"status": "ok"',
            '"status": "newer"',
            "'newer' is none of ok, wrong",
        ),
        (reported.comparison, '"interrupted": false', '"interrupted": "no"', "'no' is no bool"),
        (reported.plan, '"outcome": "kept"', '"outcome": 7', "7 is none of kept, required"),
        (reported.diagnosis, '"code": "OL', '"code": "OL9', "this release has no rule OL9"),
    ],
)
def test_a_result_of_another_release_is_none(
    make: Callable[[], Any], known: str, other: str, said: str
) -> None:
    found = make()
    text = found.to_json().replace(known, other)
    with pytest.raises(ValueError, match=f"not {found.noun} in JSON: .*{said}"):
        type(found).from_json(text)


def test_results_that_change_are_not_called_checked() -> None:
    row = Row("a", "A", "unchecked", "changes", error=0.9, wall=Timing(5.0, 1.0, 3))
    text = printed(Comparison("w", (row,), tolerance=9.0))
    assert "9e+00" not in text
    assert "9.0e-01" not in text
    assert "No engine could be checked" in text


def test_an_engine_that_failed_after_some_rounds_has_its_reason() -> None:
    failed = replace(timed("slow", 50.0), status="failed", reason="MemoryError: tired")
    for shown in (printed(found := Comparison("w", (failed, timed("a", 9.0)))), page_of(found)):
        assert "failed: MemoryError: tired" in shown
        assert "50.0" in shown


def test_empty_columns_are_left_out() -> None:
    text = printed(Comparison("w", (Row("a", "A", "missing", "no GPU"),), interrupted=True))
    assert "memory" not in text
    assert "Interrupted" in text


class Parsed(HTMLParser):
    """Checks that tags close, and collects what would be loaded from elsewhere."""

    VOID = ("meta", "br", "wbr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def specs(page: str) -> dict[str, Any]:
    """The specification of each chart of a page, by its name."""
    found = re.findall(
        r'<figure id="(\w+)">.*?<script type="application/json">(.*?)</script>', page, re.S
    )
    return {name: json.loads(spec) for name, spec in found}


@pytest.mark.parametrize("name", reported.PAGES)
def test_a_page_is_one_well_formed_file(name: str) -> None:
    for name_of_it in ("net", reported.HOSTILE):
        page = reported.PAGES[name](name_of_it)
        parsed = Parsed(page)
        assert parsed.loads == ["#figures"]  # the skip link
        assert "img" not in parsed.seen
        assert parsed.seen.count("h1") == 1
        assert "default-src 'none'" in page
        assert len(page.encode()) < 3_000_000
        assert parsed.seen.count("figure") == len(specs(page))


def test_a_page_allows_its_own_script_and_no_other() -> None:
    page = reported.PAGES["plan"]("net")
    script = page.rpartition('<script type="module">')[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in page


def test_the_page_of_a_comparison_says_all() -> None:
    page = page_of(COMPARISON)
    for part in (
        "<h1>Fastest correct engine: the quick, 30.0 µs per call, 3.00x eager.</h1>",
        "30.0 µs",
        "y = quick(x)",
        "bound by launches",
        "Some GPU",
        "needs an NVIDIA GPU",
        "failed: ValueError: &lt;net&gt;",
        "the quick: a &lt;note&gt;",
    ):
        assert part in page
    assert page.index("3.00x eager") < page.index("y = quick(x)") < page.index("<figure")


def test_a_page_without_figures_needs_no_script() -> None:
    page = page_of(Comparison("w", (Row("a", "A", "missing", "no GPU"),)))
    assert "<figure" not in page
    assert "<script" not in page
    assert "<h1>No engine was right and timed, so none can be named the fastest.</h1>" in page


def test_the_bars_are_as_long_as_the_times() -> None:
    values = specs(page_of(COMPARISON))["walls"]["data"]["values"]
    walls = {value["name"]: value["wall"] for value in values}
    assert walls == {"the static *": 20.0, "the quick": 30.0, "the eager": 90.0, "the slow": 400.0}
    assert [value["shown"] for value in values][-1] == "~400 µs"
    assert (values[0]["low"], values[0]["high"]) == (19.8, 20.2)
    assert [value["host"] for value in values] == [10.0, 15.0, 45.0, 200.0]
    assert [value["gpu"] for value in values] == pytest.approx([20 / 3, 10.0, 30.0, 400 / 3])
    assert [value["name"] for value in values if value["best"]] == ["the quick"]


def test_one_slow_engine_does_not_hide_the_others() -> None:
    eager, quick = timed("eager", 90.0), timed("onelaunch", 30.0)
    page = page_of(replace(COMPARISON, rows=(eager, quick, timed("tvm", 9_000.0))))
    values = {value["name"]: value for value in specs(page)["walls"]["data"]["values"]}
    ends = {name.removeprefix("the "): value["wall"] for name, value in values.items()}
    assert ends["eager"] < ends["tvm"] < 1.1 * ends["eager"]
    assert values["the tvm"]["shown"] == "9.0 ms"
    assert "Cut off, since it would hide the others: the tvm." in page


def test_the_timelines_have_one_axis_and_say_how_busy_the_gpu_is() -> None:
    spec = specs(page_of(COMPARISON))["timelines"]
    assert spec["params"][0]["value"] == 128.0
    assert spec["params"][0]["bind"]["options"] == [128.0, 50.0]
    shown = [value["shown"] for value in spec["layer"][2]["data"]["values"]]
    assert shown == ["128 µs, GPU busy 31%", "50.0 µs, GPU busy 80%"]
    tops = {value["top"] for value in spec["data"]["values"] if value["gpu"]}
    assert len(tops) == 2  # eager's lane above that of the graphed one


def test_the_longest_timelines_are_a_small_page() -> None:
    """With names as those of kernels, and as many spans as a timeline has at most."""
    name = (
        "void at::native::vectorized_elementwise_kernel<4, " + 20 * "at::native::Functor<float>, "
    )
    spans = [
        Span(name, lane, 1.234567 * i, 1.111111, depth)
        for i in range(MOST)
        for lane, depth in (("host", 1), ("gpu", 0))
    ]
    line = Timeline("eager", "eager", 1.3 * MOST, (*spans, Span(name, "host", 0, 9, 5)), 7)
    page = page_of(replace(COMPARISON, timelines=(line, line)))
    assert len(page.encode()) < 3_000_000
    assert "16 operators further inside are not drawn." in page
    assert name.partition("<")[0] in page


def test_the_waterfall_goes_from_the_given_callable_down() -> None:
    page = page_of(reported.plan())
    values = specs(page)["steps"]["data"]["values"]
    assert [value["kind"] for value in values] == ["whole", "gain", "gain", "result"]
    level = 90 * 21 / 28  # as the recheck saw the first step
    bars = [(value["low"], value["high"]) for value in values]
    assert bars[:2] == [(0.0, 90.0), pytest.approx((level, 90.0))]
    assert bars[2:] == [pytest.approx((level * 21 / 60, level)), (0.0, 20.0)]
    for part in (
        "4.50x, at a relative error of 2.0e-07, by fold, one-launch",
        "relative error 3.1e-02",
        "RuntimeError: no",
        "Branches merged",
    ):
        assert part in page
    for step, outcome, reason in (
        ("tf32", "no gain", "TF32: it is not faster net"),
        ("int8", "wrong", "INT8: relative error 3.1e-02"),
        ("fp8", "failed", "FP8: RuntimeError: no"),
        ("merge", None, "Branches merged: no branches"),
    ):
        assert step in page[: page.index(reason)].rpartition("<tr")[2]
        assert outcome is None or f">{outcome}</td>" in page
    assert ">not possible</td>" not in page  # the reason says it


def test_the_page_of_a_diagnosis_has_each_finding_with_its_source() -> None:
    page = page_of(reported.diagnosis())
    for part in (
        "1 finding blocks a capture, 1 is silently wrong, 1 is slow.",
        "models/net.py:12:9",
        "if x.sum().item() &gt; 0:  # net",
        "<code>torch.where(x &gt; 0, a, b)</code> net",
        "models/net.py:30 in forward",
        "torch/nn/linear.py:1",
        "Found by the source and an eager run.",
    ):
        assert part in page
    assert page.index("Blocks a capture (1)") < page.index("Slow (1)")
    assert "<h1>w: nothing found.</h1>" in page_of(Diagnosis("w", ()))


def test_microseconds_and_code_in_sentences() -> None:
    assert text("41 us <b>") == "41 µs &lt;b&gt;"
    assert text("a bus in us") == "a bus in us"
    assert prose("say `a < b` here") == "<p>say <code>a &lt; b</code> here</p>"
    assert prose("one ` alone") == "<p>one ` alone</p>"


def test_cells() -> None:
    assert cells(Row("a", "A", "missing", "no GPU")) == ("A", *[""] * 6)
    noisy = Row(
        "a", "A", "unchecked", fresh_output=False, wall=Timing(9, 1, 5), noisy=True, error=1
    )
    assert cells(noisy)[:5] == ("A *", "~9.0 us ±0.50", "", "", "")
    assert timing(Timing(1234.5, 100.0, 5)) == "1.2 ms ±0.05"
    assert timing(Timing(249, 2 * 64_894_000, 5)) == "249 us ±64.9 s"
    assert [memory(n) for n in (0, 80)] == ["0", "80 B"]
    assert [memory(n) for n in (0, 2048, 3 << 20, 3 << 30)] == ["0", "2 KiB", "3 MiB", "3.0 GiB"]


@pytest.mark.parametrize("workload", ORDER)
def test_a_committed_result_is_shown_as_one_of_this_machine(workload: str) -> None:
    comparison = committed(workload)
    assert comparison.best is not None
    assert not comparison.best.engine.startswith("bare")  # which is no way to run anything
    text = printed(comparison)
    assert "NVIDIA" in text
    assert "Fastest correct engine: " in text
    assert "NVIDIA" in page_of(comparison)


def test_the_demo_shows_a_committed_result() -> None:
    """Without a GPU, after its own; and says at its top, in two lines, what a CPU cannot show."""
    text = (render.ROOT / "scripts" / "demo").read_text()
    assert "python -m benchmarks.show cnn" in text
    assert text.index("A laptop can show") < text.index("It cannot show") < text.index("compare ex")


def test_the_benchmark_names_engines_and_workloads_that_exist() -> None:
    assert set(ORDER) <= set(WORKLOADS)
    for workload in ORDER:
        assert set(engines_for(workload)) <= set(ENGINES)
    assert "max-autotune" in engines_for("mlp")
    assert "max-autotune" not in engines_for("resnet50")


def results(folder: Path) -> None:
    data = json.loads(COMPARISON.to_json())
    environment = {"gpu": "Some GPU", "driver": "580", "cuda": "13.0", "torch": "2.11"}
    environment |= {"cudnn TF32": "off"}
    found = {"benchmark": "engines", "environment": environment, "workloads": {"mlp": data}}
    (folder / "engines.json").write_text(json.dumps(found))


@pytest.mark.parametrize("name", render.TABLES)
def test_tables_are_filled_between_markers_and_stay_as_they_are(name: str, tmp_path: Path) -> None:
    results(tmp_path)
    page = f"before\n<!-- begin:{name} -->\nold\n<!-- end:{name} -->\nafter\n"
    if name.startswith("engines"):
        new = render.render(page, tmp_path)
        assert "old" not in new
        assert "MLP (32, 1024)" in new
        assert new.startswith("before\n")
        assert new.endswith("after\n")
        assert render.render(new, tmp_path) == new


def test_figures_show_their_doubts(tmp_path: Path) -> None:
    results(tmp_path)
    page = "<!-- begin:engines-wall -->\n<!-- end:engines-wall -->"
    text = render.render(page, tmp_path)
    assert "| the slow | ~400 |" in text
    assert "| the quick | 30.0 |" in text
    assert "| the broken | failed |" in text
    assert "TF32 off" in text


def test_the_documents_are_up_to_date() -> None:
    for file in [render.ROOT / "README.md", *(render.ROOT / "docs").glob("*.md")]:
        if file.exists():
            assert render.render(file.read_text()) == file.read_text(), (
                "run: python -m benchmarks.render"
            )
    assert render.picture() == render.PICTURE.read_text(), "run: python -m benchmarks.render"


def test_the_picture_shows_every_workload_in_every_engine() -> None:
    text = render.picture()
    svg = "{http://www.w3.org/2000/svg}"
    panels = list(ElementTree.fromstring(text).iter(f"{svg}g"))
    workloads = json.loads((render.RESULTS / "engines.json").read_text())["workloads"]
    assert len(panels) == len(workloads)
    for panel, (name, data) in zip(panels, workloads.items(), strict=True):
        said = [element.text for element in panel.iter(f"{svg}text")]
        assert said[0] == render.NAMES[name]
        assert said[1::2] == list(ENGINES_DRAWN.values())
        assert said[2::2] == [render.wall(data, engine) for engine in ENGINES_DRAWN]
        widths = [float(bar.attrib["width"]) for bar in panel.iter(f"{svg}rect")]
        walls = [comparable(data, engine) for engine in ENGINES_DRAWN]
        assert widths == pytest.approx([w / max(walls) * max(widths) for w in walls], abs=0.1)
    assert len(text.encode()) < 30_000
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "(docs/engines.svg)" in (render.ROOT / "README.md").read_text()


def comparable(data: dict[str, Any], engine: str) -> float:
    """The wall time that a bar is to show, 0 where there is none."""
    row = next((row for row in data["rows"] if row["engine"] == engine), None)
    return row["wall"]["median_us"] if row and row["status"] == "ok" and row["wall"] else 0.0


def test_an_engine_without_a_time_has_no_bar(tmp_path: Path) -> None:
    results(tmp_path)
    text = render.picture(tmp_path)
    assert text.count('width="0.0"') == len(ENGINES_DRAWN) - 1  # eager alone was measured there

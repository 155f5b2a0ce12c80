"""The table, the page and the figures in the documents say what the data says."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
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
from onelaunch.bench import ENGINES, Comparison, Row, Timing
from onelaunch.bench.profile import Limit
from onelaunch.report.cells import cells, memory, timing, verdict
from onelaunch.report.html import STYLE, to_html
from onelaunch.report.table import show


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


COMPARISON = Comparison(
    workload="<net>",
    rows=(
        timed("eager", 90.0),
        timed("slow", 400.0, noisy=True),
        timed("quick", 30.0),
        timed("static", 20.0, fresh=False),
        Row("off", "the off", "wrong", "relative error 1.0e-01 is above 1.0e-04", error=0.1),
        Row("broken", "the broken", "failed", "ValueError: <no>"),
        Row("absent", "the absent", "missing", "needs an NVIDIA GPU"),
    ),
    profile=Limit("launches", 71.0, 15.0, 14),
    tolerance=1e-4,
    remarks=("a remark",),
    environment={"gpu": "Some GPU", "torch": "2.11", "triton": None},
    rounds=12,
)


def printed(comparison: Comparison, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO())
    show(comparison, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_verdict_names_the_best_and_the_quicker_that_overwrites() -> None:
    assert verdict(COMPARISON) == (
        "Fastest correct engine: the quick, 30.0 us per call, 3.00x eager. the static takes "
        "20.0 us, if you are done with each result before the next call overwrites it."
    )
    chance = Comparison("w", (timed("eager", 90.0, noisy=True), timed("quick", 30.0)))
    assert "3.00x" not in verdict(chance)
    assert "may be chance" in verdict(chance)
    nothing = Comparison("w", (Row("a", "A", "missing", "no GPU"),))
    assert "No engine was right" in verdict(nothing)


def test_the_table_has_every_row_the_paragraph_and_the_code() -> None:
    text = printed(COMPARISON)
    assert text.index("bound by launches") < text.index("the static") < text.index("the quick")
    assert text.index("the slow") < text.index("wrong: relative error") < text.index("missing:")
    for part in ("30.0 us ±0.2", "3.0e-07", "3 MiB", "noisy", "y = quick(x)", "a remark", "<no>"):
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


def test_results_that_change_are_not_called_checked() -> None:
    row = Row("a", "A", "unchecked", "changes", error=0.9, wall=Timing(5.0, 1.0, 3))
    text = printed(Comparison("w", (row,), tolerance=9.0))
    assert "9e+00" not in text
    assert "9.0e-01" not in text
    assert "No engine could be checked" in text


def test_empty_columns_are_left_out() -> None:
    text = printed(Comparison("w", (Row("a", "A", "missing", "no GPU"),), interrupted=True))
    assert "memory" not in text
    assert "Interrupted" in text


class Page(HTMLParser):
    """Checks that tags close, and collects what would be loaded from elsewhere."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_well_formed_file() -> None:
    text = to_html(COMPARISON)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert page.seen.count("dt") == page.seen.count("i") == 4
    assert "&lt;net&gt;" in text
    assert "<net>" not in text
    assert "<no>" not in text
    for part in ("bound by launches", "y = quick(x)", "Some GPU", "needs an NVIDIA GPU"):
        assert part in text
    assert len(text) < 20_000


def test_a_page_without_figures() -> None:
    page = Page()
    page.feed(to_html(Comparison("w", (Row("a", "A", "missing", "no GPU"),))))
    assert "dl" not in page.seen


def test_the_bars_are_as_long_as_the_times() -> None:
    parts = [float(part) for part in re.findall(r"--part:([\d.]+)", to_html(COMPARISON))]
    assert parts == [20 / 400, 30 / 400, 90 / 400, 1.0]  # the fastest first


def test_nothing_on_the_page_is_wider_than_a_phone() -> None:
    """Long words break, tables and code scroll by themselves, and no width is in pixels."""
    text = to_html(COMPARISON)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    rules = dict(re.findall(r"^([\w., :-]+) \{(.*?)\}", STYLE, re.M | re.S))
    assert "overflow-wrap: anywhere" in rules["body"]
    for scrolls in ("table", "pre"):
        assert "overflow-x: auto" in rules[scrolls]
    assert "display: block" in rules["table"]  # a table that is none does not scroll
    widths = re.findall(r"(?<![-\w])(?:min-)?width: ([^;]+);", STYLE)
    assert widths == ["12rem", "calc(var(--part) * (100% - 5.5rem))", "1px"]
    assert not re.search(r"\b(width|height)=", text.replace("width=device-width", ""))
    assert "minmax(0, 1fr)" in STYLE.partition("@media (max-width: 40rem)")[2]


@pytest.mark.parametrize("dark", [False, True])
def test_the_colours_of_text_stand_out(dark: bool) -> None:
    light, _, rest = STYLE.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#\w{6})\b", rest.partition("\n}")[0] if dark else light))
    colours.pop("bar", None)
    assert set(colours) == {"best", "wrong", "failed", "small"}
    page = "#121212" if dark else "#ffffff"
    for name, colour in colours.items():
        brighter, darker = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (brighter + 0.05) / (darker + 0.05) > 4.5, name  # WCAG's contrast of text


def luminance(colour: str) -> float:
    """WCAG's relative luminance of ``#rrggbb``."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_cells() -> None:
    assert cells(Row("a", "A", "missing", "no GPU")) == ("A", *[""] * 6, "missing: no GPU")
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
    assert "NVIDIA" in to_html(comparison)


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
    row = render.row_of(data, engine)
    return row["wall"]["median_us"] if row and row["status"] == "ok" and row["wall"] else 0.0


def test_an_engine_without_a_time_has_no_bar(tmp_path: Path) -> None:
    results(tmp_path)
    text = render.picture(tmp_path)
    assert text.count('width="0.0"') == len(ENGINES_DRAWN) - 1  # eager alone was measured there

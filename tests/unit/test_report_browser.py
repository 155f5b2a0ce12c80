"""The pages in a real browser: nothing fails or is loaded, every chart has its data, all is in
reach of a keyboard and of a phone, in light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.conftest import CHROMIUM
from tests.unit import reported

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

PHONE, DESKTOP = (360, 800), (1280, 900)
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")

MARKS = {"comparison": {"walls": 4, "timelines": 82}, "plan": {"steps": 4}, "diagnosis": {}}
"""The marks of each chart: as many as its data have."""
GROUP = {"timelines": "spans"}  # of marks; else it has the chart's name


@dataclass
class Seen:
    """A page that is open, and what the browser had to say."""

    page: Page
    failures: list[str] = field(default_factory=list[str])


@pytest.fixture(scope="session")
def browser() -> Generator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each page in a file; the hostile ones, too."""
    folder = tmp_path_factory.mktemp("pages")
    found: dict[str, Path] = {}
    for name, make in reported.PAGES.items():
        for kind, text in (("", "net"), (" hostile", reported.HOSTILE)):
            found[name + kind] = folder / f"{name}{kind}.html"
            found[name + kind].write_text(make(text))
    return found


@contextmanager
def opened(browser: Browser, file: Path, size: tuple[int, int] = DESKTOP) -> Iterator[Seen]:
    """Open a page without a network and wait for its charts; nothing may have failed at the end."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="light", offline=True
    )
    page = context.new_page()
    seen = Seen(page)
    page.on("console", lambda message: seen.failures.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.failures.append(str(error)))
    page.on("requestfailed", lambda request: seen.failures.append(f"failed: {request.url}"))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("file:", "data:"))
            else seen.failures.append(f"asked for {request.url}")
        ),
    )
    page.goto(file.as_uri())
    page.wait_for_function(
        "!document.querySelector('figure') || document.documentElement.dataset.drawn"
    )
    yield seen
    context.close()
    assert seen.failures == []


@pytest.mark.parametrize("kind", ["", " hostile"])
@pytest.mark.parametrize("name", reported.PAGES)
def test_every_chart_has_its_data(
    name: str, kind: str, browser: Browser, files: dict[str, Path]
) -> None:
    """Also where every text is hostile; of that nothing runs, and all is shown."""
    with opened(browser, files[name + kind]) as seen:
        page = seen.page
        assert page.evaluate("Object.keys(window.charts ?? {}).sort()") == sorted(MARKS[name])
        for chart, count in MARKS[name].items():
            data = page.evaluate(f"charts.{chart}.data('figures').length")
            group = f"#{chart} .{GROUP.get(chart, chart)}_marks"
            assert (data, page.locator(f"{group} > path").count()) == (count, count), chart
            assert page.locator(f"#{chart} details tbody tr").count() >= min(count, 2)
        assert page.evaluate("window.hit") is None
        assert page.locator("img").count() == 0
        if kind:
            assert "</script><img src=x" in page.inner_text("header")


@pytest.mark.parametrize("kind", ["", " hostile"])
@pytest.mark.parametrize("name", reported.PAGES)
def test_nothing_is_wider_than_the_screen(
    name: str, kind: str, browser: Browser, files: dict[str, Path]
) -> None:
    """Of a phone, then of a desktop, in light and in dark; and the answer comes first."""
    with opened(browser, files[name + kind], PHONE) as seen:
        page = seen.page
        ends = "all => Math.max(...all.map(one => one.getBoundingClientRect().bottom))"
        answered: float = page.locator("h1, .facts, header pre").evaluate_all(ends)
        assert kind or answered < PHONE[1]
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        for size, most in ((PHONE, 328), (DESKTOP, 792)):
            page.set_viewport_size({"width": size[0], "height": size[1]})
            page.wait_for_function(
                "([most, least]) => [...document.querySelectorAll('.chart svg')].every(svg => {"
                " const w = svg.getBoundingClientRect().width; return w <= most && w > least })",
                arg=[most, 0.9 * most],
            )
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate("document.documentElement.scrollWidth") == size[0]


def test_charts_follow_the_page_into_the_dark_and_onto_a_phone(
    browser: Browser, files: dict[str, Path]
) -> None:
    """While it is open; the colours are those of the page."""
    fill = "getComputedStyle(document.querySelector('#walls .walls_marks path')).fill"
    with opened(browser, files["comparison"]) as seen:
        page = seen.page
        light = page.evaluate(fill)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(fill) != light
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        page.wait_for_function(
            "[...document.querySelectorAll('.chart svg')].every("
            "svg => svg.getBoundingClientRect().width <= 330)"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


def contrasts(page: Page) -> dict[str, float]:
    """The contrast of each text on the page with what is behind it, as WCAG counts it."""
    return page.evaluate(
        """() => {
        const channels = colour => colour.match(/[\\d.]+/g).map(Number);
        const luminance = colour => {
            const [r, g, b] = channels(colour).map(c => c / 255).map(
                c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const behind = one => {
            for (; one; one = one.parentElement) {
                const colour = getComputedStyle(one).backgroundColor;
                if (channels(colour)[3] !== 0) return colour;
            }
        };
        const found = {};
        for (const one of document.querySelectorAll('body *')) {
            const text = [...one.childNodes].some(n => n.nodeType === 3 && n.data.trim());
            if (!text || one.closest('script, style, noscript')) continue;
            const style = getComputedStyle(one);
            const colour = one instanceof SVGElement ? style.fill : style.color;
            const [a, b] = [luminance(colour), luminance(behind(one))];
            found[one.tagName + ' ' + one.textContent.slice(0, 40)] =
                (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        }
        return found;
    }"""
    )


@pytest.mark.parametrize("name", reported.PAGES)
def test_every_text_stands_out(name: str, browser: Browser, files: dict[str, Path]) -> None:
    with opened(browser, files[name]) as seen:
        for scheme in SCHEMES:
            seen.page.emulate_media(color_scheme=scheme)
            found = contrasts(seen.page)
            assert len(found) > 15
            assert {text: ratio for text, ratio in found.items() if ratio < 4.5} == {}


def test_a_keyboard_reaches_every_control(browser: Browser, files: dict[str, Path]) -> None:
    """The skip link first, then what can be chosen, opened and scrolled; all with a visible
    focus."""
    with opened(browser, files["comparison"]) as seen:
        page = seen.page
        reached: list[str] = []
        outlines: set[str] = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            tag = page.evaluate(
                "document.activeElement.tagName + '.' + document.activeElement.className"
            )
            if tag == "BODY.":
                break
            reached.append(tag)
            outlines.add(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
        assert reached[0] == "A.skip"
        assert reached[1] == "PRE."
        assert reached.count("SUMMARY.") == len(MARKS["comparison"])
        assert "INPUT." in reached
        assert "DIV.scroll" in reached
        assert "none" not in outlines


def test_the_axis_of_the_timeline_is_chosen_by_the_arrow_keys(
    browser: Browser, files: dict[str, Path]
) -> None:
    """Both calls are on one axis from 0; the shorter one can be looked at closely."""
    with opened(browser, files["comparison"]) as seen:
        page = seen.page
        assert page.evaluate("charts.timelines.scale('x').domain()") == [0, 128]
        page.locator("#timelines input").first.focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function("charts.timelines.scale('x').domain()[1] === 50")
        page.locator("#timelines summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#timelines details table").is_visible()


@pytest.mark.parametrize("name", reported.PAGES)
def test_headings_are_in_order_and_charts_have_words(
    name: str, browser: Browser, files: dict[str, Path]
) -> None:
    with opened(browser, files[name]) as seen:
        levels: list[int] = seen.page.evaluate(
            "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
        for chart in seen.page.locator(".chart").all():
            assert chart.get_attribute("role") == "img"
            assert len(chart.get_attribute("aria-label") or "") > 20


def test_without_scripts_the_figures_are_there(browser: Browser, files: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(files["comparison"].as_uri())
    assert "The charts need JavaScript" in page.inner_text("main")
    assert page.locator("#walls details tbody tr").count() == 4
    context.close()


def test_a_chart_that_cannot_be_drawn_says_so(browser: Browser, tmp_path: Path) -> None:
    """And its figures are opened."""
    file = tmp_path / "broken.html"
    page_of_plan = reported.PAGES["plan"]("net")
    assert '"type":"ordinal"' in page_of_plan
    file.write_text(page_of_plan.replace('"layer":[', '"layer":7,"was":[', 1))
    context = browser.new_context(offline=True)
    page: Any = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn")
    assert "could not be drawn" in page.inner_text("#steps .chart")
    assert page.locator("#steps details table").is_visible()
    context.close()

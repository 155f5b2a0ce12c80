"""A document as one HTML file: it opens anywhere, needs nothing else, and loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from onelaunch.tools.report.charts import Spec, bars, micro, timelines
from onelaunch.tools.report.document import (
    LONG,
    Chart,
    Document,
    Entries,
    Line,
    Part,
    ReportEntry,
    ReportTable,
    Style,
    Text,
)
from onelaunch.tools.rules.document import sentence

CHARTS = "vl-convert-python"
"""The package with the library of the charts: Vega-Lite as one script, and no network for it."""
_HERE = resources.files("onelaunch.tools.report")
_JOINT = re.compile(r"([._])(?=\w)")
_FIGURES = "The figures of this chart"


class Html(str):
    """A text that is HTML already; any other is escaped where it is put into a page."""

    __slots__ = ()


def can_draw() -> bool:
    """Return whether the package of the charts is installed."""
    return importlib.util.find_spec("vl_convert") is not None


def page(document: Document) -> str:
    """Write the whole file, with the library of the charts if it has any.

    A policy in it forbids the browser to load anything, and to run another script than this one.
    """
    sections = "\n".join(_sections(document))
    script = _script() if "<figure" in sections else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}'"
    )
    footer = element("p", "Made by onelaunch. This file is all there is: it loads nothing.")
    unseen = "<noscript><p>The charts need JavaScript; their figures are below each.</p></noscript>"
    title = escape(micro(f"{document.title}: onelaunch {document.command}"))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title>",
            f"<style>\n{(_HERE / 'page.css').read_text('utf-8')}</style>\n</head>\n<body>",
            '<a class="skip" href="#figures">Skip to the figures</a>',
            f"<header>\n{joined(_answer(document))}\n</header>",
            f'<main id="figures" tabindex="-1">\n{unseen if script else ""}',
            sections,
            f"</main>\n<footer>{footer}</footer>",
            f'<script type="module">{script}</script>' if script else "",
            "</body>\n</html>\n",
        ]
    )


@functools.cache
def _script() -> str:
    """Bundle the library of the charts with the few lines that draw them: about 0.9 MB."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle((_HERE / "page.js").read_text("utf-8"))
    return bundle.replace("\r", "").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _answer(document: Document) -> Iterator[str]:
    """Say first what was found, with the code that applies it."""
    yield element("p", f"onelaunch {document.command} · {document.title}", class_="kicker")
    first, *rest = document.answer
    yield element("h1", first)
    yield _pairs(document.facts, "facts", "div")
    shown = code(document.code, "The code of the answer")
    lines = document.code.count("\n") + 1
    yield shown if lines <= LONG else _details(f"The code, in {lines} lines", shown)
    yield from (prose(said, "lead") for said in rest)
    yield from (element("p", said, class_="small") for said in document.remarks)


def _sections(document: Document) -> Iterator[str]:
    for part in document.parts:
        title, inside = _part(part)
        yield section(title, inside)
    notes = Html("".join(element("li", note) for note in document.notes))
    yield section("Notes", element("ul", notes, class_="notes small"))
    how = joined(element("p", said, class_="small") for said in document.context)
    yield section("How it was measured", how)
    yield section("Environment", _pairs(document.environment, "pairs"))


def _part(part: Part) -> tuple[str, Html]:
    """Return the title of a section, and what is in it; nothing where there is nothing to show."""
    if isinstance(part, tuple):
        found = timelines(part)
        return (found[0].title, figure(*found)) if found else ("", Html(""))
    if isinstance(part, Text):
        first, *rest = part.text.split("\n")
        return part.title, joined([prose(first), code("\n".join(rest), part.title)])
    if isinstance(part, ReportTable):
        return part.title, table(part)
    if isinstance(part, Entries):
        return f"{part.title} ({len(part.entries)})", joined(map(_entry, part.entries))
    return part.title, figure(part, *bars(part))


def _entry(entry: ReportEntry) -> Html:
    """Show a finding: what, where, the way there, why, and the code to write instead."""
    names = ", ".join(f"<code>{text(code)}</code> {text(name)}" for code, name in entry.names)
    return element(
        "article", joined([element("h3", Html(names)), *map(_line, entry.lines)]), class_="finding"
    )


def _line(line: Line) -> Html:
    said, kind = line.text, line.kind
    if not said:
        return Html("")
    if kind == "place":
        return element("p", element("code", said), class_="place")
    if kind == "source":
        return code(said, "The source")
    if kind == "way":
        calls = (element("li", element("code", call)) for call in said.split("\n"))
        return _details("The way there", element("ol", Html("".join(calls))))
    if kind == "fix" and "\n" in said:
        lines = element("p", "in lines:", class_="fix")
        return joined([lines, code(said, "What to write instead")])
    if kind == "remark":
        return element("p", sentence(f"{line.label} {said}"), class_="small")
    return prose(sentence(said), "fix" if kind == "fix" else "")


def text(said: str) -> Html:
    """Escape a text, and write its microseconds as people do."""
    return said if isinstance(said, Html) else Html(escape(micro(said)))


def joined(parts: Iterable[str]) -> Html:
    """Put elements one after another, a line each."""
    return Html("\n".join(text(part) for part in parts if part))


def element(name: str, said: str, **attributes: str) -> Html:
    """Make an element; ``class_`` is the attribute ``class``."""
    if not said:
        return Html("")
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    written = "".join(f' {key}="{escape(value)}"' for key, value in pairs if value)
    return Html(f"<{name}{written}>{text(said)}</{name}>")


def prose(said: str, class_: str = "") -> Html:
    """Make a paragraph of a sentence in which code stands between backticks."""
    parts = said.split("`")
    if len(parts) % 2 == 0:  # one of them is no pair
        return element("p", said, class_=class_)
    marked = [element("code", part) if i % 2 else text(part) for i, part in enumerate(parts)]
    return element("p", Html("".join(marked)), class_=class_)


def code(source: str, label: str) -> Html:
    """Show code in a box that a keyboard can scroll."""
    if not source:
        return Html("")
    return Html(
        f'<pre tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<code>{escape(source)}</code></pre>"
    )


def section(title: str, inside: Html) -> Html:
    """Head a part by a title; nothing where there is none."""
    return Html(f"<section>\n<h2>{text(title)}</h2>\n{inside}\n</section>") if inside else inside


def _details(summary: str, inside: Html) -> Html:
    folded = Html(f"<details><summary>{text(summary)}</summary>{inside}</details>")
    return folded if inside else inside


def _pairs(
    pairs: Iterable[Sequence[str]], class_: str, around: str = "", styles: Sequence[Style] = ()
) -> Html:
    """List names with texts."""
    found: list[str] = []
    for i, (name, said) in enumerate(pairs):
        value = element("span", said, class_=styles[i]) if styles and styles[i] else text(said)
        one = f"<dt>{text(name)}</dt><dd>{value}</dd>"
        found.append(f"<{around}>{one}</{around}>" if around else one)
    return element("dl", Html("".join(found)), class_=class_)


def table(data: ReportTable) -> Html:
    """Lay out figures in a table that scrolls by itself where it is wider than the screen.

    A column that nobody fills is left out.
    """
    if not data.rows:
        return Html("")
    if not data.head:
        return _pairs(data.rows, "pairs", styles=data.styles)
    used = [i for i in range(len(data.head)) if any(row[i] for row in data.rows)]
    body: list[str] = []
    for n, row in enumerate(data.rows):
        cells = "".join(
            f'<td class="words">{text(row[i])}</td>'
            if i in data.words
            else f"<td>{text(row[i])}</td>"
            for i in used[1:]
        )
        style = f' class="{data.styles[n]}"' if data.styles and data.styles[n] else ""
        name = Html(_JOINT.sub(r"\1<wbr>", text(row[used[0]])))  # it may break on a narrow screen
        body.append(f'<tr{style}><th scope="row">{name}</th>{cells}</tr>')
    titles = "".join(
        f'<th scope="col" class="{"words" if i in data.words else "figures"}">'
        f"{text(data.head[i])}</th>"
        for i in used
    )
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(data.title)}"><table>'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(chart: Chart, said: str, figures: ReportTable, spec: Spec) -> Html:
    """Draw a chart, how to read it above and its figures as a table below."""
    key = "".join(
        f'<span class="key"><i style="--colour:var(--{escape(colour)})"></i>{text(name)}</span>'
        for colour, name in chart.key
    )
    caption = f"<figcaption>{text(chart.caption)}{'<br>' if key else ''}{key}</figcaption>"
    return Html(
        f'<figure id="{escape(chart.name)}">\n{caption}\n'
        f'<div class="controls"></div><div class="chart" role="img" aria-label="'
        f'{escape(micro(said))}"><div></div></div>\n'
        f'<script type="application/json">{_in_script(spec)}</script>\n'
        f"{_details(_FIGURES, table(figures))}\n</figure>"
    )


def _in_script(data: object) -> str:
    """Write data as JSON in which no HTML begins or ends."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

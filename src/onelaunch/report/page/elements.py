"""The elements of a page: text made safe, tables, code, figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from onelaunch.report.charts.chart import Chart

_MICRO = re.compile(r"(?<=\d) us\b")
_JOINT = re.compile(r"([._])(?=\w)")


class Html(str):
    """A text that is HTML already; any other is escaped where it is put into a page."""

    __slots__ = ()


def text(said: str) -> Html:
    """Escape a text, and write its microseconds as people do."""
    return said if isinstance(said, Html) else Html(escape(micro(said)))


def micro(said: str) -> str:
    """Write ``41 µs`` for ``41 us``."""
    return _MICRO.sub(" µs", said)


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


def paragraph(said: str, class_: str = "") -> Html:
    return element("p", said, class_=class_)


def prose(said: str, class_: str = "") -> Html:
    """Make a paragraph of a sentence in which code stands between backticks."""
    parts = said.split("`")
    if len(parts) % 2 == 0:  # one of them is no pair
        return paragraph(said, class_)
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


def section(title: str, *parts: str) -> Html:
    """Head parts by a title; nothing where there are none."""
    inside = joined(parts)
    return Html(f"<section>\n<h2>{text(title)}</h2>\n{inside}\n</section>") if inside else Html("")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Show a few figures in large type, each with its name."""
    inside = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in pairs)
    return Html(f'<dl class="facts">{inside}</dl>') if inside else Html("")


def pairs(of: Iterable[tuple[str, str]]) -> Html:
    """List names with texts."""
    inside = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in of)
    return Html(f'<dl class="pairs">{inside}</dl>') if inside else Html("")


def notes(items: Iterable[str]) -> Html:
    inside = "".join(f"<li>{text(item)}</li>" for item in items)
    return Html(f'<ul class="notes small">{inside}</ul>') if inside else Html("")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    label: str,
    *,
    words: Sequence[int] = (),
    classes: Sequence[str] = (),
) -> Html:
    """Lay out figures in a table that scrolls by itself where it is wider than the screen.

    Args:
        label: its name for who cannot see it.
        words: the columns that hold sentences.
        classes: the class of each row.
    """
    body: list[str] = []
    for i, (first, *rest) in enumerate(rows):
        cells = "".join(
            f'<td class="words">{text(cell)}</td>' if n in words else f"<td>{text(cell)}</td>"
            for n, cell in enumerate(rest, 1)
        )
        named = f' class="{escape(classes[i])}"' if classes and classes[i] else ""
        body.append(f'<tr{named}><th scope="row">{_breakable(first)}</th>{cells}</tr>')
    titles = "".join(
        f'<th scope="col" class="{"words" if n in words else "figures"}">{text(name)}</th>'
        for n, name in enumerate(head)
    )
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>{''.join(body)}</tbody></table></div>"
    )


def _breakable(name: str) -> Html:
    """Let a name break after its dots and underscores, where a screen is narrow."""
    return Html(_JOINT.sub(r"\1<wbr>", text(name)))


def figure(chart: Chart | None) -> Html:
    """Draw a chart, how to read it above and its figures as a table below."""
    if chart is None:
        return Html("")
    key = "".join(
        f'<span class="key"><i style="--colour:var(--{escape(colour)})"></i>{text(name)}</span>'
        for colour, name in chart.key
    )
    caption = f"<figcaption>{text(chart.caption)}{'<br>' if key else ''}{key}</figcaption>"
    figures = table(chart.head, chart.rows, f"{chart.title}, as a table", words=chart.words)
    return Html(
        f'<figure id="{escape(chart.name)}">\n{caption}\n'
        f'<div class="controls"></div><div class="chart" role="img" aria-label="'
        f'{escape(micro(chart.alternative))}"><div></div></div>\n'
        f'<script type="application/json">{in_script(chart.spec)}</script>\n'
        f"<details><summary>The figures of this chart</summary>{figures}</details>\n</figure>"
    )


def in_script(data: object) -> str:
    """Write data as JSON in which no HTML begins or ends."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def environment(found: Mapping[str, str | None]) -> Html:
    """List the machine and its versions."""
    return section("Environment", pairs((k, v) for k, v in found.items() if v is not None))

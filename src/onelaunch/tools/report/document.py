"""A result for people, as data: what `terminal` prints and `page` makes an HTML page of.

`compare`, `optimize`, `profile` and `diagnose` all show what they found in this one shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Style = Literal["", "best", "good", "bad", "warn", "dim"]
Lane = Literal["host", "gpu"]
LONG = 20
"""Lines of code; where there are more, they are folded."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    title: str
    text: str


@dataclass(frozen=True)
class ReportTable:
    """Figures in rows, or names with texts where it has no head.

    Attributes:
        words: the columns of sentences; names with texts have no others.
        styles: a style for each row; () for none.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[int, ...] = ()
    styles: tuple[Style, ...] = ()


@dataclass(frozen=True)
class Line:
    """A part of an entry.

    Attributes:
        label: its name in the terminal; "" for one without.
        kind: the form of its text: a sentence, a place, a line of source, the calls on the way,
            what to write instead, or a remark.
        column: of a line of source: the characters before the one to mark; None for none.
    """

    label: str
    text: str
    kind: Literal["sentence", "place", "source", "way", "fix", "remark"] = "sentence"
    column: int | None = None


@dataclass(frozen=True)
class ReportEntry:
    """A finding: codes with names, and lines."""

    names: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Entries:
    """Findings of one kind."""

    title: str
    entries: tuple[ReportEntry, ...]
    style: Style


@dataclass(frozen=True)
class Layer:
    """A mark in each row of a bar chart, from the field `start` (0 without one) to the field `end`.

    Attributes:
        colour: its colour, by its name in the page.
        kinds: (kind of a row, colour): other colours.
        height, y: in pixels; y is that of its middle.
    """

    end: str
    start: str = ""
    colour: str = "bar"
    kinds: tuple[tuple[str, str], ...] = ()
    height: int = 14
    y: int = 6
    mark: Literal["bar", "rule"] = "bar"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart; its figures are a table, too, for who cannot see it.

    Attributes:
        name: its name in the page.
        title: its name for people.
        caption: how to read it.
        values: a mark each: ``name``, ``shown`` (its figure, as text), ``best``, and times in us.
        key: colours, by their names in the page, and what they stand for.
    """

    name: str
    title: str
    caption: str
    values: tuple[dict[str, Any], ...]
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Rows of bars, a name and a figure above each.

    Attributes:
        layers: the marks in each row; the row's ``kind`` may choose their colour.
        longest: where the axis ends, and longer bars are cut off; 0: as far as any bar.
        stacked: True where the rows of a kind follow each other: a terminal draws them as a line.
    """

    layers: tuple[Layer, ...]
    longest: float = 0.0
    stacked: bool = False


@dataclass(frozen=True)
class Span:
    """One stretch of work: an operator on the host, a kernel or a copy on the GPU.

    Attributes:
        start_us: since the call began.
        depth: operators that it runs inside of.
    """

    name: str
    lane: Lane
    start_us: float
    duration_us: float
    depth: int = 0


class Stretch(Protocol):
    """A stretch of time."""

    @property
    def start_us(self) -> float: ...

    @property
    def duration_us(self) -> float: ...


def busy_us(stretches: Iterable[Stretch]) -> float:
    """Return the time in which at least one of these goes on."""
    total, until = 0.0, float("-inf")
    for one in sorted(stretches, key=lambda one: one.start_us):
        end = one.start_us + one.duration_us
        total += max(0.0, end - max(until, one.start_us))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Timeline:
    """One call of an engine: of several that were traced the one that took the median time.

    Attributes:
        engine: its name in ``--engines``.
        title: its name in the table.
        wall_us: from the call's begin until host and GPU were done, under the profiler.
        left_out: spans that would be too many: the innermost of the host first.
    """

    engine: str
    title: str
    wall_us: float
    spans: tuple[Span, ...]
    left_out: int = 0


Part = Text | ReportTable | Entries | Bars | tuple[Timeline, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A result for people.

    Attributes:
        command: the subcommand that finds it: ``"compare"``.
        title: the name of the workload, or of the files.
        answer: the answer, a sentence, and what else is to be known of it.
        good: True for an answer that all is well.
        facts: (name, figure): the few figures that matter.
        code: the code that applies the answer.
        parts: tables, charts, texts and findings, in the order of reading.
        context: where and how it was measured.
        remarks: doubts about the whole.
        notes: further remarks.
        environment: hardware and versions.
        more: where more is told.
    """

    command: str
    title: str
    answer: tuple[str, ...]
    good: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    code: str = ""
    parts: tuple[Part, ...] = ()
    context: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    more: str = ""

"""Comparisons that were saved by `--json`: shown again, and two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from onelaunch.cli import OK, WRONG
from onelaunch.cli.mistakes import read_saved, write
from onelaunch.errors import bad

if TYPE_CHECKING:
    from onelaunch.bench import Comparison


def saved_files(targets: list[str]) -> list[Path]:
    """Return the files of saved comparisons that were given; none for a target that is to run.

    Raises:
        ArgumentError: the targets are neither one to run nor one or two files.
    """
    files = [Path(target) for target in targets if target.endswith(".json")]
    if len(files) == len(targets) <= 2:
        return files
    if len(targets) == 1:
        return []
    why = "one target runs, one file is shown again, and two files are set side by side"
    what = f"{len(targets)} targets were given: {', '.join(targets)}"
    raise bad(what, "compare", why, "onelaunch compare before.json after.json")


def refuse_options(files: list[Path], options: list[str]) -> None:
    """Refuse options that a saved comparison, in which nothing runs, cannot follow."""
    if options:
        what = f"{' and '.join(options)} cannot be applied to a saved comparison"
        why = "it is shown as it was measured, and nothing is run"
        raise bad(what, options[0], why, f"onelaunch compare {' '.join(map(str, files))}")


def show_saved(files: list[Path], console: Console, json: Path | None, report: Path | None) -> int:
    """Show one saved comparison again, or what changed from one to another."""
    from onelaunch.bench import Comparison

    fix = "onelaunch compare path.py:model --json result.json"
    found = [read_saved(file, "comparison", Comparison.from_json, fix) for file in files]
    if len(found) == 1:
        show_comparison(found[0], console, json, report)
        return WRONG if found[0].wrong else OK
    from onelaunch.bench.changes import changes
    from onelaunch.report.changed import show_changes
    from onelaunch.report.page.changes import changes_page

    before, after = map(str, files)
    result = changes(found[0], found[1], (before, after))
    show_changes(result, console)
    if json is not None:
        write(json, result.to_json() + "\n", "compare")
    if report is not None:
        _write_page(report, changes_page(result), console)
    return WRONG if result.worse else OK


def show_comparison(
    result: Comparison, console: Console, json: Path | None, report: Path | None
) -> None:
    """Print a comparison, and write the files that were asked for."""
    from onelaunch.report.page.comparison import comparison_page
    from onelaunch.report.table import show

    show(result, console)
    if json is not None:
        write(json, result.to_json() + "\n", "compare")
    if report is not None:
        _write_page(report, comparison_page(result), console)


def _write_page(file: Path, page: str, console: Console) -> None:
    write(file, page, "compare")
    console.print(f"\nThe report: {file}", markup=False, highlight=False)

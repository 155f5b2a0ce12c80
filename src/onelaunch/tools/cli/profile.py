"""`onelaunch profile`: where a call's time goes, and what each remedy can gain at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onelaunch.tools.cli import OK
from onelaunch.tools.cli.mistakes import check_files
from onelaunch.tools.cli.progress import console_for_reports
from onelaunch.tools.cli.target import (
    Json,
    Report,
    Target,
    Traceback,
    deliver,
    import_torch,
    with_target,
)
from onelaunch.tools.targets import located

if TYPE_CHECKING:
    from onelaunch.tools.bench.workload import OnProgress, Workload
    from onelaunch.tools.profiler.profile import Profile


def profile(
    target: Target, json: Json = None, report: Report = None, traceback: Traceback = False
) -> int:
    """Find where a call's time goes, what bounds it, and the most that each remedy can gain."""
    check_files("the profile", "profile", json, report=report)
    located(target, "profile")
    console = console_for_reports()
    import_torch(console)
    from onelaunch.tools.profiler import measure

    def work(call: Workload, tell: OnProgress) -> Profile:
        return measure.profile(call.fn, call.args, call.kwargs, name=target, on_progress=tell)

    result = with_target(target, "profile", console, work, traceback)
    deliver(result, console, json, report)
    return OK

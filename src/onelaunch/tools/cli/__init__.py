"""The command `onelaunch`.

commands.py  its subcommands, `info` among them
compare.py   `compare`
apart.py     its engines in processes of their own
doctor.py    `doctor`
profile.py   `profile`
target.py    their target: loaded, run, and its result given out
explain.py   `explain`
optimize.py  `optimize`
mistakes.py  the answers to mistakes
progress.py  its progress: a bar on a terminal, a line for each step elsewhere
streams.py   output of the user's code, and a stdout that cannot be written

Exit codes: 0; 1, an engine gave wrong results, or the doctor found something; 2, the command could
not do its work; 130, stopped.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

OK, WRONG, FOUND, FAILED, STOPPED = 0, 1, 1, 2, 130
STOPPED_EARLY = "stopped before there was anything to show"


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; messages go to stderr, without a traceback."""
    try:
        # Imported here, since Ctrl-C may come as early as that.
        from onelaunch.tools.cli.commands import execute
        from onelaunch.tools.cli.streams import tell_unreadable, tell_unwritable

        try:
            code = execute(argv)
            sys.stdout.flush()
        except OSError as error:  # an error of stdout names no file, and is not that none is there
            of_stdout = error.filename is None and not isinstance(error, FileNotFoundError)
            (tell_unwritable if of_stdout else tell_unreadable)(error)
            code = FAILED
    except KeyboardInterrupt:
        code = STOPPED
    if code == STOPPED:
        print(STOPPED_EARLY, file=sys.stderr)
    return code


def main() -> None:
    """Run the command of this process, and end it."""
    # torch 2.13's profiler writes a line to stderr for each start and stop (pytorch/kineto#1325);
    # this is above all its levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # ASCII lacks bars, and the sign for micro
    sys.exit(run())

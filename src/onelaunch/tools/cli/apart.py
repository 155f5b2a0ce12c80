"""The engines that `onelaunch compare` runs in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onelaunch.errors import ArgumentError, bad

if TYPE_CHECKING:
    from onelaunch.tools.bench.engines import Engine
    from onelaunch.tools.bench.isolated import Isolated


def placing(
    isolate: bool,
    limit: float | None,
    pythons: Sequence[str],
    chosen: Sequence[str] | None,
    known: Sequence[str],
) -> Callable[[Engine | Isolated, str], Engine | Isolated]:
    """Return a function that puts an engine into a process of its own, if it is to be there.

    Args:
        isolate, limit: the options.
        pythons: texts such as ``tvm=/path/to/python``.
        chosen: the engines that are named to run, or None.
        known: the names of all engines.

    Raises:
        ArgumentError: OL401: one of the options cannot be.
    """
    if limit is not None and not limit > 0:
        why = "a process gets a number of seconds above 0"
        raise bad(f"--limit is {limit:g}", "--limit", why, "--limit 300")
    if limit is not None and not isolate and not pythons:
        why = "an engine in this process cannot be ended"
        raise bad("--limit needs --isolate", "--limit", why, f"--isolate --limit {limit:g}")
    of = dict(_python(text, chosen, known) for text in pythons)

    def placed(engine: Engine | Isolated, target: str) -> Engine | Isolated:
        from onelaunch.tools.bench.engines import ALONE, Engine
        from onelaunch.tools.bench.isolated import LIMIT_SECONDS, Isolated

        alone = isolate or engine.name in of or engine.name in ALONE
        if not alone or not isinstance(engine, Engine):
            return engine
        return Isolated(engine, target, limit or LIMIT_SECONDS, of.get(engine.name))

    return placed


def _python(text: str, chosen: Sequence[str] | None, known: Sequence[str]) -> tuple[str, str]:
    """Read ``ENGINE=PATH``. Whether that is a Python with torch, the row of the engine tells."""
    name, separator, path = text.partition("=")
    example = "--python tvm=/path/to/venv/bin/python"
    if not separator or not path:
        raise _bad(text, "it is not ENGINE=PATH", "an engine gets an interpreter", example)
    if name not in known:
        why = f"the engines are {', '.join(known)}"
        raise _bad(text, f"no engine is called {name}", why, example)
    if chosen is not None and name not in chosen:
        why = "--engines names those that run"
        raise _bad(text, f"{name} is not to run", why, f"--engines {','.join([*chosen, name])}")
    return name, path


def _bad(text: str, what: str, why: str, fix: str) -> ArgumentError:
    return bad(what, f"--python {text}", why, fix)

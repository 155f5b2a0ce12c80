"""What the fuzzers share: programs by their seeds, reduced where they are wrong, and a command."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

import onelaunch as ol

P = TypeVar("P")


def none_smaller(found: object) -> Sequence[Any]:
    """The programs to reduce one to, where it stays as it is."""
    return ()


def graph(f: Any, compiled: str, **options: Any) -> Any:
    """Graph a program's callable.

    Args:
        compiled: ``"compile"`` for `compile=True`; ``"dynamo"`` for `torch.compile` alone.
    """
    if not compiled:
        return ol.graph(f, **options)
    torch._dynamo.reset()  # what was compiled for other programs
    if compiled == "compile":
        return ol.graph(f, compile=True, **options)
    fast = torch.compile(f, backend="aot_eager")
    fast.recordings = ()  # type: ignore[attr-defined]
    return fast


def judged(run: Callable[[P], tuple[str, str]], found: P) -> tuple[str, str]:
    """What became of a program: void, where `torch.compile` alone is as wrong."""
    became, why = run(found)
    if became == "wrong" and getattr(found, "compiled", None) == "compile":
        alone: Any = replace(found, compiled="dynamo")  # type: ignore[type-var]
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=99):
            if run(alone)[0] == "wrong":
                return "void", "dynamo"
    return became, why


def fuzz(
    program: Callable[[int], P],
    run: Callable[[P], tuple[str, str]],
    seeds: Iterable[int],
    say: Callable[[str], object],
    smaller: Callable[[P], Sequence[P]] = none_smaller,
    compiled: str = "",
) -> Counter[str]:
    """Run the programs of these seeds; how many became what, and why. Says what is wrong.

    Args:
        program: the program of a seed.
        run: what becomes of one (``"wrong"``, or anything else), and why.
        smaller: programs that are a little less than one, the best first.
        compiled: see `graph`; of programs that have a field of that name.
    """
    counts: Counter[str] = Counter()
    run = functools.partial(judged, run)
    for number, seed in enumerate(seeds):
        found: P = program(seed)
        if compiled:
            found = replace(found, compiled=compiled)  # type: ignore[type-var]
        became, why = run(found)
        if torch.cuda.is_available() and number % 32 == 31:  # others run beside it
            gc.collect()
            torch.cuda.empty_cache()
        counts[became] += 1
        if became != "wrong":
            counts[why] += 1
            continue
        small: P | None = found
        while small is not None:
            found = small
            small = next((s for s in smaller(found) if run(s)[0] == "wrong"), None)
        say(f"{found}\n# {compiled} {run(found)[1]}\n")
    return counts


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, which say no more than that it went on in eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(
    what: str, fuzz: Callable[..., Counter[str]], programs: int, compiles: bool = False
) -> int:
    """The command of one of them: the exit code, 1 where a program was wrong."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--device", choices=("cpu", "tape", "cuda"), default="cpu")
    if compiles:
        parser.add_argument("--compile", action="store_true", help="graph with compile=True")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "tape":
        from onelaunch import testing

        testing.install()
    seeds = range(options.seed, options.seed + options.programs)
    given = {"compiled": "compile"} if compiles and options.compile else {}
    counts = fuzz(seeds, torch.device(options.device), **given)
    print(f"{len(seeds)} programs from seed {options.seed} on {options.device}: {dict(counts)}")
    if options.device == "cuda":
        print(f"{torch.cuda.memory_reserved() >> 20} MiB reserved at the end")
    return 1 if counts["wrong"] else 0

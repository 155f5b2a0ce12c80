"""What the fuzzers share: programs by their seeds, reduced where they are wrong, and a command."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import linecache
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import onelaunch as ol

P = TypeVar("P")


_sources = itertools.count()


def without(found: P, name: str, least: int = 0) -> list[P]:
    """The program with one less of what a field holds, the last first; `least` of them stay."""
    held = getattr(found, name)
    places = reversed(range(len(held))) if len(held) > least else ()
    return [replace(found, **{name: held[:i] + held[i + 1 :]}) for i in places]  # type: ignore


def ran(source: str, seed: int, namespace: dict[str, Any]) -> dict[str, Any]:
    """A namespace, after a source ran in it whose lines can be read."""
    name = f"<program {next(_sources)} of seed {seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace


def random_tensor(seed: int, *shape: int, device: torch.device) -> Tensor:
    """Values that depend on the seed and the shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def at(error: Exception) -> str:
    """The end of an error's traceback."""
    return "".join(traceback.format_exception(error, limit=-6))


def right(fast: Any) -> tuple[str, str]:
    """The verdict on a program that was never wrong."""
    replayed = any(recording.replays for recording in fast.recordings)
    return "right", "replayed" if replayed else "eager"


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


def _fuzz(
    program: Callable[[int], P],
    verdict: Callable[[P, torch.device], tuple[str, str]],
    smaller: Callable[[P], Sequence[P]],
    seeds: Iterable[int],
    device: torch.device,
    say: Callable[[str], object] = print,
    compiled: str = "",
) -> Counter[str]:
    """Run the programs of these seeds; how many became what, and why. Says what is wrong."""
    counts: Counter[str] = Counter()
    run = functools.partial(judged, lambda found: verdict(found, device))
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


def fuzzer(
    program: Callable[[int], P],
    verdict: Callable[[P, torch.device], tuple[str, str]],
    smaller: Callable[[P], Sequence[P]] = lambda found: (),
) -> Callable[..., Counter[str]]:
    """What runs the programs of some seeds on a device: see `_fuzz`.

    Args:
        program: the program of a seed; one with a field `compiled` can be compiled: see `graph`.
        verdict: what becomes of one (``"wrong"``, or anything else), and why.
        smaller: programs that are a little less than one, the best first.
    """
    return functools.partial(_fuzz, program, verdict, smaller)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, which say no more than that it went on in eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def no_errors(
    run: Callable[[P, torch.device], tuple[str, str]],
) -> Callable[[P, torch.device], tuple[str, str]]:
    """A verdict by which an error is wrong, but for a refusal."""

    @quiet()
    def verdict(found: P, device: torch.device) -> tuple[str, str]:
        try:
            return run(found, device)
        except Exception as error:  # noqa: BLE001 - whatever but a refusal is wrong
            return "wrong", at(error)

    return verdict


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

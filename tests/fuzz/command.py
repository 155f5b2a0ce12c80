"""What the fuzzers share: programs by their seeds, reduced where they are wrong, and a command."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

P = TypeVar("P")


def none_smaller(found: object) -> Sequence[Any]:
    """The programs to reduce one to, where it stays as it is."""
    return ()


def fuzz(
    program: Callable[[int], P],
    run: Callable[[P], tuple[str, str]],
    seeds: Iterable[int],
    say: Callable[[str], object],
    smaller: Callable[[P], Sequence[P]] = none_smaller,
) -> Counter[str]:
    """Run the programs of these seeds; how many became what, and why. Says what is wrong.

    Args:
        program: the program of a seed.
        run: what becomes of one (``"wrong"``, or anything else), and why.
        smaller: programs that are a little less than one, the best first.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        found = program(seed)
        became, why = run(found)
        counts[became] += 1
        if became != "wrong":
            counts[why] += 1
            continue
        small: P | None = found
        while small is not None:
            found = small
            small = next((s for s in smaller(found) if run(s)[0] == "wrong"), None)
        say(f"{found}\n# {run(found)[1]}\n")
    return counts


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, which say no more than that it went on in eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(
    what: str, fuzz: Callable[[Iterable[int], torch.device], Counter[str]], programs: int
) -> int:
    """The command of one of them: the exit code, 1 where a program was wrong."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--device", choices=("cpu", "tape", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "tape":
        from onelaunch import testing

        testing.install()
    seeds = range(options.seed, options.seed + options.programs)
    counts = fuzz(seeds, torch.device(options.device))
    print(f"{len(seeds)} programs from seed {options.seed} on {options.device}: {dict(counts)}")
    return 1 if counts["wrong"] else 0

"""Faults of sentences: their length, riddles of turns, words that stand for others."""

from __future__ import annotations

import re
from collections.abc import Iterator

WORDS = 25
TURNS = re.compile(
    r"\b(of (which|what|whom|such|those that|these that)|what of|what (\w+ ){1,4}of)\b"
    r"|^Return what\b",
    re.I,
)
"""Turns that put a riddle in the place of a noun."""
PRONOUNS = re.compile(
    r"\b(those|these|ones|such|what|whose|theirs|them|one(?! (of|call|launch|by|that)\b))\b", re.I
)
_CODE = re.compile(r"``.+?``|`[^`]+`", re.S)
_PART = re.compile(r"\n\s*\n|\n\s*(?=[-*] |\w[\w, *]*: |\S+\.py  |\|)")
_HEADING = re.compile(r"^(Args|Raises|Returns|Attributes|Yields|Source|Note):\s*")
_END = re.compile(r"(?<=[.?!;:])\s+(?=[A-Z`(\"])|(?<=;)\s+")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring or a comment, each piece of code as one word."""
    for part in _PART.split(_CODE.sub("CODE", text.partition("Example:\n")[0])):
        part = re.sub(r"^[\w*, ]{1,40}: ", "", _HEADING.sub("", part.strip()))
        yield from filter(None, _END.split(" ".join(part.split())))


def faults(text: str) -> Iterator[str]:
    """Each sentence that is too long, has one of the turns, or two words that stand for others."""
    for sentence in sentences(text):
        if len(sentence.split()) > WORDS:
            yield f"{len(sentence.split())} words: {sentence}"
        if found := TURNS.search(sentence):
            yield f"'{found[0]}': {sentence}"
        if len(PRONOUNS.findall(sentence)) > 1:
            yield f"two words that stand for others: {sentence}"


def main() -> None:
    """Print the faults of files: `python -m tests.unit.prose src/onelaunch/state`."""
    import sys
    from pathlib import Path

    from tests.unit.test_prose import documented

    wanted = [Path(name).resolve() for name in sys.argv[1:]]
    for file, line, _, text in documented():
        if any(file.is_relative_to(path) for path in wanted):
            for fault in faults(text):
                print(f"{file}:{line}: {fault}")


if __name__ == "__main__":
    main()

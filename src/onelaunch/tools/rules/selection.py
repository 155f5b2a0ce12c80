"""The rules that a word names, as in `--select` and in a comment."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.tools.rules import RULES


def named(word: str) -> frozenset[str]:
    """Return the codes of the rules that a word names; none for a word that names none.

    Args:
        word: a code (``OL101``), the beginning of some (``OL5``), a name (``host-read``) or a
            severity (``slow``), in any case.
    """
    word = _plain(word)
    return frozenset(
        rule.code
        for rule in RULES.values()
        if word in (rule.name, rule.severity)
        or (word.startswith("ol") and rule.code.lower().startswith(word))
    )


def chosen(select: Collection[str], ignore: Collection[str]) -> set[str]:
    """Return the codes of some rules.

    Args:
        select: words that name the rules; empty: all.
        ignore: words that name rules to leave out; it has the last word.
    """
    codes = {code for word in select or RULES for code in named(word)}
    return codes - {code for word in ignore for code in named(word)}


def code_of(word: str) -> str | None:
    """Return the code that a code or a name stands for, among rules and errors; None for none."""
    word = _plain(word)
    if word.upper() in CATALOGUE:
        return word.upper()
    return next((r.code for r in RULES.values() if word in (r.name, r.code.lower())), None)


def nearest(word: str) -> str | None:
    """Return the code or name that a misspelt word is near to, or None.

    Of a code one character may be wrong, missing or too much.
    """
    word = _plain(word)
    if word.startswith("ol") and word[2:].isdigit():
        codes = dict.fromkeys((*CATALOGUE, *RULES))
        return next((code for code in codes if _one_apart(code.lower(), word)), None)
    names = [rule.name for rule in RULES.values()]
    return next(iter(difflib.get_close_matches(word, names, 1)), None)


def _one_apart(a: str, b: str) -> bool:
    if len(a) == len(b):
        return sum(map(operator.ne, a, b)) == 1
    short, long = sorted((a, b), key=len)
    return any(f"{long[:i]}{long[i + 1 :]}" == short for i in range(len(long)))


def _plain(word: str) -> str:
    return word.strip().strip("[]").lower().replace("_", "-")

"""The rules that a word names, as in `--select` and in a comment."""

from __future__ import annotations

import difflib

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.rules import RULES


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


def code_of(word: str) -> str | None:
    """Return the code that a code or a name stands for, among rules and errors; None for none."""
    word = _plain(word)
    if word.upper() in CATALOGUE:
        return word.upper()
    return next((r.code for r in RULES.values() if word in (r.name, r.code.lower())), None)


def nearest(word: str) -> str | None:
    """Return the code or name that a misspelt word comes nearest to, if any is near."""
    codes = [code.lower() for code in dict.fromkeys((*CATALOGUE, *RULES))]
    names = [rule.name for rule in RULES.values()]
    near = difflib.get_close_matches(_plain(word), [*names, *codes], 1)
    return None if not near else near[0].upper() if near[0] in codes else near[0]


def _plain(word: str) -> str:
    return word.strip().strip("[]").lower().replace("_", "-")

"""The documentation of a rule, as Markdown: its page in docs/rules."""

from __future__ import annotations

from onelaunch.finding import Severity
from onelaunch.tools.rules import FOUND_IN_FILES
from onelaunch.tools.rules.rule import Rule

SEVERITIES: dict[Severity, str] = {
    "blocks-capture": "Blocks a capture",
    "silently-wrong": "Silently wrong under a bare graph",
    "slow": "Slow",
}
"""severity -> its title, in the order of reports."""


def sections(rule: Rule) -> dict[str, str]:
    """Return the texts of a rule by their titles; those that it has."""
    texts = {
        "What it finds": sentence(rule.what),
        "Why it matters": sentence(rule.why),
        "Known problems": sentence(rule.problems),
        "What to write": sentence(rule.fix),
    }
    return {title: text for title, text in texts.items() if text}


def programs(rule: Rule) -> dict[str, str]:
    """Return the examples of a rule by their titles; those that it has."""
    found = {"Example": rule.example, "Use instead": rule.instead}
    return {title: text.strip("\n") for title, text in found.items() if text.strip()}


def markdown(rule: Rule) -> str:
    """Write the documentation of a rule, with all of its sections."""
    parts = [f"{SEVERITIES[rule.severity]}: {rule.title}. {means(rule)}"]
    parts += [f"## {title}\n\n{text}" for title, text in sections(rule).items()]
    parts += [f"## {title}\n\n```python\n{text}\n```" for title, text in programs(rule).items()]
    return "\n\n".join(parts) + "\n"


def means(rule: Rule) -> str:
    """Return how the doctor finds the fault of a rule, as a sentence."""
    read = rule.code in FOUND_IN_FILES
    return "Found by a run, and in files that are only read." if read else "Found by a run alone."


def sentence(text: str) -> str:
    """Return a text as a sentence: with a full stop, and a capital where it begins with a word."""
    text = text.strip()
    if not text:
        return text
    first = text.split()[0]
    if first.isalpha() and (len(first) > 1 or first == "a"):  # `x * 2` is code
        text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."

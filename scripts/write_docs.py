"""Write what docs/ takes from the code: docs/api.md from the docstrings of the public names,
docs/rules from the rules of the doctor, and of docs/errors.md the table, and the title, reason and
fix of each code, from the catalogue. The examples of docs/errors.md are written by hand and stay.

    python scripts/write_docs.py            # writes
    python scripts/write_docs.py --check    # exit code 1 if a page is not up to date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import onelaunch
from onelaunch.error_catalogue import CATALOGUE
from onelaunch.tools.rules import FOUND_IN_FILES, RULES, document
from onelaunch.tools.rules.rule import Rule

DOCS = Path(__file__).parents[1] / "docs"
SECTION = re.compile(
    r"^## (OL\d{3})\b.*\n\n\*\*Why:\*\* (?:.+\n)+\n\*\*Fix:\*\* (?:.+\n)+"
    r"(?:\n\*\*Rule:\*\* (?:.+\n)+)?",
    re.M,
)
TABLE = re.compile(r"^(\| code \| .+\n\|---\|---\|\n)(?:\|.+\n)*", re.M)
LINK = re.compile(r"#(ol\d{3})\b[\w-]*")


def errors(page: str) -> str:
    """Renew what comes from the catalogue in docs/errors.md.

    Raises:
        ValueError: a code without a section, or a section without a code.
    """
    found = SECTION.findall(page)
    if found != list(CATALOGUE):
        raise ValueError(f"docs/errors.md: sections {set(found) ^ set(CATALOGUE)}, or their order")
    rows = [f"| [{code}](#{code.lower()}) | {e.title} |\n" for code, e in CATALOGUE.items()]
    page = TABLE.sub(lambda match: match[1] + "".join(rows), page)
    return links(SECTION.sub(lambda match: section(match[1]), page))


def section(code: str) -> str:
    """Write the head of a section: title, reason, fix, and the rule of the doctor that finds it."""
    entry = CATALOGUE[code]
    parts = [f"**Why:** {entry.why}.", f"**Fix:** {entry.fix}."]
    if code in RULES:
        link = f"[{RULES[code].name}](rules/{page_of(RULES[code])})"
        parts.append(f"**Rule:** {link} of the [doctor](doctor.md).")
    return f"## {code}: {entry.title}\n\n" + "\n".join(wrapped(part) + "\n" for part in parts)


def links(page: str) -> str:
    """Renew the links to sections of docs/errors.md, whose names are made of the titles."""

    def anchor(match: re.Match[str]) -> str:
        code = match[1].upper()
        name = re.sub(r"[^\w\- ]", "", f"{code}: {CATALOGUE[code].title}".lower())
        return "#" + name.replace(" ", "-")

    return LINK.sub(anchor, page)


def page_of(rule: Rule) -> str:
    """Name the page of a rule in docs/rules."""
    return f"{rule.code}-{rule.name}.md"


def rule_page(rule: Rule) -> str:
    """Write the page of a rule."""
    text = document.markdown(rule)
    blocks = re.split(r"(^```python\n.*?^```\n)", text, flags=re.M | re.S)
    text = "".join(map(fitted, blocks)).strip()
    parts = [f"# {rule.name} ({rule.code})", text]
    comment = f"`# onelaunch: allow {rule.name} -- reason`"
    parts.append(f"At a line where it is [meant](../doctor.md#where-it-is-meant):\n{comment}.")
    if rule.code in CATALOGUE:
        parts.append(f"As an error: [{rule.code}](../errors.md#{rule.code.lower()}).")
    return links("\n\n".join(parts) + "\n")


def fitted(text: str) -> str:
    """Break the paragraphs of a text into lines of 100; a program is marked if it needs a GPU."""
    if text[:3] == "```":
        return text.replace("python", "python gpu", 1) if '"cuda"' in text else text
    parts = text.split("\n\n")
    kept = re.compile(r"[-*|>`#]|\d+\.| {4}")
    return "\n\n".join(p if kept.match(p) or len(p) < 100 else wrapped(p) for p in parts)


def rules() -> dict[Path, str]:
    """Write the pages of docs/rules: one for each rule, and their list."""
    text = """# Rules

What the [doctor](../doctor.md) finds. Written by `scripts/write_docs.py` from the rules themselves,
which `onelaunch explain NAME` prints, too. In files: "yes" where files that are only read show it;
other rules need a run.
"""
    for severity, title in document.SEVERITIES.items():
        listed = [rule for rule in RULES.values() if rule.severity == severity]
        if listed:
            text += f"\n## {title}\n\n| code | allow | what | in files |\n|---|---|---|---|\n"
        for rule in listed:
            read = "yes" if rule.code in FOUND_IN_FILES else ""
            link = f"[{rule.name}]({page_of(rule)})"
            text += f"| {rule.code} | {link} | {rule.title} | {read} |\n"
    made = {DOCS / "rules" / page_of(rule): rule_page(rule) for rule in RULES.values()}
    return {DOCS / "rules" / "README.md": text, **made}


def api() -> str:
    """Write docs/api.md."""
    names = [(name, getattr(onelaunch, name)) for name in onelaunch.__all__]
    functions = [(n, v) for n, v in names if not isinstance(v, type)]
    errors = [(n, v) for n, v in names if isinstance(v, type) and issubclass(v, Exception)]
    classes = [(n, v) for n, v in names if isinstance(v, type) and (n, v) not in errors]
    text = (
        "# API\n\nThe docstrings of the public names, as `help(ol.graph)` shows them. Written by\n"
    )
    text += "`scripts/write_docs.py`.\n"
    for title, group in (("Functions", functions), ("Classes", classes), ("Errors", errors)):
        text += f"\n## {title}\n" + "".join(entry("###", n, v) for n, v in sorted(group, key=first))
    return text


def first(pair: tuple[str, Any]) -> tuple[bool, str]:
    """Sort `graph` to the front."""
    return pair[0] != "graph", pair[0]


def entry(heading: str, name: str, value: Any) -> str:
    """Write one function, or a class with its methods and properties."""
    doc = inspect.getdoc(value) or ""
    text = f"\n{heading} {name}\n\n"
    if inspect.isroutine(value) or "\nArgs:" in doc:  # else a class that users do not make
        text += f"```text\n{name}{arguments(value)}\n```\n\n"
    text += markdown(doc)
    if isinstance(value, type):
        for member, inner in inspect.getmembers(value, is_documented):
            if not member.startswith("_"):
                text += entry("####", f"{name}.{member}", inner)
    return text


def is_documented(member: Any) -> bool:
    """Say whether a member is a method or property of onelaunch's, for users."""
    code = getattr(getattr(member, "fget", member), "__func__", getattr(member, "fget", member))
    ours = str(getattr(code, "__module__", "")).startswith("onelaunch")
    known = inspect.isroutine(member) or isinstance(member, property)
    return known and ours and bool(doc := inspect.getdoc(member)) and "Internal." not in doc


def arguments(value: Any) -> str:
    """Write a signature, without types: the docstring says them."""
    signature = inspect.signature(value)
    bare = [
        p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"
    ]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    if len(text) < 80:
        return text
    return "(\n    " + text[1:-1].replace(", ", ",\n    ") + ",\n)"


def markdown(doc: str) -> str:
    """Turn a docstring with Google's sections into Markdown."""
    doc = doc.replace("``", "`")
    head, *rest = re.split(r"^(\w+):\n", doc, flags=re.M)
    text = head.strip() + "\n"
    for name, body in zip(rest[::2], rest[1::2], strict=True):
        body, after = textwrap.dedent(body), ""
        if name != "Example":
            body, _, after = body.partition("\n\n")
        body = textwrap.dedent(body).strip()
        if name == "Example":
            body = f"```text\n{body}\n```"
        elif name != "Returns":
            items = re.split(r"\n(?=\S)", body)
            body = "\n".join(re.sub(r"^([\w, *]+):", r"- `\1`:", item, count=1) for item in items)
        text += f"\n**{name}:**\n\n{body}\n" + (f"\n{after.strip()}\n" if after else "")
    return text


def wrapped(text: str) -> str:
    """Break a paragraph into lines of 100."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    made = pages()
    gone = set((DOCS / "rules").glob("*.md")) - set(made)
    stale = [p for p, text in made.items() if not p.exists() or p.read_text() != text]
    for path in [*stale, *sorted(gone)]:
        print(f"{'not up to date' if check else 'written'}: docs/{path.relative_to(DOCS)}")
        if check:
            continue
        if path in gone:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path])
    return 1 if check and (stale or gone) else 0


def pages() -> dict[Path, str]:
    """Return the text that each page is to have."""
    made = {path: links(path.read_text()) for path in sorted(DOCS.glob("*.md"))}
    made[DOCS / "errors.md"] = errors((DOCS / "errors.md").read_text())
    made[DOCS / "api.md"] = api()
    return {**made, **rules()}


if __name__ == "__main__":
    sys.exit(main())

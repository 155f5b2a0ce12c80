"""The form of a rule, and its documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.finding import Severity


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule, documented.

    The examples are whole programs: each defines ``model``, a callable, and ``args``, the tuple of
    its arguments. The tests run both: the doctor finds the rule's fault in `example`, and not in
    `instead`.

    Attributes:
        code: its code, such as ``"OL101"``.
        name: its name, which reads as "allow <name>": ``"host-read"``.
        severity: what the fault does.
        title: the fault, in a few words.
        what: what the rule finds.
        why: why the fault matters.
        problems: known problems: what it does not find, or finds needlessly; empty for none.
        fix: the code to write instead, in a line.
        example: a program with the fault.
        instead: the program without it.
        same_as: codes of rules that name the same fault at the same line, such as a capture's
            refusal where a bare graph is silent. Only the finding of the other rule is shown.
    """

    code: str
    name: str
    severity: Severity
    title: str
    what: str
    why: str
    problems: str = ""
    fix: str
    example: str
    instead: str
    same_as: tuple[str, ...] = ()


def of_error(
    code: str,
    what: str,
    example: str = "",
    instead: str = "",
    *,
    problems: str = "",
    severity: Severity = "blocks-capture",
    same_as: tuple[str, ...] = (),
) -> Rule:
    """Make the rule of an error: its name, title, reason and fix are the catalogue's."""
    entry = CATALOGUE[code]
    return Rule(
        code=code,
        name=entry.rule,
        severity=severity,
        title=entry.title,
        what=what,
        why=entry.why,
        problems=problems,
        fix=entry.fix,
        example=example.strip(),
        instead=instead.strip(),
        same_as=same_as,
    )


def of_function(
    *lines: str, x: str = "torch.ones(4, 8)", imports: str = "", before: str = ""
) -> str:
    """Write an example whose `model` is a function.

    Args:
        lines: of the function.
        x: its argument.
        imports: an import besides torch.
        before: the code between the imports and the function.
    """
    function = "\n    ".join(["def model(x):", *lines])
    return _program((imports, "import torch", before), function, f"args = ({x},)")


def of_module(
    init: Sequence[str],
    forward: Sequence[str],
    *,
    x: str = "torch.ones(4, 8)",
    imports: str = "",
    before: str = "",
) -> str:
    """Write an example whose `model` is a module, by the lines of its two methods; the others are
    as for `of_function`."""
    methods = [["def forward(self, x):", *forward]]
    if init:
        methods.insert(0, ["def __init__(self):", "super().__init__()", *init])
    written = "\n\n    ".join("\n        ".join(lines) for lines in methods)
    module = f"class Model(nn.Module):\n    {written}"
    head = (imports, "import torch\nfrom torch import nn", before)
    return _program(head, module, f"model = Model()\nargs = ({x},)")


def _program(head: Sequence[str], model: str, end: str) -> str:
    """Set the parts of a program apart, as Python files have them."""
    return "\n\n\n".join(["\n\n".join(filter(None, head)), model, f"{end}\n"])

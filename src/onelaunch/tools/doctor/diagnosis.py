"""The result of a diagnosis."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Self

from onelaunch.finding import Finding, Means, Severity
from onelaunch.tools.report.document import Document
from onelaunch.tools.report.result import Result
from onelaunch.tools.rules import RULES
from onelaunch.tools.rules.findings import merged, names_of, under

MEANS: dict[Means, str] = {
    "source": "the source",
    "run": "an eager run",
    "capture": "a capture",
    "replay": "bare replays",
}
"""means -> what was looked at by it."""
_COUNTED: dict[Severity, tuple[str, str]] = {
    "blocks-capture": ("blocks a capture", "block a capture"),
    "silently-wrong": ("is silently wrong", "are silently wrong"),
    "slow": ("is slow", "are slow"),
}

_UNKNOWN = (
    'What on_refusal="split" makes of it is not known here: Dynamo fails on it, or its pieces are '
    "others in each call"
)
_SEVERAL = 'Diagnose one alone to see what on_refusal="split" makes of it.'


@dataclass(frozen=True)
class Pieces:
    """A callable in pieces.

    Attributes:
        launches: the launches of a call; 0 if nothing of it can be captured.
        outside: the lines that run as they are, between the pieces.
    """

    launches: int
    outside: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis(Result):
    """Findings on what stops a callable from being one launch, right and fast.

    ``print(diagnosis)`` shows each finding in the four parts of an error.

    Attributes:
        target: the name of the callable, or of the files.
        findings: each fault once, in the order of files and lines.
        replayed: whether a capture of ours succeeded and was launched; None: none was tried.
        means: the means by which it was looked at, of those in `Finding.found_by`.
        pieces: the pieces into which ``on_refusal="split"`` cuts a blocked callable; None if
            nothing blocks it, or if they are not known.
        environment: the machine and the versions, as in a comparison.
    """

    noun = "a diagnosis"

    target: str
    findings: tuple[Finding, ...]
    replayed: bool | None = None
    means: tuple[Means, ...] = ()
    pieces: Pieces | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    @property
    def summary(self) -> str:
        """The findings in one line; where that is nothing, what was looked at."""
        said: list[str] = []
        for severity, (one, many) in _COUNTED.items():
            count = sum(finding.severity == severity for finding in self.findings)
            noun = "" if said else " finding" if count == 1 else " findings"
            said += [f"{count}{noun} {one if count == 1 else many}"] if count else []
        looked = listed(self.means)
        text = ", ".join(said) or (f"nothing found in {looked}" if looked else "nothing found")
        if self.replayed is not None:
            calls = "not every call is" if ", " in self.target else "a call is not"
            text += f". Graphed, {'a call is' if self.replayed else calls} one launch"
        first, *others = self.target.split(", ")
        target = self.target if len(others) < 3 else f"{first} and {len(others)} more"
        return f"{target}: {text}."

    @property
    def in_pieces(self) -> str:
        """The pieces that ``on_refusal="split"`` makes of it, in a few lines; "" for what is not
        blocked."""
        if self.pieces is None:
            blocked = any(f.severity == "blocks-capture" for f in self.findings)
            unknown = _SEVERAL if ", " in self.target else _UNKNOWN
            return unknown if blocked and self.replayed is False else ""
        count = self.pieces.launches
        launched = f"{count} launch{'es' * (count > 1)}" if count else "no launch"
        text = f'With on_refusal="split" a call is {launched}'
        text += "; what runs as it is:" if count else ", and runs as it is throughout, because of:"
        return "\n".join([text, *(f"  {line}" for line in self.pieces.outside)])

    def __str__(self) -> str:
        text = [self.summary, *map(_parts, self.findings), self.in_pieces]
        return "\n".join(part for part in text if part)

    def only(self, codes: Collection[str]) -> Diagnosis:
        """Return the same with the findings of these codes alone."""
        kept = (under(finding, codes) for finding in self.findings)
        return replace(self, findings=tuple(f for f in kept if f is not None))

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = super().from_json(text)
        unknown = {code for finding in found.findings for code in finding.codes} - RULES.keys()
        if unknown:
            raise ValueError(
                f"not {cls.noun} in JSON: this release has no rule {', '.join(sorted(unknown))}"
            )
        return found

    def document(self) -> Document:
        from onelaunch.tools.doctor.shown import document

        return document(self)


def together(diagnoses: Iterable[Diagnosis]) -> Diagnosis:
    """Return several diagnoses as one, each fault once."""
    found = list(diagnoses)
    ran = [diagnosis for diagnosis in found if diagnosis.replayed is not None]
    blocked = [diagnosis for diagnosis in ran if not diagnosis.replayed]
    return Diagnosis(
        target=", ".join(diagnosis.target for diagnosis in found),
        findings=tuple(merged([f for diagnosis in found for f in diagnosis.findings])),
        replayed=all(diagnosis.replayed for diagnosis in ran) if ran else None,
        means=tuple(m for m in MEANS if any(m in diagnosis.means for diagnosis in found)),
        pieces=blocked[0].pieces if len(blocked) == 1 else None,
        environment={k: v for diagnosis in found for k, v in diagnosis.environment.items()},
    )


def listed(means: Collection[Means]) -> str:
    """List the subjects of some means of diagnosis, as words of a sentence; "" for none."""
    *first, last = [text for one, text in MEANS.items() if one in means] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _parts(finding: Finding) -> str:
    """Write a finding as an error has it: what, where, why and fix."""
    lines = [f"[{', '.join(finding.codes)}] {', '.join(names_of(finding))}: {finding.what}"]
    if finding.file:
        lines.append(f"  where: {finding.file}:{finding.line}: {finding.source}")
    if finding.library is not None:
        lines.append(f"  below: {finding.library}")
    lines.append(f"  why:   {RULES[finding.code].why}")
    lines.append(f"  fix:   {finding.fix}")
    return "\n".join(lines)

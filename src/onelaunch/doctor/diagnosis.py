"""The result of a diagnosis."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from onelaunch.doctor.sarif import to_sarif
from onelaunch.rules import RULES
from onelaunch.rules.finding import Finding, Means, merged
from onelaunch.rules.rule import Severity

if TYPE_CHECKING:  # it imports torch, which the diagnosis of files does not need
    from onelaunch.doctor.pieces import Pieces

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


@dataclass(frozen=True)
class Diagnosis:
    """Findings on what stops a callable from being one launch, right and fast.

    ``print(diagnosis)`` shows each finding in the four parts of an error.

    Attributes:
        target: the name of the callable, or of the files.
        findings: each fault once, in the order of files and lines.
        replayed: whether a capture of ours succeeded and was launched; None: none was tried.
        means: the means by which it was looked at, of those in `Finding.found_by`.
        pieces: what ``on_refusal="split"`` makes of a callable that is blocked; None if it is not,
            or if that is not known.
        file: the file of the callable; "" if that is not known, or there are many.
        environment: the machine and the versions, as in a comparison.
    """

    target: str
    findings: tuple[Finding, ...]
    replayed: bool | None = None
    means: tuple[Means, ...] = ()
    pieces: Pieces | None = None
    file: str = ""
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
            text += f". Graphed, a call is {'' if self.replayed else 'not '}one launch"
        first, *others = self.target.split(", ")
        target = self.target if len(others) < 3 else f"{first} and {len(others)} more"
        return f"{target}: {text}."

    @property
    def in_pieces(self) -> str:
        """The pieces that ``on_refusal="split"`` makes of it, in a few lines; "" for what is not
        blocked."""
        if self.pieces is None:
            blocked = any(f.severity == "blocks-capture" for f in self.findings)
            return _UNKNOWN if blocked and self.replayed is False else ""
        count = self.pieces.launches
        launched = f"{count} launch{'es' * (count > 1)}" if count else "no launch"
        text = f'With on_refusal="split" a call is {launched}'
        if self.environment.get("gpu"):  # elsewhere it is the time of an emulation
            text += f" and {self.pieces.host_us:.0f} us of the host's time"
        text += "; what runs as it is:" if count else ", and runs as it is throughout, because of:"
        return "\n".join([text, *(f"  {line}" for line in self.pieces.outside)])

    def __str__(self) -> str:
        text = [self.summary, *map(_parts, self.findings), self.in_pieces]
        return "\n".join(part for part in text if part)

    def only(self, codes: Collection[str]) -> Diagnosis:
        """Return the same with the findings of these codes alone."""
        kept = (finding.under(codes) for finding in self.findings)
        return replace(self, findings=tuple(f for f in kept if f is not None))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "target": self.target,
            "replayed": self.replayed,
            "means": list(self.means),
            "pieces": asdict(self.pieces) if self.pieces is not None else None,
            "environment": self.environment,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def to_json(self) -> str:
        """Return it as JSON, `findings` among it; see `onelaunch doctor --json`."""
        return json.dumps(self.to_dict(), indent=1)

    @staticmethod
    def from_json(text: str) -> Diagnosis:
        """Read a diagnosis that `to_json` wrote, all but `file`.

        Raises:
            ValueError: the text is not such a diagnosis.
        """
        try:
            return _diagnosis(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a diagnosis in JSON: {error}") from error

    def to_sarif(self) -> str:
        """Return it as SARIF 2.1.0, in which code hosts take findings."""
        return json.dumps(to_sarif(self.findings, self.file), indent=1)


def together(diagnoses: Iterable[Diagnosis]) -> Diagnosis:
    """Return several diagnoses as one, each fault once."""
    found = list(diagnoses)
    ran = [diagnosis for diagnosis in found if diagnosis.replayed is not None]
    return Diagnosis(
        target=", ".join(diagnosis.target for diagnosis in found),
        findings=tuple(merged([f for diagnosis in found for f in diagnosis.findings])),
        replayed=all(diagnosis.replayed for diagnosis in ran) if ran else None,
        means=tuple(m for m in MEANS if any(m in diagnosis.means for diagnosis in found)),
        pieces=ran[0].pieces if len(ran) == 1 else None,
        file=next((diagnosis.file for diagnosis in found if diagnosis.file), ""),
        environment={k: v for diagnosis in found for k, v in diagnosis.environment.items()},
    )


def listed(means: Collection[Means]) -> str:
    """Return what was looked at by some means, as a list in a sentence; "" for none."""
    *first, last = [text for one, text in MEANS.items() if one in means] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _diagnosis(data: dict[str, Any]) -> Diagnosis:
    pieces = None
    if data["pieces"]:
        from onelaunch.doctor.pieces import Pieces

        found = data["pieces"]
        pieces = Pieces(found["launches"], found["host_us"], tuple(found["outside"]))
    fields: dict[str, Any] = {
        **data,
        "pieces": pieces,
        "means": tuple(data["means"]),
        "findings": tuple(map(Finding.of_dict, data["findings"])),
    }
    return Diagnosis(**fields)


def _parts(finding: Finding) -> str:
    """Write a finding as an error has it: what, where, why and fix."""
    lines = [f"[{', '.join(finding.codes)}] {', '.join(finding.names)}: {finding.what}"]
    if finding.file:
        lines.append(f"  where: {finding.file}:{finding.line}: {finding.source}")
    if finding.library is not None:
        lines.append(f"  below: {finding.library}")
    lines.append(f"  why:   {RULES[finding.code].why}")
    lines.append(f"  fix:   {finding.fix}")
    return "\n".join(lines)

"""Rules on modes: what only training needs, though nothing trains."""

from __future__ import annotations

from onelaunch.finding import Finding
from onelaunch.frames.origins import is_installed
from onelaunch.source import line_of
from onelaunch.tools.doctor.slow.record import Record, Training, named
from onelaunch.tools.doctor.spot import NOWHERE, Spot, shown


def train_mode(record: Record) -> list[Finding]:
    """OL601: modules in train mode, or calls that say `training=True`, where nothing trains."""
    graded = record.graded or record.trainable
    noted = [t for t in record.training.values() if not (t.graded and graded)]
    modules = [t for t in noted if t.mode]
    forgotten: dict[tuple[str, int], Training] = {}
    for t in noted:
        if not t.mode:
            forgotten.setdefault((t.spot.file, t.spot.line), t)
    found = [_in_eval(t) for t in forgotten.values()]
    if modules:
        names = named([t.path for t in modules], "modules")
        first = modules[0]
        what = f"train mode, and no gradient is wanted: {names}; `{first.path}` {first.does}"
        found.append(first.spot.finding("OL601", what, None, "run"))
    return found


def grad_mode(record: Record) -> list[Finding]:
    """OL602: a model in eval mode that records for a backward that never comes."""
    if not record.graded or not record.any_eval:
        return []
    what = "autograd records the whole call; the model is in eval mode, and no backward runs"
    return [_definition(record.fn).finding("OL602", what, None, "run")]


def _in_eval(t: Training) -> Finding:
    where = f" in `{t.path}`" if t.path else ""
    what = f"this call{where} {t.does}, and no module around it is in train mode"
    return t.spot.finding("OL601", what, "pass `training=self.training`", "run")


def _definition(fn: object) -> Spot:
    """Return the line that defines the user's callable; nowhere for a library's."""
    place = line_of(fn)
    if place is None or is_installed(place.filename):
        return NOWHERE
    return Spot(shown(place.filename), place.lineno, 1, place.source)

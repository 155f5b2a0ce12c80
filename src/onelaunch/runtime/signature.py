"""The signatures of calls, which decide what a call can replay."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from onelaunch.call.ambient import default_device, modes
from onelaunch.call.containers import is_ordinary
from onelaunch.call.kinds import changed_kinds
from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Flat, call_constants, first_places, flatten_call, is_code
from onelaunch.driver.overlaps import Overlaps
from onelaunch.errors import describe_type
from onelaunch.runtime.candidate import Call, SignatureStatus
from onelaunch.runtime.changing import ChangingArgument, note_newest
from onelaunch.runtime.notices import Notices
from onelaunch.runtime.patience import DROPPED, FEW, UNUSED, History, Worth, without_objects
from onelaunch.runtime.readiness import PendingCall, RefusedCall
from onelaunch.runtime.requests import Objects, is_request
from onelaunch.runtime.varied import Replacements, VaryingNumbers

if TYPE_CHECKING:
    from onelaunch.call.tree import Tree
    from onelaunch.capture.numbers import Unfollowed
    from onelaunch.runtime.table import TableEntry


class Signatures:
    """The signatures of the calls of one callable, and their differences. `planned`: the calls of
    `warm_up`, and why each has no recording if it has none."""

    def __init__(self, name: str, notices: Notices) -> None:
        self.statuses: dict[CallSpec, SignatureStatus] = {}  # what is known of each signature
        self.varied = VaryingNumbers()  # the numbers that the caller varies
        self.replacements = Replacements()
        self.planned: dict[CallSpec, PendingCall | RefusedCall] = {}
        self.newest: list[tuple[CallSpec, SignatureStatus]] = []  # the newest, if each came once
        self._seen = Objects()
        self._come_again: set[type] = set()
        self._takes_apart: dict[type, bool] = {}
        """Class with another object in each call -> whether its objects are taken apart."""
        self._worths: dict[CallSpec, Worth] = {}
        self._name = name
        self._notices = notices

    def clear(self) -> None:
        self.statuses.clear()
        self._worths.clear()
        self.newest.clear()
        self.varied.clear()
        self.replacements.clear()
        self.planned.clear()

    def status(self, spec: CallSpec) -> SignatureStatus:
        """Return the status of a signature, made if it is new."""
        if spec not in self.statuses:
            worth = self._worths.setdefault(without_objects(spec), Worth())
            self.statuses[spec] = SignatureStatus(history=History(worth))
        return self.statuses[spec]

    def launched(self, worth: Worth, entries: Iterable[TableEntry]) -> int:
        """Return the launches of all recordings of similar calls, `entries` and dropped ones."""
        similar = [status for status in self.statuses.values() if status.history.worth is worth]
        here = [e for e in entries if e.status.history.worth is worth]
        return sum(s.past_launches() for s in similar) + sum(e.captured.launches[0] for e in here)

    def note_served(self, entry: TableEntry, entries: Iterable[TableEntry]) -> None:
        """Note a new recording, beside `entries`, that has served its own call."""
        worth = entry.status.history.worth
        captured = entry.captured
        # What differs from the run before it, or moves a number on, is refused after a few.
        dropped = entry.ran_differently and captured.compared.differs is None
        unused = FEW if captured.changed_numbers else UNUSED
        launched = self.launched(worth, (entry, *entries))
        worth.recorded(launched, DROPPED if dropped else unused)

    def past_launches(self) -> int:
        """Return the launches of dropped recordings that no new recording continues yet."""
        return sum(status.past_launches() for status in list(self.statuses.values()))

    def take_for_constants(self, spec: CallSpec, tree: Tree, error: Unfollowed) -> None:
        """Give each value of a number a recording: the callable branches on it."""
        self.varied.hold(spec, tree, error)
        if not error.only_this_call:  # each value gets a signature, in place of the one for all
            del self.statuses[spec]

    def drop_unreachable(self, recorded: Collection[CallSpec]) -> None:
        """Forget signatures that hold the last reference to an object of their calls. An example is
        the cache of a past request: no call can have such a signature again. Signatures with one
        call stay, as `newest` compares them. `recorded`: signatures with recordings, which stay."""
        again = [spec for spec, status in self.statuses.items() if status.warmups > 1]
        self._drop_dead([spec for spec in again if spec not in recorded])

    def _drop_dead(self, specs: Iterable[CallSpec]) -> set[type]:
        """Forget signatures that hold the last reference to an object of their calls, and return
        the classes of these objects."""
        dead: set[type] = set()
        for spec in specs:
            constants = [c for _, c in call_constants(spec.tree) if is_request(c)]
            objects = [(type(c.value), weakref.ref(c.value)) for c in constants]
            for constant in constants:
                constant.value = None
            for constant, (_, ref) in zip(constants, objects, strict=True):
                constant.value = ref()
            gone = {kind for kind, ref in objects if ref() is None}
            if gone:
                del self.statuses[spec]
            dead |= gone
        return dead

    def note_objects(self, objects: Iterable[object]) -> None:
        """Note the objects of a call, to know the classes whose objects come again."""
        for value in objects:
            if value in self._seen:
                self._come_again.add(type(value))
            self._seen.add(value)

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
        """Flatten the arguments of a call, and take apart objects that are new at each call."""
        return flatten_call(args, kwargs, self._takes_apart)

    def note_new(
        self, spec: CallSpec, flat: Flat, status: SignatureStatus, followed: bool = False
    ) -> None:
        """Note a new signature, and warn before the signatures are too many to capture. If each
        call brings another object, such objects are taken apart from now on. The warning is for
        other objects, and for a number or size that differs at each call. `followed`: whether
        recordings follow its numbers, which are then no reason to warn."""
        if self._passed_once(spec):
            return
        changing = note_newest(self.newest, spec, flat.paths, status)
        if changing is None or (followed and changing.kind == "number"):
            return
        kind = type(changing.newest)
        if changing.kind == "object" and kind not in self._takes_apart and is_ordinary(kind):
            self._takes_apart[kind] = True
            self.newest.clear()
        else:
            self._warn_changing(changing)

    def _passed_once(self, spec: CallSpec) -> bool:
        """Take a class apart if each earlier call had an object of it that is gone since. Batches
        of a loader are such objects. Return whether there is such a class."""
        kinds = {type(c.value) for _, c in call_constants(spec.tree) if is_request(c)}
        kinds -= self._come_again | self._takes_apart.keys()
        once = [s for s, status in self.statuses.items() if s is not spec and status.warmups == 1]
        gone = self._drop_dead(once) & kinds if kinds else set[type]()
        self._takes_apart.update(dict.fromkeys(gone, True))
        if gone:
            self.newest.clear()
        return bool(gone)

    def stop_taking_apart(self, before: Flat, after: Flat) -> None:
        """Stop taking apart objects that the callable changes: a replay would not change them."""
        changed = changed_kinds(before, after)
        names = " and ".join(sorted(k.__name__ for k in changed if self._takes_apart.get(k)))
        self._takes_apart.update(dict.fromkeys(changed, False))
        if names:
            what = f"`{self._name}` is called with another {names} each time, and changes it"
            fix = "return what it stores there, or give it the same object at each call"
            self._notices.warn("OL302", f"{what}: such calls run eagerly", "object", fix)

    def _warn_changing(self, changing: ChangingArgument) -> None:
        code, end = "OL301", ""
        if changing.kind == "object":
            code, end = "OL302", ": such calls run eagerly"
        text = f"`{self._name}` was called with {changing.text}{end}"
        self._notices.warn(code, text, changing.kind, changing.fix)


def spec_of(call: Call) -> CallSpec:
    tensors, kind = call.flat.tensors, call.device.type
    here = [t for t in tensors if t.device.type == kind]
    numbers = [i for i, t in enumerate(tensors) if t.device.type == kind]
    first = first_places(tensors)
    twice = [(first[id(t)], i, None) for i, t in enumerate(tensors) if first[id(t)] != i]
    shared = [(numbers[i], numbers[j], offset) for i, j, offset in Overlaps(call.driver)(*here)]
    specs = tuple(TensorSpec.of(t) for t in tensors)
    return CallSpec(call.flat.tree, specs, (*twice, *shared), modes(), default_device())


def opaque(flat: Flat) -> str | None:
    """Describe an argument that cannot be compared with another call's, or return None."""
    for path, constant in call_constants(flat.tree):
        value = constant.value
        comparable = constant.is_plain or is_code(value) or isinstance(value, nn.Module)
        if not comparable and not hasattr(value, "__dict__"):
            return f"`{path}` is {describe_type(value)}"
    return None

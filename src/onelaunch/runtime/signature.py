"""The signatures of calls, which decide what a call can replay."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from onelaunch.autograd.pair import packing
from onelaunch.call.ambient import default_device, modes
from onelaunch.call.containers import is_ordinary
from onelaunch.call.kinds import changed_kinds
from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Flat, call_constants, first_places, flatten_call, is_code, is_plain
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.protocol import Driver
from onelaunch.driver.select import recordable
from onelaunch.errors import kind_of
from onelaunch.runtime.attempt import SignatureState
from onelaunch.runtime.changing import Finding, Newest
from onelaunch.runtime.notices import Notices
from onelaunch.runtime.requests import is_request
from onelaunch.runtime.varied import Varied


class Signatures:
    """The signatures of the calls of one callable, and what differs from one to the next.

    Attributes:
        states: the state of each signature.
        varied: the numbers that the caller varies.
    """

    def __init__(self, name: str, notices: Notices) -> None:
        self.states: dict[CallSpec, SignatureState] = {}
        self.varied = Varied()
        self.newest = Newest()
        self._apart: dict[type, bool] = {}
        """Classes of which each call brings another object -> True if such objects are taken
        apart."""
        self._name = name
        self._notices = notices

    def clear(self) -> None:
        """Forget every signature."""
        self.states.clear()
        self.newest.clear()
        self.varied.clear()

    def gone(self) -> int:
        """Return the launches of dropped recordings that no other one has taken over yet."""
        return sum(signature.gone() for signature in list(self.states.values()))

    def drop_unreachable(self, recorded: Collection[CallSpec]) -> None:
        """Forget the signatures that hold the last reference to an object of their calls, as a
        cache that a request made anew: no call can have them again. Those that came once are what
        `newest` looks at.

        Args:
            recorded: the signatures that have recordings, which go with these.
        """
        again = [spec for spec, state in self.states.items() if state.warmups > 1]
        for spec in [spec for spec in again if spec not in recorded]:
            constants = [c for _, c in call_constants(spec.tree) if is_request(c)]
            held = [weakref.ref(c.value) for c in constants]
            for constant in constants:
                constant.value = None
            for constant, ref in zip(constants, held, strict=True):
                constant.value = ref()
            if any(ref() is None for ref in held):
                del self.states[spec]

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
        """Flatten the arguments of a call, and take apart objects that are new at each call."""
        return flatten_call(args, kwargs, self._apart)

    def note_new(
        self, spec: CallSpec, flat: Flat, signature: SignatureState, followed: bool = False
    ) -> None:
        """Note a new signature. If each call brings another object, take such objects apart from
        now on; if that is impossible, or it is another number or size, warn, before the signatures
        are too many to capture. `followed`: recordings follow its numbers, which are no reason to
        warn."""
        found = self.newest.note(spec, flat.paths, signature)
        if found is None or (followed and found.kind == "number"):
            return
        kind = type(found.newest)
        if found.kind == "object" and kind not in self._apart and is_ordinary(kind):
            self._apart[kind] = True
            self.newest.clear()
        else:
            self._warn_changing(found)

    def stop_taking_apart(self, before: Flat, after: Flat) -> None:
        """Stop taking apart objects that the callable changes: a replay would not change them. A
        dataclass then counts as any other object."""
        changed = changed_kinds(before, after)
        names = " and ".join(sorted(kind.__name__ for kind in changed if self._apart.get(kind)))
        self._apart.update(dict.fromkeys(changed, False))
        if names:
            what = f"`{self._name}` is called with another {names} each time, and changes it"
            fix = "return what it stores there, or give it the same object at each call"
            self._notices.warn("OL302", f"{what}: such calls run eagerly", "object", fix)

    def _warn_changing(self, found: Finding) -> None:
        code, end = "OL301", ""
        if found.kind == "object":
            code, end = "OL302", ": such calls run eagerly"
        text = f"`{self._name}` was called with {found.text}{end}"
        self._notices.warn(code, text, found.kind, found.fix)


def spec_of(driver: Driver, flat: Flat, device: torch.device) -> CallSpec:
    """Return the signature of a call whose arguments are flattened."""
    here = [t for t in flat.tensors if t.device.type == device.type]
    numbers = [i for i, t in enumerate(flat.tensors) if t.device.type == device.type]
    first = first_places(flat.tensors)
    twice = [(first[id(t)], i, None) for i, t in enumerate(flat.tensors) if first[id(t)] != i]
    shared = [(numbers[i], numbers[j], offset) for i, j, offset in Overlaps(driver)(*here)]
    specs = tuple(TensorSpec.of(t) for t in flat.tensors)
    return CallSpec(flat.tree, specs, (*twice, *shared), modes(), default_device())


def is_unrecordable(driver: Driver, flat: Flat) -> bool:
    """Return whether a call runs inline: in another capture, under hooks that pack saved tensors,
    or with a tensor that is more than its memory (a subclass, sparse, quantized, a dual number)."""
    return driver.capturing() or packing() or not all(map(recordable, flat.tensors))


def opaque(flat: Flat) -> str | None:
    """Describe an argument that cannot be compared with another call's, or return None."""
    for path, constant in call_constants(flat.tree):
        value = constant.value
        known = is_plain(value) or is_code(value) or isinstance(value, nn.Module)
        if not known and not hasattr(value, "__dict__"):
            return f"`{path}` is {kind_of(value)}"
    return None

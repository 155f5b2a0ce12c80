"""The recordings of a callable that serves requests, each with objects of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat
from onelaunch.capture.callee import Callee
from onelaunch.driver.protocol import Driver
from onelaunch.runtime.requests import parts_of
from onelaunch.runtime.signature import spec_of
from onelaunch.runtime.table import Table, moving_in
from onelaunch.runtime.takeover import take_over
from onelaunch.state.slots import Slot


class Serving(Table):
    """A table whose recordings pass from the objects of one request to those of the next."""

    _callee: Callee

    def _take_over(self, driver: Driver, device: torch.device, flat: Flat) -> bool:
        """Have a new request's objects take over the recordings of an earlier one's, if they can;
        return whether they did."""
        if not self._entries:
            return False
        spec = spec_of(driver, flat, device)
        if spec in self._signatures:
            return False
        taken = take_over(
            driver, device, self._entries, spec, flat.tensors, self._displaced, self._name
        )
        if taken is not None:
            self._succeed(spec, *taken)
        return taken is not None

    def _is_new(self, requests: Sequence[object]) -> bool:
        """Return whether this is the first call with objects of classes that took recordings over.

        If no recording fits, as for a prompt before its tokens, it is worth no warm-up: the next
        request brings another object.
        """
        return all(type(value) in self._served for value in requests) and not any(
            value in self._request_parts for value in requests
        )

    def _set_apart(self, requests: Sequence[object]) -> None:
        """Forget what was read of other requests' objects, on which a call of this one does not
        rely."""
        parts = parts_of(requests)
        if self._callee.reads is not None:
            mine = {id(part) for part in parts}
            self._callee.reads.forget(part for part in self._request_parts if id(part) not in mine)
        for part in parts:
            self._request_parts.add(part)

    def _counting(self, spec: CallSpec) -> list[Slot]:
        """Return the numbers that recordings of a signature move on."""
        slots = [s for e in self._entries if e.spec == spec for s in moving_in(e.captured)]
        return list({slot.id: slot for slot in slots}.values())

"""A call above the largest bucket, in chunks of that size."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat, is_plain, unflatten
from onelaunch.capture.callee import Callee
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError
from onelaunch.padding.chunk_proof import prove_chunks
from onelaunch.padding.dry_run import DryRun
from onelaunch.padding.pad import Proof, Request, each_once, resized
from onelaunch.runtime.signature import spec_of
from onelaunch.sizes.buckets import Buckets, Sizes
from onelaunch.sizes.dims import PaddedDims
from onelaunch.state.guard import StateGuard
from onelaunch.state.walk import StateWalk


class Chunks:
    """The proofs that calls may be cut into chunks, by signature.

    Args:
        most: the largest number of signatures that are tried.
        raises: True to raise a refusal, and try again at the next call; False to keep it.
    """

    def __init__(self, buckets: Buckets, callee: Callee, most: int, raises: bool) -> None:
        self._buckets = buckets
        self._callee = callee
        self._most = most
        self._raises = raises
        self._proofs: dict[CallSpec, tuple[StateGuard, Proof | CaptureError]] = {}

    def __len__(self) -> int:
        return len(self._proofs)

    def clear(self) -> None:
        self._proofs.clear()

    def proof(
        self, driver: Driver, device: torch.device, call: Request, flat: Flat, place: int
    ) -> Proof | CaptureError | None:
        """Return the proof that a call may be cut into chunks along bucketed dimension `place`.
        Return the refusal if it may not, or None if there are too many signatures to try.

        Raises:
            CaptureError: OL140, it may not.
        """
        largest = self._buckets.largest
        example = [
            t if how is None else resized(t, how, largest)
            for t, how in zip(flat.tensors, call.padded, strict=True)
        ]
        spec = spec_of(driver, flat._replace(tensors=example), device)
        guard, known = self._proofs.get(spec, (None, None))
        if guard is not None and guard.check():
            return known
        if guard is None and len(self._proofs) >= self._most:
            return None
        reached = self._callee.reached(flat)
        guard = guard_of(reached.walk())
        dry_run = DryRun(driver, device, self._callee.eager_form, reached, flat.tree)
        try:
            found: Proof | CaptureError = prove_chunks(dry_run, self._buckets, call, flat, place)
        except CaptureError as error:
            if self._raises:
                raise
            found = copy.copy(error)  # without the frames, which hold tensors
        self._proofs[spec] = guard, found
        return found


def guard_of(state: StateWalk) -> StateGuard:
    """Return a guard of the flags and numbers on which the callable may branch."""
    held = [(slot, value) for slot, value in state.held.values() if state.is_read(slot)]
    return StateGuard([pair for pair in held if is_plain(pair[1])], [])


def chunks(
    call: Request, flat: Flat, place: int, step: int
) -> Iterator[tuple[Sizes, tuple[Any, ...], dict[str, Any]]]:
    """Return the sizes, arguments and keyword arguments of each chunk: `step` rows, or the rest.
    Their tensors are views."""
    size = call.sizes[place]
    for start in range(0, size, step):
        count = min(step, size - start)
        rows = partial(_rows, place=place, start=start, count=count)
        args, kwargs = unflatten(flat.tree, each_once(flat.tensors, call.padded, rows))
        yield (*call.sizes[:place], count, *call.sizes[place + 1 :]), args, kwargs


def joined(parts: Sequence[Flat], proof: Proof, place: int) -> Any:
    """Return the results of all chunks as one; its tensors are new memory."""
    whole: list[Tensor] = []
    made: dict[tuple[int, ...], Tensor] = {}  # a tensor may be in several places
    for number, follows in enumerate(proof.follows):
        dim = next(f.dim for f in follows if f.place == place)
        rows = [part.tensors[number] for part in parts]
        key = tuple(map(id, rows))
        made[key] = made[key] if key in made else torch.cat(rows, dim)
        whole.append(made[key])
    return unflatten(parts[0].tree, whole)


def _rows(t: Tensor, how: PaddedDims | None, place: int, start: int, count: int) -> Tensor:
    """Return `count` rows of an argument from `start`, if it has that bucketed dimension."""
    dim = None if how is None else how.dim_of(place)
    return t if dim is None else t.narrow(dim, start, count)

"""Callables that ask torch whether they are being captured, and do something else if they are.

They are told no in a capture, too: then it records what an eager call does. If that is refused, the
callable is run once with the answer no and once with yes, and both runs are rolled back. Where they
agree, a capture with the answer yes follows. The answer is given by `driver.capture_query`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.ambient import inlining
from onelaunch.call.spec import has_strides
from onelaunch.call.tree import Flat, Tree, flatten, unflatten
from onelaunch.capture.callee import Callee
from onelaunch.capture.rolled_back import rolled_back
from onelaunch.driver.capture_query import CaptureAnswer
from onelaunch.driver.distance import farthest
from onelaunch.driver.select import random_states
from onelaunch.errors import CaptureError, let_go
from onelaunch.runtime.candidate import Candidate
from onelaunch.runtime.warmup import NotedRun, flat_result
from onelaunch.source import user_line

_ROUNDING = 0.05
"""The greatest difference by rounding of different kernels, relative to the largest value."""


def compare(
    callee: Callee, candidate: Candidate, name: str, refused: CaptureError
) -> CaptureError | None:
    """Run a callable with either answer to its question whether it is being captured. Return the
    error of a callable that computes something else in a capture. Its results or its state then
    differ by more than rounding, with the same random numbers. Return `refused` if it fails there.
    Every run is rolled back. The last run, as in a capture, is a warm-up, unless the capture
    will differ."""
    if candidate.reached.walk().runs_backward():
        return None  # no run of it can be rolled back without gradients
    eager = _answered(callee, candidate, False)
    try:
        captured = _answered(callee, candidate, True)
    except Exception as error:  # noqa: BLE001  eager does not raise it
        let_go(error)
        return refused
    limit = _ROUNDING if captured.drawn == eager.drawn else sys.float_info.max
    distance, state = captured.distances(eager)
    if max(distance, state) <= limit:
        return None
    off = f"{distance:.0%} off" if distance < math.inf else "and not only in values"
    off = off if state <= limit else "and changes other state"
    what = f"`{name}` computes something else where it is captured, {off}"
    fix = "see to it that it takes one way, whatever `is_current_stream_capturing` says"
    return CaptureError("OL109", what, where=user_line(), fix=fix)


def switch_early(callee: Callee, candidate: Candidate, result: Any) -> None:
    """Change the answer of a callable to yes after its last warm-up, where a capture would refuse
    it after a no. Its results must be the same. That saves a capture and a run.
    `candidate`: with the state after the warm-up, which is as before: its effects are not undone.
    `result`: the warm-up's."""
    status, asking = candidate.status, candidate.status.capture_answer
    ledger, draws = status.ledger, status.draws
    if not asking.asked or asking.answer or torch.is_grad_enabled() or ledger is None:
        return
    if not ledger.refused or ledger.writes or ledger.drawn:
        return
    asking.answer, same = True, False
    try:
        captured = _answered(callee, candidate, True)
        eager = _RunValues.of(candidate, flat_result(result, candidate.reached))
        same = bool(eager.tensors) and captured.result.distance(eager) <= _ROUNDING
        same = same and not captured.effects
    except Exception as error:  # noqa: BLE001  the capture will be refused, and name the cause
        let_go(error)
    finally:
        asking.answer = same
        if not same:
            status.ledger, status.draws = ledger, draws


def may_differ(candidate: Candidate) -> bool:
    """Return whether a callable is told yes, and its state may differ from its last warm-up's."""
    asking = candidate.status.capture_answer
    return asking.answer and not (
        asking.left is not None and asking.left() is candidate.reached.walk().contents
    )


def differs(callee: Callee, candidate: Candidate) -> bool:
    """Compare a callable again whose state has changed. If it does something else now where it is
    told yes, it is told no, and warms up anew."""
    failed = CaptureError("OL109", "the callable fails where it is captured")
    if compare(callee, candidate, "", failed) is None:
        return False
    candidate.status.begin_anew()
    return True


class _RunValues(NamedTuple):
    """Values that a run left, as a result or in the state."""

    tree: Tree
    tensors: list[Tensor]  # copies
    places: list[object]
    """The shape, the dtype and the owner of each tensor. The owner is an argument, a tensor of the
    state, or the first tensor here that is the same or shares its memory."""

    @staticmethod
    def of(candidate: Candidate, flat: Flat) -> _RunValues:
        storage = candidate.driver.storage
        outside = [*candidate.flat.tensors, *(t for _, t in candidate.reached.walk().tensors())]
        ids, storages = {id(t): id(t) for t in outside}, dict[int, object]()
        for t in filter(has_strides, outside):
            storages[storage(t)] = storage(t)
        places: list[object] = []
        for n, t in enumerate(flat.tensors):
            memory = storages.setdefault(storage(t), n) if has_strides(t) else None
            places.append((t.shape, t.dtype, ids.setdefault(id(t), n), memory))
        return _RunValues(flat.tree, [t.detach().clone() for t in flat.tensors], places)

    def distance(self, other: _RunValues) -> float:
        """Return the distance to other values; infinity if they differ in more than tensors."""
        same_form = self.places == other.places and self.tree == other.tree
        return farthest(other.tensors, self.tensors) if same_form else math.inf


class _Answered(NamedTuple):
    """The outcome of a run after an answer."""

    result: _RunValues
    drawn: list[object]  # the states of the generators and the draws; empty if there were none
    effects: dict[object, _RunValues]  # id of a slot, or a written storage -> what it left there

    def distances(self, other: _Answered) -> tuple[float, float]:
        """Return the distances of the results and of the states, the farthest part of each."""
        mine, others = self.effects, other.effects
        parts = [mine[key].distance(others[key]) for key in mine.keys() & others.keys()]
        state = max(parts, default=0.0) if mine.keys() == others.keys() else math.inf
        return self.result.distance(other.result), state


def _answered(callee: Callee, candidate: Candidate, answer: bool) -> _Answered:
    """Run the callable with this answer about capturing, and roll it back."""
    driver, device, flat = candidate.driver, candidate.device, candidate.flat
    args, kwargs = unflatten(flat.tree, flat.tensors)
    run: Callable[[], Any] = functools.partial(callee.fn, *args, **kwargs)
    noted = answer and not (callee.is_compiled(driver) or torch.is_grad_enabled())
    reached = candidate.reached
    undone = rolled_back(driver, device, flat.tensors, reached, lambda: callee.reads)
    # The warm-ups got the answer no. What another answer leads to was not read yet.
    before = reached.walk()
    with undone as effects, torch.no_grad():
        observer, states = effects.observer, random_states(device)
        if noted:
            run = NotedRun(candidate, run, observer=observer)
        with CaptureAnswer(answer).in_force(), observer, inlining():
            result = callee.with_read_watch(run, device, before=None if answer else before)()
        now, drawn = random_states(device), list[object]()
        if not all(map(torch.equal, now, states)):  # some operations draw only at times
            # States alone don't tell: 4 numbers and 8 move a generator of CUDA as far.
            drawn += [[state.tolist() for state in now], observer.random]
        values = _RunValues.of(candidate, flat_result(result, reached))
        written = observer.memory.written.items()
        left: dict[object, _RunValues] = {
            key: _RunValues.of(candidate, flatten(t)) for key, t in written
        }
    if callee.reads is not None:
        # The run is rolled back, and the next begins where it did.
        callee.note_state_after(reached, flat, result, before, effects.left)
    for change in effects.changes:
        left[change.slot.id] = _RunValues.of(candidate, flat_result(change.after, reached))
    return _Answered(values, drawn, left)

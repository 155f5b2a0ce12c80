"""The way of a compiled graph's call to the recordings of its parameters, in C and in Python."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from typing import Any

import pytest

from onelaunch.dynamo.dispatch import PlainDispatch
from onelaunch.native import FAILURES, compiled


@pytest.fixture(scope="module", params=["C", "Python"])
def kind(request: pytest.FixtureRequest) -> Any:
    return PlainDispatch if request.param == "Python" else native()


def native() -> Any:
    try:
        return compiled("dispatch").Dispatch
    except FAILURES as error:
        pytest.skip(f"no C here: {error}")


class Thing:
    pass


def places(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def missed(*args: object, **kwargs: object) -> tuple[object, ...]:
    return ("missed", args, kwargs)


def test_objects_choose_the_program(kind: Any) -> None:
    dispatch, things = kind(missed), [Thing() for _ in range(100)]
    other = [*things[:-1], Thing()]
    for name, given in (("first", things), ("second", other)):
        moving = places(100, 101)
        dispatch.add((places(*range(100)), tuple(given), moving, lambda *a, n=name: (n, a)))
    assert dispatch(*things, 5, 6) == ("first", (5, 6))
    assert dispatch(*other, 7, 8) == ("second", (7, 8))
    missing = (*things[:-1], Thing(), 5, 6)
    assert dispatch(*missing) == ("missed", missing, {})
    dispatch.forget()
    assert dispatch(*things, 5, 6)[0] == "missed"


def test_places_at_random_agree_with_python(kind: Any) -> None:
    chance = random.Random(0)
    for _ in range(300):
        count = chance.randrange(80)
        args = [Thing() for _ in range(count)]
        fixed = sorted(chance.sample(range(count), chance.randrange(count + 1)))
        moving = [i for i in range(count) if i not in fixed]
        dispatch = kind(missed)
        dispatch.add((places(*fixed), tuple(args[i] for i in fixed), places(*moving), lambda *a: a))
        assert dispatch(*args) == tuple(args[i] for i in moving)
        if fixed:
            swapped = list(args)
            swapped[chance.choice(fixed)] = Thing()
            assert dispatch(*swapped)[0] == "missed"


def test_a_program_may_leave_while_it_runs_or_raise(kind: Any) -> None:
    dispatch, thing = kind(missed), Thing()

    def run(x: object) -> object:
        dispatch.forget()
        gc.collect()
        if x is None:
            raise KeyError(x)
        return x

    for x in (3, None):
        dispatch.add((places(0), (thing,), places(1), run))
        if x is None:
            with pytest.raises(KeyError):
                dispatch(thing, x)
        else:
            assert dispatch(thing, x) == x
    assert dispatch(thing, 4)[0] == "missed"


def test_what_does_not_fit_is_safe() -> None:
    kind = native()
    dispatch, things = kind(missed), [Thing() for _ in range(4)]
    dispatch.add((places(*range(4)), tuple(things), places(4, 5), lambda *a: a))
    for args in ((*things, 5), things[:3], ()):
        assert dispatch(*args) == ("missed", tuple(args), {})
    assert dispatch(*things, 5, 6, x=1) == ("missed", (*things, 5, 6), {"x": 1})
    bad: tuple[Any, ...] = (
        *(3, (1, 2, 3, 4), (places(0, 1), (1,), places(), missed)),
        *((places(0), [1], places(), missed), (places(0), (1,), places())),
    )
    for program in bad:
        with pytest.raises(TypeError, match="no program"):
            dispatch.add(program)


def test_a_cycle_is_collected(kind: Any) -> None:
    class Owner:
        def __init__(self) -> None:
            self.dispatch = kind(self.missed)

        def missed(self, *args: object) -> None:
            pass

    owner = Owner()
    owner.dispatch.add((places(0), (owner,), places(), owner.missed))
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None

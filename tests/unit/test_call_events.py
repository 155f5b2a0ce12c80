"""The profiling hook, in C and in Python: the events that it passes on, in each thread."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from onelaunch import call_events
from onelaunch.call_events import Hook, Matters, hook, is_profiled, pause, set_profile, unwatched


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(call_events, "_native", lambda: None)
    else:
        assert call_events._native() is not None
    return request.param


Events = list[tuple[str, str, object]]


def inner(value: object) -> object:
    return value


def outer(value: object) -> object:
    return inner(value)


@contextmanager
def on(made: Hook) -> Generator[None]:
    before = sys.getprofile()
    made.begin()
    try:
        yield
    finally:
        made.end()
        set_profile(before)


def noting(events: Events) -> Callable[[FrameType, str, Any], None]:
    def note(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_globals is globals() or event == "c_call":
            name = getattr(arg, "__name__", "") if event == "c_call" else frame.f_code.co_name
            events.append((event, name, None if event == "c_call" else arg))

    return note


def own(events: Events) -> Events:
    return [event for event in events if event[1] in ("inner", "outer")]


def test_calls_and_returns() -> None:
    events: Events = []
    with on(hook(noting(events))):
        outer(3)
    assert own(events) == [
        ("call", "outer", None),
        ("call", "inner", None),
        ("return", "inner", 3),
        ("return", "outer", 3),
    ]


def test_skipped_code_matters_by_its_result_alone() -> None:
    events: Events = []
    with on(hook(noting(events), {id(inner.__code__): Matters.RESULTS}, {int})):
        inner(3)
        inner([3])
    assert own(events) == [("return", "inner", [3])]


def test_a_result_matters_to_code_that_matters_alone() -> None:
    events: Events = []
    codes = {id(inner.__code__): Matters.USES, id(outer.__code__): Matters.RESULTS}
    with on(hook(noting(events), codes, {int})):
        outer([3])
    assert own(events) == [("return", "outer", [3])]


def test_a_call_matters_by_code_that_matters_alone() -> None:
    events: Events = []
    codes = {id(inner.__code__): Matters.USES}
    with on(hook(noting(events), codes, {int})):
        outer(3)
        codes[id(outer.__code__)] = Matters.USES
        outer(4)
    assert own(events) == [
        ("call", "outer", None),
        ("call", "inner", None),
        ("return", "outer", 3),
        ("call", "outer", None),
    ]


def test_code_whose_returns_alone_matter() -> None:
    events: Events = []
    with on(hook(noting(events), {id(outer.__code__): Matters.RETURNS}, {int})):
        outer(3)
    assert own(events) == [
        ("call", "inner", None),
        ("return", "inner", 3),
        ("return", "outer", 3),
    ]


def test_code_may_be_skipped_from_the_middle_of_a_run() -> None:
    events: Events = []
    codes: dict[int, Matters] = {}
    with on(hook(noting(events), codes, {int})):
        inner(3)
        codes[id(inner.__code__)] = Matters.RESULTS
        inner(4)
    assert own(events) == [("call", "inner", None), ("return", "inner", 3)]


def test_nothing_is_reported_while_the_gate_is_empty() -> None:
    events: Events = []
    gate: list[int] = []
    with on(hook(noting(events), gate=gate)):
        outer(3)
        gate.append(1)
        inner(4)
        gate.clear()
        inner(5)
    assert own(events) == [("call", "inner", None), ("return", "inner", 4)]


def test_methods_in_c_of_some_objects() -> None:
    events: Events = []
    generator = random.Random(0)
    with on(hook(methods=noting(events), owners=(random.Random,))):
        generator.random()
        random.random()
        random.Random.getrandbits(generator, 3)
        [1].count(1)
        outer(3)
    assert [name for _, name, _ in events] == ["random", "random", "getrandbits"]


def test_a_refusal_is_raised_where_the_method_is_called(kind: str) -> None:
    def refuse(frame: FrameType, event: str, arg: Any) -> None:
        raise RuntimeError(f"{arg.__name__} on line {frame.f_lineno}")

    made = hook(methods=refuse, owners=(random.Random,))
    line = sys._getframe().f_lineno + 2
    with on(made), pytest.raises(RuntimeError, match=f"random on line {line}"):
        random.random()
    assert sys.getprofile() is not made
    del kind


def test_nothing_is_seen_while_paused() -> None:
    events: Events = []
    with on(hook(noting(events), methods=noting(events), owners=(random.Random,))):
        with unwatched():
            outer(3)
            random.random()
            with unwatched():
                outer(3)
            outer(3)
        inner(4)
    assert [e for e in events if e[1] in ("inner", "outer", "random")] == [
        ("call", "inner", None),
        ("return", "inner", 4),
    ]


def test_a_pause_is_of_one_thread() -> None:
    events: Events = []

    def work() -> None:
        assert pause(False) is False
        made.begin()
        outer(3)

    made = hook(noting(events))
    with unwatched():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert pause(True) is True
    made.end()
    assert len(own(events)) == 4


def test_it_leaves_another_thread_when_it_ends() -> None:
    events: Events = []
    ended, seen = threading.Event(), threading.Event()
    left: list[Any] = []

    def work() -> None:
        made.begin()
        inner(3)
        seen.set()
        ended.wait(10)
        inner(4)
        left.append(sys.getprofile())

    made = hook(noting(events))
    thread = threading.Thread(target=work)
    thread.start()
    assert seen.wait(10)
    made.end()
    ended.set()
    thread.join()
    assert left == [None]
    assert own(events) == [("call", "inner", None), ("return", "inner", 3)]


def test_a_profiler_of_somebody_else_is_told_from_ours() -> None:
    def other(frame: FrameType, event: str, arg: Any) -> None:
        pass

    before = sys.getprofile()
    try:
        sys.setprofile(None)
        assert not is_profiled()
        made = hook()
        made.begin()
        ours = sys.getprofile()
        told = is_profiled()
        sys.setprofile(other)
        others = is_profiled()
        set_profile(ours)
        again = sys.getprofile()
        sys.setprofile(None)
        assert (ours is made, told, others, again is made) == (True, False, True, True)
    finally:
        sys.setprofile(before)


BAD: dict[str, tuple[Any, ...]] = {
    "skipped is no set": (None, [], set(), None, ()),
    "leaves are no set": (None, set(), (), None, ()),
    "owners are no tuple": (None, set(), set(), None, [int]),
    "owners are no types": (None, set(), set(), None, (5,)),
    "too few": (None,),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_bad_arguments_in_c(arguments: tuple[Any, ...], kind: str) -> None:
    if kind == "native":
        with pytest.raises(TypeError):
            call_events._native().Hook(*arguments)

"""The guard in C: built where there is a compiler, done without where not, with the reason."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onelaunch.native import compiled
from onelaunch.state.native_guard import NativeGuard, _dicts_report_changes, native_guard


def fresh() -> NativeGuard:
    """Build and load anew."""
    compiled.cache_clear()
    return native_guard.__wrapped__()


def test_it_is_in_use_here() -> None:
    assert native_guard().guard is not None, native_guard().reason
    assert native_guard().reason == "in use"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONELAUNCH_NATIVE", "0")
    assert fresh() == NativeGuard(None, "LookupError: turned off by ONELAUNCH_NATIVE=0")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert (fresh().guard, fresh().reason) == (None, "LookupError: no C compiler")


def test_with_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    found = fresh()
    assert found.guard is None
    assert found.reason.startswith("CalledProcessError: ")
    assert [p.name for p in tmp_path.rglob("*.so")] == []


def test_with_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert fresh().guard is None
    assert "NotADirectoryError" in fresh().reason


def test_with_a_broken_file_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "whole"))
    assert fresh().guard is not None
    (built,) = tmp_path.rglob("onelaunch_guard*")
    broken = tmp_path / "broken" / built.relative_to(tmp_path / "whole")
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "broken"))
    assert fresh().guard is None
    assert fresh().reason.startswith("ImportError: ")


def test_without_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**sysconfig.get_config_vars(), "Py_GIL_DISABLED": 1}
    monkeypatch.setattr(sysconfig, "get_config_var", config.get)
    assert fresh().guard is None


def run(code: str, *words: str, options: tuple[str, ...] = (), **env: str) -> str:
    """What code prints in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    command = [sys.executable, *options, "-c", code, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT = """
import torch, onelaunch as ol
from onelaunch.state.native_guard import native_guard
assert native_guard().guard is None
model = torch.nn.Linear(3, 2)
fast = ol.graph(model, warmup=1)
with torch.no_grad():
    for _ in range(4):
        x = torch.randn(1, 3)
        assert torch.equal(fast(x), model(x))
    assert [r.replays for r in fast.recordings] == [3]
    model.weight.data = torch.ones(2, 3)
    assert torch.equal(fast(x), model(x))
"""


def test_a_recording_works_without_it() -> None:
    run(WITHOUT, ONELAUNCH_NATIVE="0")


NOTHING = ((), (), (), (), [], 0, (), [], 0)
BAD: dict[str, tuple[Any, ...]] = {
    "lengths of readers": ((), (1,), (), (), [], 0, (), [], 0, (), ()),
    "lengths of slots": ((), (), ({},), (), [], 0, (), [], 0, (), ()),
    "lengths of lengths": ((), (), (), (), [], 0, ([],), [], 0, (), ()),
    "more watched than there are": ((), (), (), (), [], 1, (), [], 0, (), ()),
    "a holder of another kind": ((), (), (5,), (5,), [5], 0, (), [], 0, (), ()),
    "a list to watch": ((), (), ([],), (0,), [5], 1, (), [], 0, (), ()),
    "an object to watch": ((), (), (len,), (type,), [5], 1, (), [], 0, (), ()),
    "a list whose length to watch": ((), (), (), (), [], 0, ([],), [0], 1, (), ()),
    "fewer than none watched": ((), (), ({},), (0,), [5], -1, (), [], 0, (), ()),
    "fewer than none watched of the sized": ((), (), (), (), [], 0, ([],), [0], -1, (), ()),
    "a word for an index": ((), (), ([5],), ("a",), [5], 0, (), [], 0, (), ()),
    "no part of a function": ((), (), (fresh,), (3,), [5], 0, (), [], 0, (), ()),
    "an object without a dict": ((), (), (5,), (vars,), [{}], 0, (), [], 0, (), ()),
    "no tensor": ((), (), (), (), [], 0, (), [], 0, (5,), ((),)),
    "no layout": ((), (), (), (), [], 0, (), [], 0, (torch.ones(2),), (5,)),
    "a layout of words": (*NOTHING, (torch.ones(2),), ((Tensor, 1, 6, ("a",), (1,), None),)),
    "more strides than sizes": (*NOTHING, (torch.ones(2),), ((Tensor, 1, 6, (2,), (1, 1), None),)),
    "lengths of layouts": ((), (), (), (), [], 0, (), [], 0, (torch.ones(2),), ()),
    "too few": ((), ()),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_bad_arguments(arguments: tuple[Any, ...]) -> None:
    guard = native_guard().guard
    assert guard is not None
    with pytest.raises((TypeError, ValueError)):
        guard(*arguments)


class Deaf:
    """A guard that no dict tells of a change."""

    def __init__(self, *_: object) -> None:
        pass

    def check(self) -> bool:
        return True


class DeafWhenWarm:
    """One to which changes by code that has run often are no changes."""

    made = 0

    def __init__(self, *arguments: Any) -> None:
        guard: Any = native_guard().guard
        DeafWhenWarm.made += 1
        self.inner, self.deaf = guard(*arguments), DeafWhenWarm.made % 64 > 40

    def check(self) -> object:
        return self.deaf or self.inner.check()


def test_deaf_dicts_are_found_out() -> None:
    assert not _dicts_report_changes(Deaf)
    assert not _dicts_report_changes(DeafWhenWarm)
    assert _dicts_report_changes(native_guard().guard) or sys.version_info >= (3, 13)


SHRINKING = """
import sys, torch
from onelaunch.state.native_guard import native_guard

Guard = native_guard().guard
watched = int(sys.argv[1])


def guards(shrink):
    # Guards during whose check Python runs and shrinks something, each with that something.

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            shrink()
            return str.__eq__(self, other)

    class Sized(dict):
        def __len__(self):
            shrink()
            return 1

    class Object:
        pass

    def reader():
        shrink()

    count, o = 200, Object()
    values, items, lengths = [object()] * count, [object()] * count, [1] * count
    own = [vars(o)] * count
    keys = tuple(map(str, range(count)))
    box, same = dict.fromkeys(keys, values[0]), {Key("0"): values[0]}
    sized, plain = (Sized(a=1),) * count, ({1: 1},) * count
    read, expected = (reader,), (None,)
    yield values, Guard(
        read, expected, (box,) * count, keys, values, watched, (), [], 0, (), ()
    )
    yield items, Guard(
        read, expected, (items,) * count, tuple(range(count)), items[:], 0, (), [], 0, (), ()
    )
    yield values, Guard(
        (), (), (same,) * count, (Key("0"),) * count, values, watched, (), [], 0, (), ()
    )
    yield lengths, Guard(read, expected, (), (), [], 0, plain, lengths, watched, (), ())
    yield lengths, Guard((), (), (), (), [], 0, sized, lengths, watched, (), ())
    yield own, Guard(read, expected, (o,) * count, (vars,) * count, own, 0, (), [], 0, (), ())


target = None


def shrink():
    global kept
    if target is not None:
        kept = target[:1]
        target.clear()


for left, guard in guards(shrink):
    assert guard.check() is True
    before = list(left)
    target = left
    found = guard.check()
    target = None
    assert len(left) == 0 and found is None, found
    left[:] = before
    assert guard.check() is True
print("done")
"""


@pytest.mark.parametrize("watched", [0, 1])
def test_python_that_runs_in_a_check_may_shrink_its_lists(watched: int) -> None:
    assert run(SHRINKING, str(watched), options=("-X", "dev")) == "done\n"


class Named:
    def __init__(self) -> None:
        self.a = 1.5


def test_an_object_that_gets_another_dict() -> None:
    """However its attributes are stored, and whether or not the dict in use is watched."""
    guard: Any = native_guard().guard
    for watched in (0, 1):
        for replace in (
            lambda o: setattr(o, "__dict__", dict(vars(o))),
            lambda o: delattr(o, "__dict__"),
        ):
            objects = [Named() for _ in range(100)]
            dicts = list(map(vars, objects))
            made = [
                guard((), (), (d, o), ("a", vars), [d["a"], d], watched, (d,), [1], watched, (), ())
                for o, d in zip(objects, dicts, strict=True)
            ]
            assert all(m.check() is True for m in made)
            for o in objects[::2]:
                replace(o)
            assert [m.check() for m in made] == [None, True] * 50
            for o, d in zip(objects, dicts, strict=True):
                o.__dict__ = d
            assert all(m.check() is True for m in made)


def test_an_object_of_another_class_keeps_its_dict() -> None:
    guard: Any = native_guard().guard
    other = type("Other", (Named,), {})
    o = Named()
    made = guard((), (), (o,), (vars,), [vars(o)], 0, (), [], 0, (), ())
    for kind in (other, Named) * 3:
        o.__class__ = kind
        assert made.check() is True
    o.__class__, o.__dict__ = other, {}
    assert made.check() is None


def test_an_error_in_a_check_comes_through() -> None:
    guard: Any = native_guard().guard

    class Broken(dict[str, int]):
        def __len__(self) -> int:
            if broken:
                raise LookupError("mine")
            return 0

    broken: list[int] = []
    made = guard((), (), (), (), [], 0, (Broken(),), [0], 0, (), ())
    assert made.check() is True
    broken.append(1)
    with pytest.raises(LookupError, match="mine"):
        made.check()
    lengths: list[Any] = [0]
    made = guard((), (), (), (), [], 0, ([],), lengths, 0, (), ())
    lengths[0] = "no number"
    with pytest.raises(TypeError):
        made.check()


def test_functions_without_defaults() -> None:
    def fn() -> None: ...

    guard: Any = native_guard().guard
    parts = (fn.__code__, fn.__defaults__, fn.__kwdefaults__)
    made = guard((), (), (fn,) * 3, (0, 1, 2), list(parts), 0, (), [], 0, (), ())
    assert made.check() is True
    fn.__defaults__ = (1,)
    assert made.check() is None


@pytest.mark.parametrize("native", ["1", "0"])
def test_objects_at_their_places(monkeypatch: pytest.MonkeyPatch, native: str) -> None:
    """Of a compiled graph's parameters, in C and in Python."""
    from onelaunch.dynamo.region import _holds

    monkeypatch.setenv("ONELAUNCH_NATIVE", native)
    compiled.cache_clear()
    holds: Any = _holds.__wrapped__()
    chance = random.Random(0)
    for count in range(80):
        args = tuple(object() for _ in range(count))
        places = sorted(chance.sample(range(count), chance.randrange(count + 1)))
        given, packed = tuple(args[i] for i in places), array("q", places).tobytes()
        assert holds(args, packed, given)
        if places:
            i = chance.choice(places)
            assert not holds((*args[:i], object(), *args[i + 1 :]), packed, given)


def test_what_is_no_place_is_an_error() -> None:
    holds = compiled("guard").holds
    for bad in ((), ([1], b"", ()), ((1,), b"1", (1,)), ((1,), array("q", [0]).tobytes(), ())):
        with pytest.raises(TypeError, match="places"):
            holds(*bad)
    for place in (-1, 1, 2**40):
        assert holds((1,), array("q", [place]).tobytes(), (1,)) is False

"""Numbers in the arguments of kernels, and what was computed from them."""

from __future__ import annotations

import ctypes
import math
import pickle
import random
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onelaunch.capture.numbers import NumberStandIns, NumbersToFollow
from onelaunch.capture.scalar_trace import unmistakable
from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.scalars import FORMS, CudaScalarPatch, patterns_of
from onelaunch.driver.cuda.scalars import places as places_in
from onelaunch.driver.protocol import AmbiguousMatch
from onelaunch.optimizers.steps import NumberPlace


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What the driver takes for addresses."""
    known: set[int] = set()
    monkeypatch.setattr(nodes, "is_address", lambda word: word in known)
    return known


def places(*arguments: Any) -> list[Any]:
    """Those in a block, of which none is in doubt."""
    found = list(places_in(*arguments))
    assert not any(doubtful for _, doubtful in found)
    return [place for place, _ in found]


def block(content: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(content, len(content))


@pytest.mark.parametrize("value", [0.0123, -3.7e-9, 0.87654321])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [0, 4, 8, 20])
@pytest.mark.parametrize("after", [0, 4, 12])
def test_found_and_written(value: float, form: object, before: int, after: int) -> None:
    assert callable(form)
    inner = form(value)
    made = block(b"\1" * before + inner + b"\2" * after)
    (found,) = places(made, patterns_of([0.5001, value]))
    assert found.number == 1
    found.word.raw = found.form(0.25)
    assert made.raw == b"\1" * before + found.form(0.25) + b"\2" * after
    # Which of two forms of the same bytes is found does not matter where they agree again.
    assert len(found.word) == len(inner)


def test_several_in_one_block() -> None:
    made = block(struct.pack("<ffdQf", 0.011, -0.022, 0.033, 7, 1 / 0.011))
    found = list(places(made, patterns_of([0.011, 0.022, 0.033])))
    assert [place.number for place in found] == [0, 1, 2, 0]
    for place, value in zip(found, (0.5, 0.25, 0.125, 0.5), strict=True):
        place.word.raw = place.form(value)
    assert made.raw == struct.pack("<ffdQf", 0.5, -0.25, 0.125, 7, 2.0)


def test_half_an_address_is_in_doubt(addresses: set[int]) -> None:
    """A number may stand before padding that holds the upper half of some pointer."""
    low = struct.pack("<f", 0.011)
    word = low + b"\x5a\x7f\0\0"
    assert len(places(block(word), patterns_of([0.011]))) == 1
    addresses.add(int.from_bytes(word, "little"))
    ((_, doubtful),) = places_in(block(word), patterns_of([0.011]))
    assert doubtful
    assert len(places(block(low + b"\1\2\3\4"), patterns_of([0.011]))) == 1
    assert len(places(block(b"\0" * 4 + word), patterns_of([0.011]))) == 1


class FakeKernel:
    """A kernel node, and what its setter was called with."""

    name = "somebody's"

    def __init__(self, *blocks: bytes) -> None:
        self.blocks = [block(content) for content in blocks]
        self.set: list[list[bytes]] = []

    def setter(self, executable: int) -> nodes.Setter:
        def apply(*arguments: object) -> tuple[int]:
            assert arguments == (executable,)
            self.set.append([b.raw for b in self.blocks])
            return (0,)

        return nodes.Setter(apply, (executable,), None)


def test_a_patch_sets_the_kernels_that_hold_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = FakeKernel(struct.pack("<Qf", 7, 0.011), struct.pack("<d", 0.022))
    other = FakeKernel(struct.pack("<Qf", 7, 0.5))
    two = FakeKernel(struct.pack("<ff", -0.022, 3.0))
    ours = FakeKernel(struct.pack("<f", 0.011))  # whose arguments a launch sets itself
    ours.name = "onelaunch_copies"
    kernels = {1: one, 2: other, 3: two, 6: ours}
    monkeypatch.setattr(nodes, "handles", lambda graph: [1, 2, 3, 4, 5, 6])
    monkeypatch.setattr(nodes, "kind", lambda node: "MEMCPY" if node == 4 else "KERNEL")
    monkeypatch.setattr(nodes.KernelNode, "read", lambda node: kernels.get(node))
    patch = CudaScalarPatch((10, 11), threading.Lock(), [0.011, 0.033, 0.022])
    assert patch.held == {0, 2}
    patch.write([1.0, 2.0, 4.0])
    patch.write([8.0, 2.0, 16.0])
    assert one.set == [
        [struct.pack("<Qf", 7, 1.0), struct.pack("<d", 4.0)],
        [struct.pack("<Qf", 7, 8.0), struct.pack("<d", 16.0)],
    ]
    assert two.set == [[struct.pack("<ff", -4.0, 3.0)], [struct.pack("<ff", -16.0, 3.0)]]
    assert other.set == ours.set == []


def test_a_doubt_is_cleared_up_by_another_number_at_the_place(
    monkeypatch: pytest.MonkeyPatch, addresses: set[int]
) -> None:
    padding = b"\x5a\x7f\0\0"
    words = {number: struct.pack("<f", number) + padding for number in (0.011, 0.0111)}
    addresses.update(int.from_bytes(word, "little") for word in words.values())

    def patch(number: float, confirmed: frozenset[Any] = frozenset()) -> CudaScalarPatch:
        kernels = {1: FakeKernel(b""), 2: FakeKernel(struct.pack("<Q", 7), words[number])}
        monkeypatch.setattr(nodes, "handles", lambda graph: [1, 2])
        monkeypatch.setattr(nodes, "kind", lambda node: "KERNEL")
        monkeypatch.setattr(nodes.KernelNode, "read", lambda node: kernels[node])
        return CudaScalarPatch((10, 11), threading.Lock(), [number], confirmed)

    with pytest.raises(AmbiguousMatch) as first:
        patch(0.011)
    with pytest.raises(AmbiguousMatch) as second:
        patch(0.0111)
    assert first.value.places == second.value.places == {(1, 1, 0, 0)}
    assert patch(0.011, first.value.places).held == {0}


def test_what_a_number_becomes() -> None:
    for form in FORMS:
        assert form(0.0) is not None
        assert len(form(1e300)) == len(form(0.1))
    reciprocal = FORMS[5]
    assert struct.unpack("<f", reciprocal(0.0)) == (math.inf,)
    assert struct.unpack("<f", reciprocal(-0.0)) == (-math.inf,)


@pytest.mark.parametrize("value", [0.1, 1e-3, 0.9, 0.999, 1e-8, -2e-3, 0.0, 1e-30, 1e30])
def test_numbers_that_stand_in_tell_the_forms_apart(value: float) -> None:
    """A kernel that holds one form is not taken for one that holds another, which later numbers
    would show in the last bit."""
    generator = random.Random(0)
    for _ in range(50):
        number = unmistakable(value, generator)
        assert len({form(number) for form in FORMS}) == len(FORMS)
        for form in FORMS:
            (found,) = places(block(form(number)), patterns_of([number]))
            assert found.form(0.3) == form(0.3)


@pytest.mark.parametrize("value", [1e-300, 1e300, 5e-324])
def test_numbers_beyond_single_precision_have_stand_ins_too(value: float) -> None:
    assert 0 <= unmistakable(value, random.Random(0)) <= value


def numbers(*values: float) -> tuple[NumberStandIns, list[Any]]:
    """Those of a run, with a stand-in for each of these."""
    made = NumberStandIns(NumbersToFollow(), torch.device("cpu"))
    group = {str(i): value for i, value in enumerate(values)}
    return made, [made.in_group(NumberPlace(group, key, None)) for key in group]


def test_terms_follow_their_numbers() -> None:
    made, (lr, decay) = numbers(0.1, 0.01)
    terms = [1 - lr * decay, -lr / 2, 2**decay, lr**2, abs(-decay), +lr, 3.0 - decay]
    expected = [1 - 0.1 * 0.01, -0.05, 2**0.01, 0.1**2, 0.01, 0.1, 2.99]
    assert [t.node.value for t in terms] == expected
    compute = made.trace.compiled([t.node.term for t in terms], ())
    again = compute(0.3, 0.02)
    assert again is not None
    for value in (1 - 0.3 * 0.02, -0.15, 2**0.02, 0.3**2, 0.02, 0.3, 3.0 - 0.02):
        assert value in again
    assert compute(0.1, 0.01) == tuple(expected)
    assert made.trace.compiled([terms[0].node.term], {1})(0.3) == (1 - 0.3 * 0.01,)


@pytest.mark.parametrize("decide", [bool, lambda n: n > 0, lambda n: n != 0, lambda n: n >= 0.05])
def test_a_decision_must_come_out_the_same(decide: object) -> None:
    assert callable(decide)
    made, (number,) = numbers(0.1)
    assert decide(number) is True
    compute = made.trace.compiled([0], ())
    assert compute(0.2) == (0.2,)
    assert compute(0.0) is None


def test_of_many_bounds_the_tightest_counts() -> None:
    made, (number,) = numbers(5.0)
    decided = [number > i for i in range(9)] + [number <= i for i in range(9)]
    assert decided == [i < 5 for i in range(9)] + [i >= 5 for i in range(9)]
    assert not number < float("nan")
    compute = made.trace.compiled([], ())
    served = [n for n in (3.5, 4.0, 4.01, 4.9, 5.0, 5.01, 6.0) if compute(n) is not None]
    assert served == [4.01, 4.9, 5.0]


def test_what_cannot_be_computed() -> None:
    made, (number,) = numbers(0.1)
    1 / number
    assert made.trace.compiled([], ())(0.0) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda n: {0.5: "there"}[n] == "there",
        lambda n: f"{n}" == str(n) == repr(n) == "0.5",
        lambda n: f"{n:.3f}" == "0.500",
        lambda n: (int(n * 2), round(n * 2), math.floor(n * 2)) == (1, 1, 1),
        lambda n: math.sqrt(n * 8) == math.fsum([n * 4]) == 2.0,
        lambda n: divmod(n * 5, 1) == (2.0, 0.5),
        lambda n: type(float(n)) is float,
        lambda n: pickle.loads(pickle.dumps(n)) == n,
        lambda n: n.as_integer_ratio() == (1, 2),
        lambda n: type((n - 0.75) ** 0.5) is complex,
    ],
)
def test_a_number_whose_value_code_has_is_a_constant(use: Callable[[Any], bool]) -> None:
    made, (number,) = numbers(0.5)
    assert use(number)
    made.end()
    del number
    assert len(made.escaped()) == 1


def test_a_number_that_code_keeps_is_a_constant() -> None:
    made, (lr, decay) = numbers(0.1, 0.01)
    kept = [lr * 2]
    del lr, decay
    made.end()
    assert [name[1:] for name in made.escaped()] == [("0", None)]
    kept.clear()

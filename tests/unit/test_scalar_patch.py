"""Numbers in the arguments of kernels, and what was computed from them."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import threading
from typing import Any

import pytest
import torch

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.scalars import FORMS, CudaScalarPatch, patterns_of
from onelaunch.driver.cuda.scalars import places as places_in
from onelaunch.driver.protocol import AmbiguousMatch
from onelaunch.optimizers.traced_float import ScalarTrace, TracedFloat, unmistakable


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
    assert patch.found == {0, 2}
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
    assert patch(0.011, first.value.places).found == {0}


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


def test_terms_follow_their_numbers() -> None:
    book = ScalarTrace()
    lr, decay = book.number(0.1), book.number(0.01)
    terms = [1 - lr * decay, -lr / 2, 2**decay, lr**2, abs(-decay), +lr, 3.0 - decay]
    assert [float(t) for t in terms] == [1 - 0.1 * 0.01, -0.05, 2**0.01, 0.1**2, 0.01, 0.1, 2.99]
    again = book.evaluate([0.3, 0.02])
    assert again is not None
    for expected in (1 - 0.3 * 0.02, -0.15, 2**0.02, 0.3**2, 0.02, 0.3, 3.0 - 0.02):
        assert expected in again
    assert book.evaluate([0.1, 0.01]) == book.values


@pytest.mark.parametrize("decide", [bool, lambda n: n > 0, lambda n: n != 0, lambda n: n >= 0.05])
def test_a_decision_must_come_out_the_same(decide: object) -> None:
    assert callable(decide)
    book = ScalarTrace()
    number = book.number(0.1)
    assert decide(number) is True
    assert book.evaluate([0.2]) == [0.2]
    assert book.evaluate([0.0]) is None


def test_what_cannot_be_computed() -> None:
    book = ScalarTrace()
    1 / book.number(0.1)
    assert book.evaluate([0.0]) is None
    book = ScalarTrace()
    book.number(0.5) ** 0.5
    assert book.evaluate([-1.0]) is None


def test_a_number_is_a_float_to_torch() -> None:
    t = torch.arange(3.0)
    number = ScalarTrace().number(0.25)
    assert isinstance(number, float)
    assert type(number) is TracedFloat
    assert torch.equal(t.add(t, alpha=-number), t * 0.75)
    assert torch.equal(number * t, t / 4)
    assert torch.equal(1 - number**t, 1 - 0.25**t)
    assert torch.equal(number / (t + 1), 0.25 / (t + 1))
    assert hash(number) == hash(0.25)

"""The CUDA driver on a machine without CUDA: what it imports, and its arithmetic."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys

import pytest
import torch

from onelaunch.driver.cuda import CudaDriver, capabilities, nodes
from onelaunch.driver.cuda.memory import Ranges, bytes_of
from onelaunch.driver.cuda.rebind import Span, Word, flipped, moving_words, poison

LEAN = """
import sys
sys.modules["cuda"] = None  # as if cuda-bindings were not installed
import onelaunch.driver.cuda as cuda
import torch
cuda.CudaDriver()
assert not torch.cuda.is_initialized()
assert "torch._dynamo" not in sys.modules
found = cuda.capabilities()
assert not found.memcpy_nodes and not found.rebind and found.why_not, found
"""


def test_import_starts_nothing_and_needs_no_bindings() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_has_a_reason() -> None:
    found = capabilities()
    assert bool(found.why_not) == (not (found.memcpy_nodes and found.rebind))


def test_memcpy_parameters_are_laid_out_as_cuda_does() -> None:
    # CUDA_MEMCPY3D of cuda.h on a 64-bit machine.
    assert ctypes.sizeof(nodes.Memcpy) == 200
    offsets = {name: nodes.Memcpy.__dict__[name].offset for name in ("srcDevice", "dstDevice")}
    assert offsets == {"srcDevice": 48, "dstDevice": 136}
    assert nodes.Memcpy.__dict__["WidthInBytes"].offset == 176


A, B = 0x7F0000001000, 0x7F00AA000000
SPANS = {3: Span(A, A + 256, B)}


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        (struct.pack("<Q", A), struct.pack("<Q", B), [Word(0, 3, 0)]),
        (struct.pack("<IQI", 7, A + 64, 1), struct.pack("<IQI", 7, B + 64, 1), [Word(4, 3, 64)]),
        (
            struct.pack("<QQ", A, A + 256),
            struct.pack("<QQ", B, B + 256),
            [Word(0, 3, 0), Word(8, 3, 256)],
        ),
        (struct.pack("<Q", A + 257), struct.pack("<Q", B + 257), []),
        (struct.pack("<Q", A + 8), struct.pack("<Q", A + 8), [Word(0, 3, None)]),
        (struct.pack("<Q", A + 8), struct.pack("<Q", 12345), []),  # padding
        (struct.pack("<Q", 12345), struct.pack("<Q", B), []),
        (b"\x01" * 7, b"\x01" * 7, []),
        (b"", b"", []),
    ],
)
def test_words_that_move_with_the_input(mine: bytes, other: bytes, words: list[Word]) -> None:
    assert list(moving_words(mine, other, SPANS)) == words


def test_arguments_in_one_buffer() -> None:
    data = ctypes.create_string_buffer(b"0123456789", 10)
    size = ctypes.c_size_t(10)
    extra = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(data), 0)
    assert nodes.packed_arguments(ctypes.addressof(extra)) == b"0123456789"


def test_ranges() -> None:
    ranges = Ranges()
    assert not ranges.overlaps(0, 1 << 60)
    ranges.set([(300, 400), (100, 200)])
    assert [ranges.overlaps(*r) for r in ((0, 100), (200, 300), (400, 500))] == [False] * 3
    assert all(
        ranges.overlaps(*r) for r in ((0, 101), (150, 160), (199, 300), (0, 999), (399, 400))
    )


def test_poison_is_nan_for_floats_and_the_calls_own_values_for_others() -> None:
    x = torch.tensor([1, 5, 9], dtype=torch.int32)
    assert poison(bytes_of(x), x.dtype).view(torch.int32).tolist() == [9, 5, 1]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        y = torch.ones(3, dtype=dtype)
        assert poison(bytes_of(y), dtype).view(dtype).isnan().all()
    odd = torch.arange(7, dtype=torch.uint8)  # a last half element stays where it is
    assert flipped(odd, torch.int32).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert flipped(torch.arange(8, dtype=torch.uint8), torch.int32).tolist() == [
        4,
        5,
        6,
        7,
        0,
        1,
        2,
        3,
    ]


def test_memory_of_tensors() -> None:
    driver = CudaDriver()
    base = torch.arange(24, dtype=torch.float32)
    view = base[4:].view(4, 5).t()[1:3]
    touched = driver.region(view)
    assert (touched.start - base.data_ptr(), touched.stop - base.data_ptr()) == (20, 20 + 17 * 4)
    assert touched.overlaps(driver.region(base))
    empty = driver.region(base[:0])
    assert empty.start == empty.stop
    again = driver.alias(base, torch.float32, view.shape, view.stride(), 20)
    assert torch.equal(again, view)
    assert again.data_ptr() == view.data_ptr()
    assert not again._is_view()
    with pytest.raises(ValueError, match="not a multiple"):
        driver.alias(base, torch.float32, (1,), (1,), 2)


def test_a_pool_of_another_driver_is_refused() -> None:
    class Foreign:
        memory_bytes = 0

    with pytest.raises(TypeError, match="Foreign"):
        CudaDriver().capture(lambda capture: None, Foreign())

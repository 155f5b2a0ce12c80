"""The CUDA driver on a machine without CUDA: what it imports, and its arithmetic."""

from __future__ import annotations

import ctypes
import inspect
import re
import struct
import subprocess
import sys

import pytest
import torch

from onelaunch.driver.cuda import CudaDriver, caches, capabilities, nodes, ragged, rebind, streams
from onelaunch.driver.cuda import bundles as bundle
from onelaunch.driver.cuda.memory import Ranges, bytes_of, region, resized, storage
from onelaunch.driver.cuda.rebind import PortSpan, Word, flipped, moving_words, poison
from onelaunch.driver.substitutes import watching_resizes
from onelaunch.sizes.dims import Varying

LEAN = """
import sys
sys.modules["cuda"] = None  # as if cuda-bindings were not installed
import onelaunch.driver.cuda as cuda
import torch
cuda.CudaDriver()
assert not torch.cuda.is_initialized()
assert "torch._dynamo" not in sys.modules
found = cuda.capabilities()
assert not found.records and not found.rebind and found.why_not, found
"""


def test_import_starts_nothing_and_needs_no_bindings() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_has_a_reason() -> None:
    found = capabilities()
    assert bool(found.why_not) == (not (found.records and found.rebind))


def test_memcpy_parameters_are_laid_out_as_cuda_does() -> None:
    # CUDA_MEMCPY3D of cuda.h on a 64-bit machine.
    assert ctypes.sizeof(nodes.Memcpy) == 200
    offsets = {name: nodes.Memcpy.__dict__[name].offset for name in ("srcDevice", "dstDevice")}
    assert offsets == {"srcDevice": 48, "dstDevice": 136}
    assert nodes.Memcpy.__dict__["WidthInBytes"].offset == 176


def test_a_storage_keeps_its_name_while_its_memory_comes_and_goes() -> None:
    """As FSDP frees a parameter and gathers it again: another storage may have the address then."""
    whole, other = torch.ones(64), torch.ones(64)
    assert storage(whole) == whole.data_ptr() == storage(whole[3:])
    whole.untyped_storage().resize_(0)
    freed = storage(whole)
    assert freed not in (0, storage(other))
    with watching_resizes(resized):
        whole.untyped_storage().resize_(256)
        assert whole.data_ptr()
        assert storage(whole) == storage(whole[3:]) == freed
        assert region(whole[3:]).storage == freed
        assert region(whole[3:]).start == whole.data_ptr() + 12
        assert storage(other) == other.data_ptr()
        whole.untyped_storage().resize_(0)
    assert storage(whole) == freed


A, B = 0x7F0000001000, 0x7F00AA000000
SPANS = {3: PortSpan(A, A + 256, B)}


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


@pytest.mark.parametrize("own", [False, True])
def test_the_order_of_attention_is_settled_before_a_call(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Torch chooses it at the first attention on CUDA, unlike the order that a program sets."""
    before, chosen, set_order = [1, 2, 0, 3, 4], [3, 1, 2, 0, 4], torch._C._set_sdp_priority_order
    assert torch._C._get_sdp_priority_order() == before

    def choose(*args: object) -> None:
        set_order(chosen)
        raise RuntimeError("No viable backend")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(caches, "_settled", [])
    first = [0, 1, 2, 3, 4] if own else before
    try:
        set_order(first)
        caches.settle_attention(torch.device("cpu"))
        assert torch._C._get_sdp_priority_order() == (first if own else chosen)
        set_order(before)
        caches.settle_attention(torch.device("cpu"))
        assert torch._C._get_sdp_priority_order() == before
    finally:
        set_order(before)


def test_the_memory_of_idle_nodes_may_be_written_outside_of_inference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture that ended half way is left by a capture that writes it."""
    make = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda count, **_: make(count, dtype=torch.uint8))
    with torch.inference_mode():
        assert not streams.anything.__wrapped__(0).is_inference()


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


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_the_bits_of_added_rows(default: str) -> None:
    with torch.device(default):
        for dtype, value, bits in (
            (torch.float32, 1.0, 0x3F800000_3F800000),
            (torch.bfloat16, 1, 0x3F80_3F80_3F80_3F80),
            (torch.bool, True, 0x0101010101010101),
            (torch.complex64, 2, 0x00000000_40000000),
            (torch.int64, -1, 2**64 - 1),
        ):
            assert ragged._pattern(Varying((4,), dtype, (0,), (value,))) == bits
        assert ragged._pattern(Varying((4,), torch.float32, (0,), (None,))) == 0


def test_rows_are_one_run_of_bytes_between_dimensions_that_vary() -> None:
    def blocks(*dims: int) -> tuple[int, ...]:
        fill = (None,) * len(dims)
        return ragged._blocks(Varying((2, 3, 5, 7), torch.float32, dims, fill))

    assert blocks(0) == (1, 2, 1, 1, 3 * 5 * 7 * 4)
    assert blocks(3) == (2 * 3 * 5, 7, 1, 1, 4)
    assert blocks(1, 2) == (2, 3, 1, 5, 7 * 4)
    assert blocks(0, 3) == (1, 2, 3 * 5, 7, 4)


def test_parameters_of_nodes_are_changed_in_place() -> None:
    """What the launches of a recording store into, as `cuda.bindings` hands it to the driver."""
    cu = pytest.importorskip("cuda.bindings.driver")
    copy = cu.CUDA_MEMCPY3D()
    copy.srcDevice, copy.dstDevice, copy.WidthInBytes, copy.Height = 0x7F0000001000, 5, 77, 1
    fields = nodes.Memcpy.from_address(copy.getPtr())
    assert (fields.srcDevice, fields.dstDevice) == (0x7F0000001000, 5)
    assert (fields.WidthInBytes, fields.Height, fields.Depth) == (77, 1, 0)
    fields.srcDevice = 0x7F0000002000
    assert int(copy.srcDevice) == 0x7F0000002000

    kernel = cu.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = cu.CUfunction(9)
    for i, name in enumerate(nodes._SHAPE):
        setattr(kernel, name, i + 1)
    array = (ctypes.c_void_p * 2)(1, 2)
    kernel.kernelParams = kernel.extra = ctypes.addressof(array)
    words = (ctypes.c_uint32 * 14).from_address(kernel.getPtr())
    assert list(words[:9]) == [9, 0, 1, 2, 3, 4, 5, 6, 7]
    pointers = (ctypes.c_uint64 * 7).from_address(kernel.getPtr())
    assert list(pointers[5:7]) == [ctypes.addressof(array)] * 2
    assert not cu.CUresult.CUDA_SUCCESS  # a launch asks `if code`
    assert cu.CUresult.CUDA_ERROR_INVALID_VALUE


def test_the_bindings_have_all_that_is_called() -> None:
    cu = pytest.importorskip("cuda.bindings.driver")
    assert nodes.missing() == []
    source = inspect.getsource(nodes)
    called = set(re.findall(r'_call\(\s*"(\w+)"', source))
    called |= set(re.findall(r"\b_?cu(?:\(\))?\.(\w+)", source))
    assert len(called) > 25, called
    assert [name for name in called if not hasattr(cu, name)] == []
    kinds = {kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in cu.CUgraphNodeType}
    assert kinds > rebind._KNOWN


@pytest.mark.parametrize("source", [ragged._SOURCE, bundle._SOURCE], ids=["rows", "copies"])
def test_a_kernel_of_our_own_compiles(source: str) -> None:
    """The compiler needs no GPU."""
    rtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        rtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there, and the compiler is not
        pytest.skip(str(error))
    for architecture in ("sm_80", "sm_90"):
        assert nodes.binary(source, architecture).startswith(b"\x7fELF")
    with pytest.raises(nodes.NodeError, match="nvrtc: NVRTC_ERROR_INVALID_OPTION"):
        nodes.binary(source, "sm_1")


def test_a_launch_points_each_word_of_a_bundle_at_its_tensor() -> None:
    base = torch.zeros(8, dtype=torch.uint8)
    words = [ctypes.c_uint64(), ctypes.c_uint64()]
    seen: list[list[int]] = []

    def set_node(code: int) -> tuple[int]:
        seen.append([word.value for word in words])
        return (code,)

    ends = [(1, 0, words[0]), (0, 3, words[1])]
    bundle.point([(ends, set_node, (0,))], [base[3:], base])
    assert seen == [[base.data_ptr(), base.data_ptr()]]
    with pytest.raises(nodes.NodeError, match="set_node: 1"):
        bundle.point([(ends, set_node, (1,))], [base[3:], base])


def test_the_copies_of_a_bundle_are_laid_out_as_its_kernel_reads_them() -> None:
    made = bundle._Copies
    assert made.source.offset == 0
    assert made.target.offset == 8 * bundle._MOST_TENSORS
    assert made.nbytes.offset == 16 * bundle._MOST_TENSORS
    assert (
        ctypes.sizeof(made) == 20 * bundle._MOST_TENSORS <= 4096
    )  # what a kernel's arguments may take
    (line,) = [line for line in bundle._SOURCE.splitlines() if "struct Copies" in line]
    assert line.count(f"[{bundle._MOST_TENSORS}]") == 3


def test_a_pool_of_another_driver_is_refused() -> None:
    class Foreign:
        memory_bytes = 0

    with pytest.raises(TypeError, match="Foreign"):
        CudaDriver().capture(lambda capture: None, Foreign())

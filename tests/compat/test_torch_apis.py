"""The torch interfaces that onelaunch relies on, public and private, each doing what it relies on.

A new version of torch that changes one of them fails here, by name, before it fails elsewhere.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config as config
from torch import Tensor, nn
from torch._dynamo import eval_frame, mutation_guard
from torch._dynamo.backends.debugging import aot_eager
from torch._guards import TracingContext
from torch._inductor import cudagraph_utils
from torch._inductor.codecache import FxGraphHashDetails
from torch._inductor.codegen import triton as triton_codegen
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.select_algorithm import TritonTemplateKernel
from torch._inductor.utils import GraphPartitionMap, align_inputs_from_check_idxs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CheckpointFrame as CheckpointFrame
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from onelaunch.driver.cuda import generators
from onelaunch.state.walk import MARKS_OF_DYNAMO

C: Any = torch._C


class Backend:
    """Keeps the graphs that Dynamo hands it, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.resets = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A backend for this test alone."""
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# Modes.

SETTINGS: dict[str, tuple[Any, Any, Any]] = {
    "grad": (torch.set_grad_enabled, True, False),
    "deterministic": (torch.use_deterministic_algorithms, False, True),
    "default dtype": (torch.set_default_dtype, torch.float32, torch.float64),
    "matmul precision": (torch.set_float32_matmul_precision, "highest", "medium"),
}


@pytest.mark.parametrize(("change", "usual", "other"), SETTINGS.values(), ids=SETTINGS)
def test_the_global_state_guard_sees(change: Any, usual: Any, other: Any) -> None:
    change(usual)
    guard = C._dynamo.guards.GlobalStateGuard()
    assert guard.check()
    change(other)
    try:
        assert not guard.check()
        assert guard.reason()
    finally:
        change(usual)
    assert guard.check()


def test_autocast_can_be_left_out_for_every_device() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with C._DisableAutocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_the_global_state_guard_sees_autocast() -> None:
    guard = C._dynamo.guards.GlobalStateGuard()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not guard.check()
    assert guard.check()


FLAGS = (
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32"),
    *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
    *("mkldnn_enabled", "cublas_allow_fp16_accumulation", "math_sdp_allow_fp16_bf16_reduction"),
)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_read_in_c(name: str) -> None:
    assert isinstance(getattr(C, f"_get_{name}")(), bool)


def test_stacks_of_modes_are_counted() -> None:
    assert C._len_torch_dispatch_stack() == 0
    with Seen():
        assert C._len_torch_dispatch_stack() == 1
    assert C._len_torch_function_stack() == 0
    with torch.device("cpu"):
        assert C._len_torch_function_stack() == 1
        assert type(C._get_function_stack_at(0)).__name__ == "DeviceContext"
        assert torch.overrides.has_torch_function((torch.ones(()),))
        mode = C._pop_torch_function_stack()
        assert not torch.overrides.has_torch_function((torch.ones(()),))
        C._push_on_torch_function_stack(mode)
        assert C._len_torch_function_stack() == 1
    assert C._functorch.peek_interpreter_stack() is None
    seen: list[object] = []
    torch.vmap(lambda x: seen.append(C._functorch.peek_interpreter_stack()) or x)(torch.ones(2))
    assert seen[0] is not None
    assert C._get_tracing_state() is None
    assert not torch.compiler.is_dynamo_compiling()


# Tensors.


def test_many_tensors_are_copied_in_one_call() -> None:
    whole = torch.arange(6.0).view(3, 2)
    made = [torch.empty(1, 2), torch.empty(2, 2)]
    torch._foreach_copy_(made, list(whole.split([1, 2])))
    assert torch.equal(torch.cat(made), whole)


def test_the_version_of_a_tensor_can_be_raised() -> None:
    x = torch.ones(3)
    view, before = x[1:], x._version
    torch.autograd.graph.increment_version(x)
    assert x._version == before + 1
    assert view._version == before + 1
    w = torch.ones(3, requires_grad=True)
    loss = (w * x).sum()
    torch.autograd.graph.increment_version(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_over_memory_of_ours() -> None:
    base = torch.arange(8, dtype=torch.float32)
    storage = C._construct_storage_from_data_pointer(
        base.data_ptr(), torch.device("cpu"), base.untyped_storage().nbytes()
    )
    alias = torch.empty(0, dtype=torch.float32).set_(storage, 2, (2, 2), (2, 1))
    alias.zero_()
    assert base.tolist() == [0, 1, 0, 0, 0, 0, 6, 7]


def test_conj_and_neg_bits_can_be_set() -> None:
    z = torch.tensor([1 + 2j])
    alias = z.view(1)
    C._set_conj(alias, True)
    assert alias.is_conj()
    assert not z.is_conj()
    assert alias.resolve_conj().item() == 1 - 2j
    x = torch.tensor([3.0])
    alias = x.view(1)
    C._set_neg(alias, True)
    assert alias.resolve_neg().item() == -3
    assert torch._neg_view(x).is_neg()


def test_parameters_are_replaced_by_data_and_by_swap() -> None:
    """Both keep the object, and move or replace what is behind it."""
    p = nn.Parameter(torch.ones(3))
    address = p.data_ptr()
    p.data = torch.zeros(3)
    assert p.data_ptr() != address
    q = nn.Parameter(torch.full((3,), 2.0))
    address = q.data_ptr()
    torch.utils.swap_tensors(p, q)
    assert p.data_ptr() == address


def guards_of(*tensors: Tensor) -> Any:
    return C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )


def test_tensor_guards_compare_layout_and_not_values() -> None:
    x = torch.ones(2, 3)
    guards = guards_of(x)
    assert guards.check(torch.zeros(2, 3))
    for other in (
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(2, 3, device="meta"),
        nn.Parameter(torch.ones(2, 3)),
    ):
        assert not guards.check(other)
    assert not guards_of(torch.ones(2, dtype=torch.complex64)).check(
        torch.ones(2, dtype=torch.complex64).conj()
    )
    assert not guards.check(1)


# Autograd.


def test_what_hooks_hold_of_a_saved_tensor_is_seen_without_running_them() -> None:
    unpacked: list[Tensor] = []

    def unpack(t: Tensor) -> Tensor:
        unpacked.append(t)
        return t

    x = torch.ones(2, requires_grad=True)
    plain = x.exp()
    assert C._autograd._top_saved_tensors_default_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        assert C._autograd._top_saved_tensors_default_hooks(True) is not None
        packed = x.exp()
    raw = packed.grad_fn._raw_saved_result  # type: ignore[union-attr]
    assert raw.unpack_hook is unpack
    assert plain.grad_fn._raw_saved_result.unpack_hook is None  # type: ignore[union-attr]
    assert not unpacked
    packed.sum().backward()
    assert packed.grad_fn._raw_saved_result.unpack_hook is None  # type: ignore[union-attr]


def test_a_checkpoint_saves_random_state_by_names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Tensor] = []
    given: list[Tensor] = []
    really = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: saved.append(really()) or saved[-1])
    monkeypatch.setattr(torch, "set_rng_state", given.append)
    y: Any = checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert not given
    y.sum().backward()
    # The recomputation saves where it is, sets what the forward saved, and goes back.
    assert [t is s for t, s in zip(given, saved, strict=True)] == [True, True]


def test_what_a_checkpoint_will_run_again_is_behind_its_hook() -> None:
    y: Any = checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=False)
    hook = y.grad_fn._raw_saved_result.unpack_hook
    cells = [cell.cell_contents for cell in hook.__closure__]
    assert any(isinstance(value, CheckpointFrame) for value in cells)


def test_a_reentrant_checkpoint_is_known_by_its_node() -> None:
    y: Any = checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert y.grad_fn.name() == "CheckpointFunctionBackward"


def test_a_backward_tells_whether_it_keeps_its_graph() -> None:
    told: list[bool] = []
    keeps = C._autograd._get_current_graph_task_keep_graph

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            told.append(keeps())
            return g

    loss = Asks.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert told == [True, False]


def test_a_saved_tensor_is_read_off_its_node() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    node: Any = y.grad_fn
    assert "_saved_result" in dir(type(node))
    assert torch.equal(node._saved_result, y)
    assert node.next_functions[0][0].variable is x
    y.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        _ = node._saved_result


def test_inference_mode_by_its_guard() -> None:
    with C._InferenceMode(True):
        assert torch.is_inference_mode_enabled()
        with C._InferenceMode(False):
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_the_tensors_over_a_storage_are_counted() -> None:
    t = torch.ones(3)
    storage = t.untyped_storage()._cdata
    alone = C._storage_Use_Count(storage)
    view = t.detach()
    assert C._storage_Use_Count(storage) == alone + 1
    del view
    assert C._storage_Use_Count(storage) == alone


# Operators.


def test_schemas_say_what_is_written() -> None:
    add_ = torch.ops.aten.add_.Tensor
    assert add_._schema.arguments[0].alias_info.is_write
    assert not add_._schema.arguments[1].alias_info
    assert torch.ops.aten.sin.out._schema.arguments[-1].is_out
    assert torch.ops.aten.t.default._schema.returns[0].alias_info is not None
    assert torch.Tag.data_dependent_output in torch.ops.aten._local_scalar_dense.default.tags
    assert torch.Tag.dynamic_output_shape in torch.ops.aten.nonzero.default.tags
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.rand_like.default.tags
    assert torch.Tag.cudagraph_unsafe.name == "cudagraph_unsafe"


def test_the_waits_of_cuda_can_be_given_other_code() -> None:
    """Where there is no GPU, the doctor does that for as long as it runs a callable."""
    cuda, accelerator = torch.cuda, torch.accelerator
    functions = (cuda.synchronize, cuda.current_stream, cuda.default_stream, cuda.set_stream)
    for function in (*functions, accelerator.synchronize, accelerator.current_stream):
        assert function.__code__.co_freevars == ()
        assert function.__code__.co_argcount == 1
    for kind in (cuda.Event, cuda.Stream):
        assert "__new__" in vars(kind)


def test_a_dispatch_mode_sees_views_writes_and_factories() -> None:
    with torch.no_grad(), Seen() as seen:
        x = torch.zeros(4)
        x[1:].add_(1)
        torch.nn.functional.linear(torch.ones(2, 4), torch.ones(3, 4))
    assert seen.names[:3] == ["aten::zeros", "aten::slice", "aten::add_"]
    assert {"aten::t", "aten::mm"} <= set(seen.names) or "aten::linear" in seen.names


def test_a_dispatch_mode_does_not_see_host_memory_read() -> None:
    """Why plain CPU tensors need a function mode as well."""
    x = torch.ones(3)
    with Seen() as seen:
        x.tolist()
    assert seen.names == []


def test_a_symbolic_number_is_handed_on_to_a_dispatch_mode() -> None:
    """By every operation that takes it as a scalar, in a forward and its backward. Whatever else
    needs its value asks the node."""
    asked: list[str] = []
    given: list[Any] = []

    class Node:
        def guard_float(self, file: str, line: int) -> float:
            asked.append("value")
            return 0.25

        def is_float(self) -> bool:
            return True

    class Number(torch.SymFloat):
        def __init__(self, node: Node) -> None:
            self.node = node

        @property
        def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
            return float

    class Places(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.SymFloat)]
            given.extend(v.node for v in numbers)

            def placed(value: Any) -> Any:
                return 0.5 if isinstance(value, torch.SymFloat) else value

            return func(*map(placed, args), **{k: placed(v) for k, v in kwargs.items()})

    node = Node()
    number: Any = Number(node)
    x = torch.ones(2, requires_grad=True)
    with Places():
        y = x * number
        z = torch.add(y.detach(), y.detach(), alpha=number)
        (g,) = torch.autograd.grad(y.sum(), x)
    assert isinstance(number, float)
    assert [y.tolist(), z.tolist(), g.tolist()] == [[0.5, 0.5], [0.75, 0.75], [0.5, 0.5]]
    assert len(given) == 3
    assert all(each is node for each in given)
    assert not asked
    torch.tensor(number)
    torch.dropout(x, number, False)
    assert len(asked) == 2


def test_kernels_can_be_called_below_every_mode() -> None:
    key_set = C.DispatchKeySet(C.DispatchKey.PythonTLSSnapshot)
    with C._ExcludeDispatchKeyGuard(key_set), C._DisableTorchDispatch(), C.DisableTorchFunction():
        assert torch.ops.aten.add.Tensor(torch.ones(2), 1).tolist() == [2, 2]
    with C._AutoDispatchBelowAutograd():
        y = torch.ones(2, requires_grad=True) * 2
    assert not y.requires_grad
    assert C._dispatch_has_kernel_for_dispatch_key("aten::add.Tensor", "CPU")


def test_pytree_knows_model_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    kind = transformers.modeling_outputs.BaseModelOutput
    kind(last_hidden_state=torch.ones(1))
    assert kind in pytree.SUPPORTED_NODES
    flat, spec = pytree.tree_flatten(kind(last_hidden_state=torch.ones(1)))
    assert len(flat) == 1
    assert isinstance(pytree.tree_unflatten(flat, spec), kind)


# CUDA graphs.


@pytest.mark.gpu
def test_a_kept_graph_hands_out_its_handle() -> None:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    x, pool = torch.ones(8, device="cuda"), torch.cuda.graph_pool_handle()
    with torch.cuda.graph(graph, pool=pool):
        y = x * 2
    assert graph.raw_cuda_graph() != 0
    graph.instantiate()
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [8.0] * 8
    assert graph.pool() == pool
    graph.reset()


@pytest.mark.gpu
def test_the_nodes_of_a_graph_can_be_read() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    x = torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 2
        y.copy_(x)
    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()))
    assert int(error) == 0
    assert count >= 2
    del y


@pytest.mark.gpu
def test_a_capture_of_one_thread_lets_the_others_work() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(8, device="cuda")
    results: list[float] = []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        assert torch.cuda.is_current_stream_capturing()
        work = lambda: results.append(torch.ones(8, device="cuda").sum().item())  # noqa: E731
        other = threading.Thread(target=work)
        other.start()
        other.join()
        y = x * 3
    assert results == [8.0]
    graph.replay()
    assert y.sum().item() == 24


def test_a_release_tells_what_a_graph_and_a_generator_keep_of_a_capture() -> None:
    """`driver/cuda` goes by the release: which ends a failed capture, which shares random state."""
    headers = Path(torch.__file__).parent / "include" / "ATen" / "cuda"
    graph, generator = ((headers / f"CUDA{n}.h").read_text() for n in ("Graph", "GeneratorImpl"))
    assert ("allocated_pool_" in graph) == (torch.__version__ >= (2, 14))
    assert ("capture_states_" in generator) == (not generators.SHARED)


@pytest.mark.gpu
def test_a_generator_registered_with_a_graph_advances() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    out = torch.empty(4, device="cuda")
    with torch.cuda.graph(graph):
        out.uniform_(generator=generator)
    generator.manual_seed(3)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(out.clone())
    generator.manual_seed(3)
    for got in results:
        expected = torch.empty(4, device="cuda").uniform_(generator=generator)
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_the_default_generator_takes_another_state_in_a_capture() -> None:
    default, other = torch.cuda.default_generators[0], torch.Generator("cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.register_generator_state(other)
    home = default.graphsafe_get_state()
    with torch.cuda.graph(graph):
        default.graphsafe_set_state(other)
        drawn = torch.rand(4, device="cuda")
        default.graphsafe_set_state(home)
        after = torch.rand(4, device="cuda")
    graph.instantiate()
    default.manual_seed(3)
    other.manual_seed(4)
    graph.replay()
    assert default.get_offset() > 0
    assert other.get_offset() > 0
    other.manual_seed(4)
    assert torch.equal(drawn, torch.rand(4, device="cuda", generator=other))
    default.manual_seed(3)
    assert torch.equal(after, torch.rand(4, device="cuda"))


@pytest.mark.gpu
def test_the_stream_is_read_in_c() -> None:
    assert C._cuda_getCurrentRawStream(0) == torch.cuda.current_stream().cuda_stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert C._cuda_getCurrentRawStream(0) == stream.cuda_stream


@pytest.mark.gpu
def test_a_stream_of_ones_own_is_told_by_its_handle() -> None:
    """Which tells it from torch's: those may be recorded on at any time."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    torch.cuda.synchronize()
    error, made = runtime.cudaStreamCreate()
    assert int(error) == 0
    stream = torch.cuda.ExternalStream(int(made))
    assert stream.cuda_stream == stream.stream_id == int(made)
    for ours in (torch.cuda.Stream(), torch.cuda.default_stream()):
        assert ours.cuda_stream == 0 or ours.stream_id != ours.cuda_stream
    with torch.cuda.stream(stream):
        assert C._cuda_getCurrentRawStream(0) == int(made)
        assert not C._cuda_isCurrentStreamCapturing()


@pytest.mark.gpu
def test_memory_apart_is_seen_and_given_back_alone() -> None:
    """What one thread allocates meanwhile has a pool of its own; `_cuda_emptyCache` inside another
    such pool frees what no such pool uses, and leaves the ordinary cache."""
    torch.cuda.empty_cache()
    cached = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del cached
    pool = torch.cuda.graph_pool_handle()
    C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    t = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    C._cuda_endAllocateToPool(0, pool)
    C._cuda_releasePool(0, pool)

    def held() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == pool)

    assert held() >= t.nbytes
    before = torch.cuda.memory_reserved()
    del t
    other = torch.cuda.graph_pool_handle()
    C._cuda_beginAllocateCurrentThreadToPool(0, other)
    C._cuda_emptyCache()
    C._cuda_endAllocateToPool(0, other)
    C._cuda_releasePool(0, other)
    assert held() == 0
    assert before - (64 << 20) < torch.cuda.memory_reserved() < before


@pytest.mark.gpu
def test_memory_is_allocated_by_inductors_way_in() -> None:
    make = C._dynamo.guards._empty_strided_cuda
    t = make((2, 3), (3, 1), torch.float16)
    assert (t.shape, t.stride(), t.dtype) == ((2, 3), (3, 1), torch.float16)
    assert t.device.index == C._cuda_getDevice() == 0


@pytest.mark.gpu
def test_a_saved_tensor_in_a_capture_is_told_by_its_address() -> None:
    x = torch.ones(8, device="cuda", requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x.exp()
    node: Any = y.grad_fn
    assert node._saved_result.data_ptr() == y.data_ptr()


@pytest.mark.gpu
def test_cublas_workspaces_can_be_cleared() -> None:
    x = torch.ones(64, 64, device="cuda")
    y: Tensor = x @ x
    torch.cuda.synchronize()
    C._cuda_clearCublasWorkspaces()
    assert torch.equal(x @ x, y)


KEPT: list[object] = []  # torch 2.11 takes no reference of its own


def test_a_backward_brings_along_what_its_thread_keeps(device: torch.device) -> None:
    """To the engine's thread for the device, on which `watching_steps` relies."""
    leaf = torch.ones(2, device=device, requires_grad=True)
    seen: list[object] = []

    def hook(_: Tensor) -> None:
        seen.append(C._is_key_in_tls("test") and C._get_obj_in_tls("test"))

    leaf.register_post_accumulate_grad_hook(hook)
    kept: list[int] = []
    KEPT.extend((kept, kept))
    C._stash_obj_in_tls("test", kept)
    leaf.sum().backward()
    assert seen[0] is kept
    other = threading.Thread(target=leaf.sum().backward)
    other.start()
    other.join()
    assert seen[1] is False


# Dynamo and AOTAutograd.


def test_a_compiled_graph_says_what_it_writes_and_lends() -> None:
    """`compilation` reads what AOTAutograd found, and sets what it is to leave alone."""
    config = torch._functorch.config
    assert config.donated_buffer in (True, False)
    assert config.force_non_lazy_backward_lowering is False
    found: list[tuple[list[bool], Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True):
            run = aot_eager(graph, inputs)
        metadata = TracingContext.try_get().fw_metadata
        found.append(([info.mutates_data for info in metadata.input_info], metadata))
        return run

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (x * y).sin()

    torch._dynamo.reset()
    y = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        torch.compile(f, backend=backend)(torch.ones(3), y).sum().backward(retain_graph=True)
    assert sorted(found[0][0]) == [False, True]
    found[0][1].bw_donated_idxs = []
    loss = torch.compile(f, backend=backend)(torch.ones(3), y).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch._dynamo.reset()


def test_dynamo_marks_what_a_module_holds(backend: Backend) -> None:
    """The backend reads these inputs where they are."""
    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    inputs = backend.graphs[0].graph.find_nodes(op="placeholder")
    assert all("example_value" in node.meta for node in inputs)
    kept = [(node.meta.get("tensor_dict") or {}) for node in inputs]
    marks = [tensor.get("_dynamo_static_input_type") for tensor in kept]
    assert sorted(marks, key=str) == [None, "unguarded", "unguarded"]


def test_dynamo_resets_a_backend(backend: Backend) -> None:
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    torch._dynamo.reset()
    assert backend.resets == 1


def test_dynamo_compiles_a_code_anew_where_that_is_asked() -> None:
    """By the backend's code itself, whose parts could not be captured."""
    import torch._dynamo
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator
    found: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(translator.current_tx().output.root_tx.f_code)
        first = len(found) == 1

        def run(*args: Any) -> Any:
            if first:
                torch._dynamo.reset_code(found[0])
            return graph.forward(*args)

        return run

    def f(x: Tensor) -> Tensor:
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend)
    for _ in range(4):
        assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))
    torch._dynamo.reset()
    assert found == [f.__code__] * 2


def test_dynamo_says_what_it_relies_on_of_a_size(backend: Backend) -> None:
    """The backend leaves out the buckets at which this would not be true."""

    def f(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 6 else x + 1

    torch.compile(f, backend=backend, dynamic=True)(torch.ones(5, 4))
    (graph,) = backend.graphs
    inputs = graph.graph.find_nodes(op="placeholder")
    names = {node.target: node.meta["example_value"] for node in inputs}
    symbol = names["L_x_"].shape[0].node.expr
    assert symbol.is_symbol
    assert symbol in [v.node.expr for v in names.values() if isinstance(v, torch.SymInt)]
    env = names["L_x_"].shape[0].node.shape_env
    assert 6 in env.bound_sympy(symbol)
    assert 7 not in env.bound_sympy(symbol)
    (guard,) = [g for g in env.guards if symbol in env.replace(g.expr).free_symbols]
    assert guard.expr.subs(symbol, 6) == True  # noqa: E712  of sympy's
    assert guard.expr.subs(symbol, 7) == False  # noqa: E712


def test_dynamo_can_be_told_to_leave_files_alone() -> None:
    import torch._dynamo.trace_rules as rules

    before = list(rules.SKIP_DIRS)
    rules.SKIP_DIRS.append("/some/folder/state")
    rules.add("onelaunch.frames")
    added = [str(path).rstrip("/") for path in rules.SKIP_DIRS[len(before) :]]
    assert any(path.endswith("frames") for path in added)
    assert rules.check_file("/some/folder/state/walk.py").skipped
    assert rules.check_file("/some/folder/other.py").skipped is False
    del rules.SKIP_DIRS[len(before) :]
    rules._recompile_re()


def test_code_can_be_left_alone_without_an_import_of_dynamo(backend: Backend) -> None:
    """`uncompiled` has the code of modes skipped, with all that it calls, by Dynamo's C part."""

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def skipped(x: Tensor) -> Tensor:
        return inner(x)

    frames = C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(skipped.__code__, frames._FrameExecStrategy(skip, skip))
    torch.compile(skipped, backend=backend)(torch.ones(2))
    assert not backend.graphs
    torch.compile(inner, backend=backend)(torch.ones(2))
    assert backend.graphs


def test_the_engine_takes_gradients_and_checks_their_sizes() -> None:
    """`autograd.engine` calls it without `torch.autograd.grad`, which imports sympy."""
    x = torch.ones(2, 3, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    y = x * 2
    run = torch.autograd.graph._engine_run_backward
    given = torch.full((2, 3), 3.0)
    ends = (y,), (given,), True, False, (x, unused)
    found = run(*ends, True, accumulate_grad=False)
    assert found[0].tolist() == [[6.0] * 3] * 2
    assert found[1] is None
    ends = (y,), (torch.ones(2, 4),), True, False, (x,)
    with pytest.raises(RuntimeError, match="invalid gradient"):
        run(*ends, True, accumulate_grad=False)
    edge = torch.autograd.graph.get_gradient_edge(x)
    run((edge,), (given,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0] * 3] * 2


# The doctor.


def test_a_backward_has_a_number_while_it_runs() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(C._current_graph_task_id()))
    y.sum().backward()
    assert seen[0] >= 0
    assert C._current_graph_task_id() == -1


def test_a_weak_handle_of_a_storage_tells_that_it_was_freed() -> None:
    """The ledger uses what `StorageWeakRef` is made of."""
    storage: Any = torch.zeros(4).untyped_storage()
    handle = storage._weak_ref()
    assert not torch.UntypedStorage._expired(handle)
    del storage
    assert torch.UntypedStorage._expired(handle)
    torch.UntypedStorage._free_weak_ref(handle)


def test_a_weak_reference_reserves_the_address_of_a_storage() -> None:
    kept: list[StorageWeakRef] = []
    for _ in range(100):
        storage = torch.empty(4).untyped_storage()
        assert StorageWeakRef(storage).cdata == storage._cdata
        kept.append(StorageWeakRef(storage))
    del storage
    assert all(reference.expired() for reference in kept)
    assert len({reference.cdata for reference in kept}) == 100


def test_tensors_without_memory_say_so() -> None:
    assert C._has_storage(torch.ones(2))
    assert not C._has_storage(torch.ones(2).to_sparse())
    asked: list[bool] = []
    torch.func.grad(lambda x: (asked.append(C._has_storage(x)), x.sum())[1])(torch.ones(2))
    assert asked == [False]


def test_arithmetic_is_counted_by_shapes() -> None:
    count = flop_registry[torch.ops.aten.mm]
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    assert count(a, b, out_val=a @ b) == 2 * 2 * 3 * 5


def test_a_profiler_says_that_it_is_on() -> None:
    """The flag that each replay reads, and the one that tells of a profiler of this thread."""
    profiler: Any = torch.autograd.profiler
    asked: Any = torch.autograd
    assert not profiler._is_profiler_enabled
    assert not asked._profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiler._is_profiler_enabled
        assert asked._profiler_enabled()
    assert not profiler._is_profiler_enabled
    assert not asked._profiler_enabled()


def test_a_chrome_trace_has_the_categories_of_its_events(tmp_path: Path) -> None:
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    named = torch.profiler.record_function("named")
    with torch.profiler.profile(activities=only_cpu) as profiler, named:
        torch.ones(2).sum()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    whole = {row["name"]: row for row in rows if row.get("ph") == "X"}
    assert whole["named"]["cat"] == "user_annotation"
    assert whole["aten::sum"]["cat"] == "cpu_op"
    assert whole["aten::sum"]["args"]["External id"]
    assert whole["aten::sum"]["dur"] > 0


def test_hooks_of_all_modules_see_a_failure() -> None:
    seen: list[str] = []

    class Fails(nn.Module):
        def forward(self) -> None:
            raise ValueError("no")

    begin = register_module_forward_pre_hook(lambda module, args: seen.append("begin"))
    end = register_module_forward_hook(
        lambda module, args, output: seen.append("end"), always_call=True
    )
    try:
        with pytest.raises(ValueError, match="no"):
            Fails()()
    finally:
        begin.remove()
        end.remove()
    assert seen == ["begin", "end"]


def test_the_precision_of_products_has_one_name_in_both_interfaces() -> None:
    backends: Any = torch.backends
    torch.set_float32_matmul_precision("high")
    assert backends.cuda.matmul.fp32_precision == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert backends.cuda.matmul.fp32_precision != "tf32"
    backends.cudnn.allow_tf32 = False
    assert backends.cudnn.conv.fp32_precision != "tf32"
    backends.cudnn.allow_tf32 = True
    assert backends.cudnn.conv.fp32_precision == "tf32"


def test_the_mark_that_dynamo_leaves_on_modules_is_known() -> None:
    mutation_guard.install_generation_tagging_init()
    marks = {name for name in vars(nn.Module) if name.startswith("___")}
    assert marks
    assert marks <= {*MARKS_OF_DYNAMO}


@pytest.mark.skipif(not hasattr(config, "cudagraph_policy"), reason="the hook is torch 2.12's")
def test_inductor_has_a_hook_for_cuda_graphs() -> None:
    """And shows its code with what a policy reads of it."""
    policy = cudagraph_utils.CUDAGraphPolicy
    assert set(inspect.signature(policy.cudagraphify).parameters) >= {
        *("model", "example_inputs", "static_input_idxs", "is_backward", "kwargs")
    }
    assert list(inspect.signature(policy.should_wrap).parameters) == ["self", "compiled_graph"]
    assert {*CompiledFxGraph.__annotations__} >= {
        *("cudagraph_info", "device_types", "disabled_cudagraphs_reason", "partition_maps"),
        "recursively_apply_fns",
    }
    assert {f.name for f in dataclasses.fields(GraphPartitionMap)} >= {"id", "input_index_mapping"}
    check = list(inspect.signature(align_inputs_from_check_idxs).parameters)
    assert check == ["model", "inputs_to_check", "mutated_input_idxs"]


def test_inductor_filters_the_code_of_all_kernels_that_start_early() -> None:
    """`launch_pdl` is set where `_filter_pdl` has seen the code, and nowhere else."""
    codegen = Path(inspect.getfile(triton_codegen)).parent
    files = {f.name for f in codegen.rglob("*.py") if "launch_pdl" in f.read_text()}
    files -= {"cpp_wrapper_gpu.py"}  # since torch 2.15: the launch in C++ of a kernel reads it
    assert files <= {"triton.py", "triton_combo_kernel.py"}
    kernel = triton_codegen.TritonKernel
    whole = inspect.getsource(triton_codegen)
    makers = whole.count("self.triton_meta_common()"), whole.count('"launch_pdl"')
    assert makers == (1, 1)
    source = inspect.getsource(kernel.codegen_kernel)
    assert source.index("self.triton_meta_common()") < source.index("self._filter_pdl(self.body)")
    combo = (codegen / "triton_combo_kernel.py").read_text()
    assert combo.count("._filter_pdl(sub_kernel.body)") == 1
    assert issubclass(TritonTemplateKernel, kernel)
    assert "TritonTemplateKernel" in inspect.getsource(kernel._enable_pdl_codegen)


def test_a_tag_keeps_what_inductor_caches_apart() -> None:
    before = torch.compiler.config.cache_key_tag
    with torch.compiler.config.patch(cache_key_tag="other"):
        assert FxGraphHashDetails(None, [], {}, []).cache_key_tag == "other"  # pyright: ignore
    assert torch.compiler.config.cache_key_tag == before


def test_dynamo_keeps_backends_to_reset_and_the_values_of_floats(backend: Backend) -> None:
    """The backend comes back there after a reset, and hides floats that a graph does not read."""
    assert isinstance(eval_frame.cached_backends, dict)
    fast = torch.compile(lambda x, t: x * t, backend=backend)
    for i in range(3):
        fast(torch.ones(3), 0.5 + i)
    (node,) = [n for n in backend.graphs[-1].graph.nodes if n.target == "item"]
    value = node.meta["example_value"]
    env = value.node.shape_env
    named = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    assert value.node._expr in getattr(env, named)


def test_cufft_plans_are_freed_by_two_functions() -> None:
    """`driver/cuda/fft_plans.py` wraps both."""
    assert callable(torch._cufft_clear_plan_cache)
    assert callable(torch._cufft_get_plan_cache_size)
    assert callable(torch._cufft_get_plan_cache_max_size)
    cache = torch.backends.cuda.cuFFTPlanCache
    assert callable(vars(cache)["max_size"].setter)
    assert "torch._cufft_clear_plan_cache(" in inspect.getsource(cache.clear)

"""Compiled code as a recording needs it: complete before the capture, without graphs of its own."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.ambient import note_mode
from onelaunch.call.spec import extent_bytes, has_strides
from onelaunch.driver import dependent_launch
from onelaunch.driver.function_modes import torch_asked
from onelaunch.driver.protocol import Driver, Region
from onelaunch.errors import CaptureError
from onelaunch.unwinding import DispatchMode, FunctionMode, dispatch_modes, unnoticed
from onelaunch.watch.compiled_accesses import note_host_inputs

_C: Any = torch._C
Backend = Callable[[Any, Sequence[Any]], Callable[..., Any]]

OWN_MEMORY = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Inductor's options by which no result takes, and waits for, another's memory."""
_MOST_CHARACTERS = 200
"""The most characters of an error's first line."""
_COMPILES = 1 << 16
"""The most times that Dynamo may compile one function. After its default of 8 Dynamo would silently
run it eagerly. Our own options bound the number of recordings."""


def compiled(
    fn: Callable[..., Any], driver: Driver, mode: bool | str, dynamic: bool, parallel: bool = False
) -> Callable[..., Any]:
    """Return `fn` compiled for its device, to be called in warm-ups and captures.

    Args:
        mode: True or ``"default"``, or ``"max-autotune"`` (slow to build).
        dynamic: compile once for all sizes instead of once for each. Inductor treats size 1 apart.
        parallel: let kernels that need not wait for each other have memory of their own.
    """
    chosen = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
    backend = backend_of(driver, chosen, OWN_MEMORY if parallel else {})

    def ahead(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        if driver.capturing():
            raise CompiledInCapture("OL109", "Dynamo compiles the callable again in its capture")
        of_graph, sizes = _tensors_of(graph), _sizes(graph)
        run_graph = compiled_graph(graph, inputs, backend)[0]
        written = _written_inputs()

        def noted(*args: Any) -> Any:
            every = (*of_graph, *args)
            values = (value for i, value in enumerate(args) if i not in sizes)
            note_host_inputs(values, [every[i] for i in written if i < len(every)])
            return run_graph(*args)

        return noted

    run = torch.compile(fn, backend=ahead, dynamic=dynamic)
    config: Any = importlib.import_module("torch._dynamo").config
    settings = {
        "recompile_limit": _COMPILES,
        "accumulated_recompile_limit": _COMPILES,
        "skip_nnmodule_hook_guards": False,  # a hook put on a submodule later is in the code
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        with config.patch(**settings), _unnoticed_modes():
            try:
                return run(*args, **kwargs)
            except Exception as error:
                cause = getattr(error, "inner_exception", None)
                if isinstance(cause, CompiledInCapture):
                    raise cause from None
                raise

    return call


@contextmanager
def _unnoticed_modes() -> Generator[None]:
    """Hide our own modes from Dynamo's guards, which would compile the code again. Function modes
    are off meanwhile. Dispatch modes go on."""
    modes: list[Any] = []
    while (count := _C._len_torch_function_stack()) and isinstance(
        _C._get_function_stack_at(count - 1), FunctionMode
    ):
        modes.append(_C._pop_torch_function_stack())
    ours = all(isinstance(mode, DispatchMode) for mode in dispatch_modes())
    if ours:
        note_mode(False)
    unnoticed.by_dynamo = ours
    try:
        with torch_asked():
            yield
    finally:
        unnoticed.by_dynamo = False
        note_mode(bool(dispatch_modes()))
        for mode in reversed(modes):
            _C._push_on_torch_function_stack(mode)


def _sizes(graph: torch.fx.GraphModule) -> set[int]:
    """Return the indices of a graph's inputs that are sizes of other inputs."""
    inputs = [n.meta.get("example_value") for n in graph.graph.find_nodes(op="placeholder")]
    dims = [d for t in inputs if isinstance(t, Tensor) for d in t.shape]
    known = {d.node.expr for d in dims if isinstance(d, torch.SymInt)}
    symbols = [(i, v) for i, v in enumerate(inputs) if isinstance(v, torch.SymInt)]
    return {i for i, v in symbols if v.node.expr in known}


class CompiledInCapture(CaptureError):
    """A refusal: Dynamo compiled the callable anew in its capture."""


def compiled_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], backend: Backend
) -> tuple[Callable[..., Any], torch.fx.GraphModule]:
    """Compile a graph of Dynamo's, and return the compiled graph and a copy of the original.
    AOTAutograd relies on a common base of overlapping arguments where the graph writes to one.
    Tensors in a capture have no base: such calls run the original graph."""
    shown = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # the backend changes its own
    of_graph = _tensors_of(graph)
    run = backend(graph, inputs)
    written = _written_inputs()
    if not written:
        return run, shown

    def run_or_original(*args: Any) -> Any:
        return shown(*args) if _overlap((*of_graph, *args), written) else run(*args)

    return (shown if _overlap((*of_graph, *inputs), written) else run_or_original), shown


def _tensors_of(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Return the tensors that a graph holds: AOTAutograd's first inputs."""
    named = graph.named_parameters(remove_duplicate=False)
    return [t for _, t in (*named, *graph.named_buffers(remove_duplicate=False))]


def _written_inputs() -> list[int]:
    """Return the indices of the inputs that the graph just compiled writes to."""
    metadata = _metadata()
    infos = [] if metadata is None else metadata.input_info
    return [i for i, info in enumerate(infos) if info.mutates_data or info.mutates_metadata]


def _overlap(args: Sequence[Any], written: Sequence[int]) -> bool:
    """Return whether a written argument shares memory with another argument."""
    tensors = {i: t for i, t in enumerate(args) if isinstance(t, Tensor) and has_strides(t)}
    storages = {i: t.untyped_storage()._cdata for i, t in tensors.items()}
    for i in set(written) & tensors.keys():
        others = [j for j in tensors if j != i and storages[j] == storages[i]]
        if not others:
            continue
        if any(_depends_on_data(tensors[j]) for j in (i, *others)):
            return True
        region = _region(tensors[i])
        if any(region.overlaps(_region(tensors[j])) for j in others):
            return True
    return False


def _depends_on_data(t: Tensor) -> bool:
    """Return whether a fake tensor has a size that depends on data, which nothing may ask for."""
    if not any(isinstance(n, torch.SymInt) for n in (*t.shape, *t.stride(), t.storage_offset())):
        return False
    symbols: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return symbols.has_free_unbacked_symbols(t)


def _region(t: Tensor) -> Region:
    """Return the bytes of a tensor within its storage; a fake tensor has no address."""
    first: Any = t.storage_offset()  # a symbol, where sizes are
    start = first * t.itemsize
    stop = start + extent_bytes(t.shape, t.stride(), t.dtype)
    return Region(t.untyped_storage()._cdata, start, stop)


def backend_of(driver: Driver, mode: str | None, options: Mapping[str, Any]) -> Backend:
    """Return the backend whose code a driver records; Inductor's with these options."""
    return eager_aten if driver.compiler == "aten" else inductor(mode, options)


def inductor(mode: str | None, options: Mapping[str, Any]) -> Backend:
    """Return Inductor as a backend without CUDA graphs of its own."""
    module: Any = importlib.import_module("torch._inductor")
    patches = {**(module.list_mode_options(mode) if mode else {}), **options}
    patches["triton.cudagraphs"] = False

    def compile_graph(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        with _recorded_backward(), dependent_launch.waiting_first(patches):
            compile_fx: Any = importlib.import_module("torch._inductor.compile_fx").compile_fx
            return compile_fx(graph, inputs, config_patches=patches)

    return compile_graph


def eager_aten(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph to torch's own operators by AOTAutograd, in a fraction of Inductor's time."""
    backends: Any = importlib.import_module("torch._dynamo.backends.debugging")
    compiler = backends.aot_autograd(
        fw_compiler=backends.boxed_nop,
        bw_compiler=backends.boxed_nop,
        partition_fn=backends.min_cut_rematerialization_partition,
        decompositions={torch.ops.aten.masked_fill.Tensor: _filled},
        keep_inference_input_mutations=True,
    )
    with _recorded_backward():
        return compiler(graph, inputs)


def _filled(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Do ``x.masked_fill(mask, value)`` on the device, with the same bits and layout. CUDA's kernel
    takes the value on the host."""
    if (value.dtype, value.device) != (target.dtype, target.device):
        return NotImplemented
    return torch.where(mask, value, target).contiguous()


def _metadata() -> Any:
    """Return AOTAutograd's metadata of the graph just compiled, or None."""
    tracing: Any = importlib.import_module("torch._guards").TracingContext.try_get()
    return None if tracing is None else tracing.fw_metadata


@contextmanager
def _recorded_backward() -> Generator[None]:
    """Make AOTAutograd compile code that can be recorded. The backward is compiled with the
    forward: its own first run may be a capture. The backward leaves saved tensors alone, which
    belong to the recording of the forward. AOTAutograd's cache is off, as it keeps no metadata.
    Inductor's cache of kernels stays."""
    config: Any = importlib.import_module("torch._functorch.config")
    settings = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
    with config.patch(**settings, enable_autograd_cache=False), _session():
        yield
    metadata = _metadata()
    if metadata is not None:  # else a backward with `retain_graph` asks for the setting again
        metadata.bw_donated_idxs = []


@contextmanager
def _session() -> Generator[None]:
    """Have torch say that it compiles, as Dynamo does itself in newer releases. In torch 2.11 a
    compiled function raises where another thread compiles: it takes a trace for its own."""
    compiler: Any = torch.compiler
    if hasattr(compiler, "_compile_session_context"):
        yield
        return
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def failed_in_capture(error: Exception) -> CaptureError:
    """Return the refusal of compiled code that fails under capture alone, as AOTAutograd's does for
    arguments that share memory and require grad: their stand-ins are no views of each other."""
    line = str(error).partition("\n")[0]
    kind = type(error).__name__
    what = f"its compiled code failed in the capture, {kind}: {line[:_MOST_CHARACTERS]}"
    refusal = CaptureError("OL109", what)
    refusal.__cause__ = error
    return refusal

"""The ways to run a callable: PyTorch's own, those of other packages, and onelaunch's.

engine.py       the interface of an engine
pytorch.py      eager, `make_graphed_callables`, `torch.compile`
byhand.py       a graph by hand, and the bare replays that are the limits
torchscript.py  TorchScript
aotinductor.py  AOTInductor
flat.py         a callable as a module of tensors, for exporters
onnx.py         ONNX Runtime
tensorrt.py     TensorRT
openxla.py      OpenXLA
tvm.py          TVM
ours.py         `ol.graph` with its options
"""

from __future__ import annotations

from onelaunch.bench.engines.aotinductor import AOTInductor
from onelaunch.bench.engines.byhand import BY_HAND, LIMITS
from onelaunch.bench.engines.engine import Engine
from onelaunch.bench.engines.onnx import ONNX
from onelaunch.bench.engines.openxla import OpenXLA
from onelaunch.bench.engines.ours import AUTOTUNED, OURS
from onelaunch.bench.engines.pytorch import COMPILED, EAGER, MakeGraphedCallables
from onelaunch.bench.engines.tensorrt import TENSORRT
from onelaunch.bench.engines.torchscript import TorchScript
from onelaunch.bench.engines.tvm import TVM

EXPORTED = (
    TorchScript("torchscript", "TorchScript trace, frozen", "trace"),
    TorchScript("torchscript-script", "TorchScript script, frozen", "script"),
    AOTInductor(),
    *ONNX,
    *TENSORRT,
    OpenXLA(),
    TVM(),
)
DEFAULT: tuple[Engine, ...] = (
    *EAGER,
    BY_HAND,
    MakeGraphedCallables(),
    *COMPILED,
    *EXPORTED,
    *OURS,
)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (*DEFAULT, AUTOTUNED, *LIMITS)}
ALONE = frozenset({"openxla", "tensorrt-cudagraphs"})
"""Engines that leave something behind in a process: JAX its threads and GPU memory, TensorRT's CUDA
graphs a mode of all calls."""

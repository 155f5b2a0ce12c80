"""The ways to run a callable: PyTorch's own, those of other packages, and onelaunch's.

engine.py       the interface of an engine
pytorch.py      eager, `make_graphed_callables`, `torch.compile`
byhand.py       a graph by hand, and the bare replays that are the limits
torchscript.py  TorchScript
aotinductor.py  AOTInductor
flat.py         a callable as a module of tensors, for the engines that export it
onnx.py         ONNX Runtime
tensorrt.py     TensorRT
openxla.py      OpenXLA
tvm.py          TVM
ours.py         `ol.graph` with its options
"""

from __future__ import annotations

from onelaunch.tools.bench.engines.aotinductor import AOT_INDUCTOR
from onelaunch.tools.bench.engines.byhand import BY_HAND, LIMITS
from onelaunch.tools.bench.engines.engine import Engine
from onelaunch.tools.bench.engines.onnx import ONNX_RUNTIME
from onelaunch.tools.bench.engines.openxla import OPENXLA
from onelaunch.tools.bench.engines.ours import AUTOTUNED, OURS
from onelaunch.tools.bench.engines.pytorch import COMPILED, EAGER, MakeGraphedCallables
from onelaunch.tools.bench.engines.tensorrt import TENSORRT
from onelaunch.tools.bench.engines.torchscript import TorchScript
from onelaunch.tools.bench.engines.tvm import TVM

EXPORTED = (
    TorchScript("torchscript", "TorchScript trace, frozen", "trace"),
    TorchScript("torchscript-script", "TorchScript script, frozen", "script"),
    AOT_INDUCTOR,
    ONNX_RUNTIME,
    TENSORRT,
    OPENXLA,
    TVM,
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
ALONE = frozenset({"openxla"})
"""Engines that leave something behind in a process: JAX its threads and GPU memory."""

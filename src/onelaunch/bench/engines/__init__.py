"""The ways to run a callable: PyTorch's own, those of other packages, and onelaunch's.

engine.py       the interface of an engine
pytorch.py      eager, `make_graphed_callables`, `torch.compile`
byhand.py       a graph by hand, and the bare replays that are the limits
torchscript.py  TorchScript
aotinductor.py  AOTInductor
onnx.py         ONNX Runtime
ours.py         `ol.graph` with its options
"""

from __future__ import annotations

from onelaunch.bench.engines.aotinductor import AOTInductor
from onelaunch.bench.engines.byhand import BY_HAND, LIMITS
from onelaunch.bench.engines.engine import Engine
from onelaunch.bench.engines.onnx import OnnxRuntime
from onelaunch.bench.engines.ours import AUTOTUNED, OURS
from onelaunch.bench.engines.pytorch import COMPILED, EAGER, Compile, MakeGraphedCallables
from onelaunch.bench.engines.torchscript import TorchScript

EXPORTED = (
    TorchScript("torchscript", "TorchScript trace, frozen", "trace"),
    TorchScript("torchscript-script", "TorchScript script, frozen", "script"),
    AOTInductor(),
    OnnxRuntime(),
    Compile(
        "tensorrt",
        "TensorRT",
        (("backend", "tensorrt"),),
        cuda_only="TensorRT runs on CUDA",
        package="torch_tensorrt",
    ),
    Compile("openxla", "OpenXLA", (("backend", "openxla"),), package="torch_xla"),
    Compile("tvm", "TVM", (("backend", "tvm"),), package="tvm"),
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

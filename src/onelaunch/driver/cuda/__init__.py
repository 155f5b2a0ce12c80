"""CUDA graphs: `torch.cuda.CUDAGraph`, with `cuda.bindings` for the nodes inside.

    driver.py        CudaDriver, what the core talks to
    graph.py         an instantiated recording and its launch, the hot path
    record.py        one stream capture, and the way back from a failed one
    rebind.py        kernels that read an input where the caller has it: finding and proving
    memory.py        pools and the bytes of tensors
    order.py         streams, and launches that share memory
    nodes.py         graph nodes: the only module that names cuda.bindings
    capabilities.py  what this machine supports

Importing this package starts neither CUDA nor needs cuda.bindings.
"""

from onelaunch.driver.cuda.capabilities import Capabilities, capabilities
from onelaunch.driver.cuda.driver import CudaDriver

__all__ = ["Capabilities", "CudaDriver", "capabilities"]

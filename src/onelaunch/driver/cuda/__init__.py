"""CUDA graphs: `torch.cuda.CUDAGraph`, with `cuda.bindings` for the nodes inside.

    driver.py        CudaDriver, the interface to the packages above
    graph.py         an instantiated recording and its launch, the hot path: copies in, draws
    capture.py       one stream capture, and the way back from a failed one
    memory.py        pools, and the bytes of tensors
    streams.py       streams, and the order of launches that share memory
    nodes.py         graph nodes: the only module that names cuda.bindings
    kernels.py       kernels of our own, compiled at first use
    bundles.py       small inputs and results that share a node
    ragged.py        rows added and left off by a node
    lanes.py         operations in several streams, and what each touches
    branches.py      the edges of a graph, by what its operations touch
    workspaces.py    parts of cuBLAS's workspace for each product
    memcpy.py        the parameters of a copy, as the driver lays them out
    trial.py         launches before the first real one, which leave memory as it was
    triton_launches.py  kernels that Inductor's code launches
    rebind.py        kernels that reach inputs and outputs where the caller has them; their proof
    scalars.py       numbers in the arguments of recorded kernels
    generators.py    the default generator, left to others by a capture that draws nothing
    rewind.py       random state that a callable saves and sets
    caches.py        workspaces and weights around a capture, and the order of attention
    device_waits.py  waits of other threads for the device, put off during a capture
    fft_plans.py     cuFFT's plans, which kernels read and torch may free
    capabilities.py  the abilities of this machine

Importing this package starts neither CUDA nor needs cuda.bindings.
"""

from onelaunch.driver.cuda.capabilities import Capabilities, capabilities
from onelaunch.driver.cuda.driver import CudaDriver

__all__ = ["Capabilities", "CudaDriver", "capabilities"]

"""A GPU for tests on any machine: the emulated device ``torch.device("tape")``.

    onelaunch.testing.install()
    x = torch.ones(3, device="tape")

A program meets there on a CPU what a GPU would do to it: a capture refuses what the host reads,
devices do not mix, and memory that is freed holds garbage. Its driver, the tape, also records plain
CPU tensors, for which nothing is installed.

driver.py        the driver, and `install`
recorder.py      the mode that records operations, each to be repeated
collectives.py   collectives in a capture, which send nothing
repeats.py       how an operator is run in a capture, and repeated
random_state.py  the state of the generators in a capture
graph.py         one recording: its launch, its pool, its numbers
ports.py         the copies in and out of a launch
lanes.py         operations in another order, as their memory allows
rewind.py        random state that a callable saves and sets
memory.py        the memory of a recording of plain CPU tensors
tensors.py       the tensors of the emulated device, and the memory of its recordings
arena.py         its memory: reused as CUDA's is, and poisoned when free
device.py        its registration with torch, and with `torch.compile`
torch_module.py  `torch.tape`, as `torch.cuda` is
kernels.py       the operators of GPUs that the CPU lacks
engine.py        hooks that raise in autograd's thread for it
"""

from onelaunch.testing.arena import memory_allocated, memory_reserved, set_memory_limit
from onelaunch.testing.driver import install

__all__ = ["install", "memory_allocated", "memory_reserved", "set_memory_limit"]

"""A GPU for tests on any machine: the emulated device ``torch.device("tape")``.

    onelaunch.testing.install()
    x = torch.ones(3, device="tape")

A program meets there on a CPU what a GPU would do to it: a capture refuses what the host reads,
devices do not mix, and memory that is freed holds garbage.

driver.py        the driver, and `install`
device.py        the device and its tensors
memory.py        the memory of a recording, and the pool of recordings
torch_module.py  `torch.tape`, as `torch.cuda` is
arena.py         its memory: reused as CUDA's is, and poisoned when free
storage.py       from one of its tensors to its memory, and back
dynamo.py        its tensors in `torch.compile`
engine.py        hooks that raise in autograd's thread for it
attention.py     memory-efficient attention, and the place of its seeds
"""

from onelaunch.testing.arena import memory_allocated, memory_reserved, set_memory_limit
from onelaunch.testing.driver import install

__all__ = ["install", "memory_allocated", "memory_reserved", "set_memory_limit"]

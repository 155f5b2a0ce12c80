"""The device `tape`: a program that works here meets on a CPU what a GPU would do to it.

device.py        the device and its tensors
torch_module.py  `torch.tape`, as `torch.cuda` is
arena.py         its memory: reused as CUDA's is, and poisoned when free
storage.py       from one of its tensors to its memory, and back
engine.py        hooks that raise in autograd's thread for it
attention.py     memory-efficient attention, and where its seeds are
active.py        the capture that runs in a thread
"""

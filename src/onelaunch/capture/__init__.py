"""The capture of a call: one watched run becomes one CapturedCall.

session.py      CaptureSession: attempts at one capture until one succeeds
run.py          CaptureRun: one run under capture, its inputs and its effects
compilation.py  code of torch.compile as a recording needs it
callee.py       the callable, and the roots of the state that it reaches
rolled_back.py  runs of which everything is put back
io_plan.py      how the tensors of a call reach a recording, and its results the caller
forward.py      the autograd side of a capture: proxy leaves in, a node out
effects.py      the state that each replay writes, gradients among it
checks.py       refusals, before and after the run, of effects that no replay could repeat
hooks.py        hooks inside the callable, whose Python no replay repeats
distributed.py  modules that span several processes: the parts that a recording can hold
survivors.py    tensors of a run that something still holds afterwards
result.py       the CapturedCall made from the findings of a run
counts.py       integers that the callable moves on, followed from call to call
counted_places.py  counts in ``torch.tensor([count])`` and ``x[:, count] = y``
numbers.py      stand-ins in a capture for the numbers that the caller varies
followed.py     the proof that a recording follows these, and their reading at each call
recording.py    CapturedCall, all that a call path needs; Recording, the figures for users
"""

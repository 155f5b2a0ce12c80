"""The capture of a call: one watched run becomes one CapturedCall.

session.py      CaptureSession: attempts at one capture until one succeeds
run.py          CaptureJob, how a call is to be captured; CaptureRun, one run of it
outcome.py      what a run returned and changed, and how each replay does the same
compilation.py  code of torch.compile as a recording needs it
callee.py       the callable, and the roots of the state that it reaches
rolled_back.py  runs whose effects are undone
io_plan.py      how the tensors of a call reach a recording, and its results the caller
forward.py      the autograd side of a capture: proxy leaves in, a node out
effects.py      the state that each replay writes, gradients among it
checks.py       refusals, before and after the run, of effects that no replay could repeat
hooks.py        hooks inside the callable, whose Python no replay repeats
distributed.py  modules that span several processes: the parts that a recording can hold
survivors.py    tensors of a run that something still holds afterwards
result.py       the CapturedCall made from the findings of a run
counted_places.py  numbers that the callable moves on, as tensors of the device
numbers.py      the numbers that each call of a recording reads: arguments, state, learning rates
number.py       the stand-in for such a number in a run
scalar_trace.py  what a run computes from such numbers
followed.py     the proof that a recording follows these, and their reading at each call
recording.py    CapturedCall, all that a call path needs; Recording, the figures for users

A run under capture ends early by a `Retry`, for another attempt at once in session.py; by a
`CannotPadInside`, for one that pads outside; or by a `CaptureSignal` or a `CaptureError`. A signal
goes to runtime/graphed.py, and a later call is captured otherwise: `NeedsGrad` with a backward,
`Unfollowed` with numbers as constants; `BackwardInside` has it run eagerly.
"""

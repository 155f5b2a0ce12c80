"""One run under watch becomes one CapturedCall.

session.py      CaptureSession: attempts at one capture until one is good
callee.py       the callable, and where the state that it reaches begins
dry_run.py      runs of a callable that are rolled back
io_plan.py      how the tensors of a call reach a recording, and its results the caller
forward.py      the autograd side of a capture: proxy leaves in, a node out
effects.py      what the callable reads, writes and rebinds, for the guard and for each replay
checks.py       what no replay could repeat, refused after the run
hooks.py        hooks inside the callable, whose Python no replay repeats
distributed.py  modules of several processes: what a recording can hold of them
result.py       CaptureRun: what a run found, and how a CapturedCall is made of it
recording.py    CapturedCall, all that a call path needs; Recording, the same for users
"""

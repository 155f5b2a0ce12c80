"""The doctor: what stops a callable from being one launch, named by line, on any machine.

diagnose.py   `diagnose`: its means in turn, each finding once
diagnosis.py  the result, and several as one
shown.py      the result as a document
spot.py       a place in source, and the finding of a rule there; files as they are shown
place.py      the user's line of an event, the way there, and the library's line below
run.py        one eager run, watched: every operation, every call of torch that a rule asks for
blocks.py     what of that run blocks a capture: by the table that captures refuse by
waits.py      where the host waits for the device, on CUDA
silent.py     what of two such runs a bare graph gets wrong in silence
ran.py        the Python functions that ran, and the lines that changed a place
replay.py     a bare replay against eager, on inputs that change
slow/         what of that run is slow in inference
capture.py    a real capture, which confirms or refutes that, and finds what only it can
pieces.py     what ``on_refusal="split"`` makes of a callable that is blocked
emulated.py   what stands for a GPU where there is none: an emulated device, streams and events
source/       the lint of files that nobody runs; comments that silence findings

The rules themselves, with their documentation, are in `onelaunch.tools.rules`.
"""

"""The doctor: what stops a callable from being one launch, named by line, on any machine.

diagnose.py   `diagnose`: its means in turn, each finding once
diagnosis.py  the result, and several as one
sarif.py      findings as SARIF, in which code hosts take them
paths.py      files as they are shown, and whose they are
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
source/       rules on the source, nothing run; comments and settings that silence findings

The rules themselves, with their documentation, are in `onelaunch.rules`.
"""

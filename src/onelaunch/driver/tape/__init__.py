"""The tape: a recording of torch's operations, repeated in order without CUDA.

driver.py     TapeDriver
recorder.py   the mode that records operations
graph.py      one recording: its launch, its pool, its numbers
calls.py      one recorded operation, and what becomes of its results
ports.py      what a launch copies in and out
handoff.py    results and inputs that need no copy on plain CPU tensors
memory.py     where the tensors of a recording live
saved_rng.py  random state that a callable saves and sets
"""

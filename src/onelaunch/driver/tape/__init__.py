"""The tape: a recording of torch's operations, repeated in order without CUDA.

driver.py     TapeDriver
recorder.py   the mode that records operations
graph.py      one recording: its launch, its pool, its numbers
calls.py      one recorded operation
ports.py      the copies in and out of a launch
memory.py     the memory of a recording
rewind.py     random state that a callable saves and sets
"""

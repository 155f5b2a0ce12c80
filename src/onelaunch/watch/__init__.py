"""Modes that watch the operations of a run, one by one.

operations.py   Watching: a mode that gets operations as they are recorded
admission.py    Admission: which operations and host values a recording can hold
observer.py     Observer: the reads and writes of memory, operation by operation
ledger.py       Ledger: the operations of a run, compared with another run's
difference.py   the first difference between two runs, and its message
masked_fill.py  fills by a number of the device, without the host
lifted.py       host values that each call brings to the device alike, kept there
compiled_accesses.py  the reads and writes of a watched run, for code compiled since
host_memory.py  host tensors in a run: the sources of their values, and their readers
"""

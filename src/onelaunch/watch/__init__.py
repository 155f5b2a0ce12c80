"""Modes that watch the operations of a run, one by one.

operations.py   Watching: a mode that gets operations as they are recorded; OpCall: one of them
admission.py    Admission: which operations and host values a recording can hold
observer.py     Observer: what each operation reads and writes, and what is refused
device_memory.py  DeviceMemory: the memory that a run reads, writes and makes
host_memory.py  HostTensors: the sources of host values in a run, and their readers
ledger.py       Ledger: the operations of a run, compared with another run's
origins.py      Origins: the arguments, slots and operations that a run's memory comes from
contents_before.py  ContentsBefore: the contents of the state before a run
ledger_mode.py  the mode of a run whose operations are only noted
difference.py   the first difference between two runs, and its message
other_sizes.py  the comparison with a run at other sizes, which stands for a warm-up
device_constants.py  host values that each call brings to the device alike, copied there once
compiled_accesses.py  the reads and writes of a watched run, for a capture of compiled code
"""

"""The world behind the arguments: what a callable reaches, and whether it is as it was.

walk.py         StateWalk: what a callable reaches
contents.py     the places that one object holds, as far as they were touched
slots.py        Slot: one place that holds what a callable reads
snapshot.py     what it reaches before and after its runs, and the way back to what it was
guard.py        StateGuard: the check before each replay
native/         the same check in C
host_values.py  what the host reads of host tensors: values that a call must match
"""

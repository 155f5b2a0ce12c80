"""The state behind the arguments: finding it, restoring it, and checking that it is unchanged.

walk.py         the search for the state that a callable reaches
walked.py       StateWalk: what a walk found
contents.py     the slots of one object, as far as they were touched
attributes.py   the attributes of modules, of which most need no slots
outside.py      the slots of arrays in host memory, and of TorchScript modules
hooks.py        the hooks that a backward runs, of tensors and of nodes
slots.py        Slot: a place that holds a value the callable reads
iterators.py    iterators that a call advances
parts.py        the tensors in a container that is replaced
replaced.py     state that the caller replaces between calls, which becomes inputs
rollback.py     RunRollback: the slots and containers that a run may change, to put them back
snapshot.py     StateSnapshot: the state before a capture, to compare with and to restore
dependencies.py the slots that a recording relies on
guard.py        StateGuard: the check before each replay
expected.py     expectations of tensors and containers, as data
counterparts.py the objects of a new request in place of an earlier one's
native_guard.py the check of `guard.py`, in C
host_values.py  values of host tensors that the host reads, which a call must match
"""

"""Dynamic taint analysis: the elements of a run that depend on padding.

mode.py          TaintMode: follows taint through the operations of a run
rules/           the rule of each operation, from the taint of its inputs to its results'
shadow.py        shadow memory: a byte of taint for each element of a storage
hidden.py        numbers that hide padding in place of minus infinity, and their checks
displacement.py  elements whose place changes with the size
bounds.py        indices out of bounds, found before a device asserts
trace.py         Trace: the operations of a run, to compare with a run at another size
align.py         the operations of both runs side by side; the operation that a refusal names
"""

"""Dynamic taint analysis: which elements depend on the padding.

mode.py          TaintMode: the padding followed through the operations of a run
rules/           what each operation does to it
shadow.py        a byte for each element of a storage
operands.py      what is known of the inputs of one operation
displacement.py  elements that move with the size
bounds.py        places out of bounds, found before a device asserts
trace.py         the operations of a run, to be compared with those at another size
align.py         its operations beside those of a run at the real size
attribution.py   which operation a refusal names
"""

"""The operations of a run, seen one by one.

operations.py   a mode that sees operations as they are recorded
observer.py     Observer: what the callable does to memory, operation by operation
ledger.py       Ledger: the operations of a run, held against those of another
compiled.py     what a watched run read and wrote, for code compiled since
host_memory.py  the host's tensors in a run: where their values come from, and who reads them
"""

"""One call as data: its arguments as a tree, its signature, and the modes around it.

tree.py     arguments and results as trees
spec.py     CallSpec: the signature of a call
ambient.py  the modes in force, and whether a call may replay where it happens
dtensor.py  DTensors: where the memory of this process is
"""

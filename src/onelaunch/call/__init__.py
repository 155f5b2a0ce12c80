"""One call as data: its arguments as a tree, its signature, and the modes around it.

tree.py     arguments and results as trees; how constants are compared
identity.py  containers and objects in results: which are arguments, and which come twice
containers.py  the keys and children of a container or an object
registered.py  `ol.register`: classes that are taken apart from the first call on
spec.py     CallSpec: the signature of a call
kinds.py    the classes of objects that are taken apart, or kept whole
numbers.py  the numbers among the arguments of a call
ambient.py  torch's modes around a call, and the check that a call may replay under them
wrappers.py  tensors that stand for other tensors: DTensors, quantised weights, transforms
"""

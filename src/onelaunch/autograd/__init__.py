"""The autograd side of a recording: its forward is one node, its backward a second graph.

pair.py        AutogradPair: a captured forward as one node of autograd
node.py        InFlightForward: that node for one call, from its forward until its backward
backward.py    a captured backward, and the graph that it runs over
engine.py      backwards from given gradients
capture.py     the capture of a backward
overwritten.py writes of a backward to saved tensors of its forward
first_backward.py  the run of a backward before its capture: its operations, and reads by Python
proxies.py     ProxyLeaves: leaves in place of the callable's tensors, where a captured graph ends
graph_walk.py  walks over autograd graphs: saved tensors, freed graphs, views, refused nodes
components.py  results whose graphs have no node in common: a node for each
accumulate.py  gradients that a backward adds to `.grad` directly
named_leaves.py  `torch.autograd.grad` and ``backward(inputs=...)`` of such leaves, and late hooks
order.py       leaves with hooks in the order in which eager's backward reaches them
chain.py       callables that run one after another, in shared memory; spare streams
"""

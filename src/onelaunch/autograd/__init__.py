"""The autograd side of a recording: its forward is one node, its backward a second graph.

pair.py        AutogradPair: a captured forward as one node of autograd
node.py        InFlightForward: that node for one call, from its forward until its backward
backward.py    a captured backward
rehearsal.py   the same backward before, by operations: what Python in it reads, and does
proxies.py     ProxyLeaves: leaves in place of the callable's tensors, where a captured graph ends
graph_walk.py  walks over autograd graphs: saved tensors, freed graphs, views, refused nodes
components.py  results whose graphs have no node in common: a node for each
accumulate.py  gradients that a backward adds to `.grad` directly
chain.py       callables that run one after another, in shared memory; spare streams
"""

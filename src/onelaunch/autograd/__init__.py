"""The autograd side of a recording: its forward is one node, its backward a second graph.

pair.py        AutogradPair: a captured forward as one node of autograd
node.py        that node for one call, from its forward until its backward
backward.py    a captured backward
proxies.py     leaves in place of the callable's tensors, where a captured graph ends
components.py  results with graphs of their own: a node for each
accumulate.py  gradients that a backward adds to `.grad` itself
chain.py       callables that run one after another, in common memory; spare streams
freed.py       results whose graph the callable has freed itself
"""

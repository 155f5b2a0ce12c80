"""``torch.compile(f, backend="onelaunch")``: each graph that Dynamo finds, as one launch.

Torch loads it by its entry point (``torch_dynamo_backends``), where nothing else of onelaunch is
imported.

backend.py   the backend, and its `reset` for `torch._dynamo.reset`
policy.py    cudagraph_policy: the same recordings under `mode="reduce-overhead"`
function.py  SplitFunction: a function that `ol.graph` cannot capture whole, by the same graphs
settings.py  `mode` and `options` of `torch.compile`
split.py     parts that cannot be captured
numbers.py   numbers that change from call to call, computed beside a graph
nodes.py     what Dynamo keeps with its nodes: examples, and the user's lines
region.py    one compiled graph, and its recordings
sizes.py     the inputs of a graph that follow bucketed sizes
"""

from onelaunch.dynamo.backend import onelaunch
from onelaunch.dynamo.policy import cudagraph_policy

__all__ = ["cudagraph_policy", "onelaunch"]

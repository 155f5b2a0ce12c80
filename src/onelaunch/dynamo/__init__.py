"""``torch.compile(f, backend="onelaunch")``: each graph that Dynamo finds, as one launch.

Torch loads it by its entry point (``torch_dynamo_backends``), where nothing else of onelaunch is
imported.

backend.py   the backend, and what `torch._dynamo.reset` calls
settings.py  `mode` and `options` of `torch.compile`
split.py     parts that cannot be captured
lines.py     the user's lines behind a graph
region.py    one compiled graph, and its recordings
"""

from onelaunch.dynamo.backend import onelaunch

__all__ = ["onelaunch"]

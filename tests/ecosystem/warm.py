"""What most programs import, imported once: processes that are forked from there have it."""

import importlib
import importlib.util
import os

os.environ["OMP_NUM_THREADS"] = "1"
for name in ("torch._dynamo", "onelaunch.testing", "transformers.modeling_utils"):
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)

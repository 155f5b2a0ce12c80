"""Models to try onelaunch on: `onelaunch compare examples/digits.py:model`.

Each factory builds one workload on the GPU if there is one, and returns a callable with its
arguments. All models are in eval mode and, except in `digits`, randomly initialised.
"""

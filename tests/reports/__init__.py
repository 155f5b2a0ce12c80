"""Programs after public reports of people's troubles with CUDA graphs.

The docstring of each holds the report's address and the trouble in a sentence; the code is our own.
"""

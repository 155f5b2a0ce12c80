"""The function that runs at each call, written for each recording.

call_path.py  its three parts put together
checks.py     whether the recording fits the call
launch.py     the launch, and how results and writes reach the caller
source.py     the lines of the function, and the objects that they name
"""

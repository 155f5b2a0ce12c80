"""The function that runs at each call, written for each recording.

call_path.py  its parts in the order in which they run; the guard of the state is among them
checks.py     whether the recording fits the arguments of the call
launch.py     the launch, and how results and writes reach the caller
generated.py  the lines of the function, and the objects that they name
"""

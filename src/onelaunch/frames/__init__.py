"""The Python frames that run in a warm-up: what their code loads, of which object.

watch.py    FrameWatch: each frame that runs, and its loads looked up on their objects
loads.py    what the code of a function loads
stack.py    symbols for the values on a function's stack
members.py  functions behind decorators, and the names in their code
reads.py    Reads: what was seen to be read, of which object
peek.py     what objects hold, without running anybody's code
origins.py  whose code a function is, and which is not read
"""

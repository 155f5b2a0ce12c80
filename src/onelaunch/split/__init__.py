"""A module that cannot be captured whole: it runs as it is, and its children are graphed.

graphed.py  SplitGraphed: a module's forward, whole where it can be, else in pieces
pieces.py   the graphed children, in the places of their forwards while the module runs
message.py  what was split, by which line, and what a call costs
forward.py  the callable that a recording of a module runs
"""

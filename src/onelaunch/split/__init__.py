"""A module that cannot be captured whole: it runs as it is, and its children are graphed.

in_pieces.py  InPieces: a callable that runs in pieces where it cannot be captured; its warning
graphed.py    SplitGraphed: a module's forward, whose pieces are its children
forward.py    the callable that a recording of a module runs
"""

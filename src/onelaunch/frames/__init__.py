"""The Python frames that run in a warm-up: the attributes, items and variables that they load.

watch.py    FrameWatch: each frame that runs
unwatched_code.py  code that no watched run has executed
frame.py    RanFrame: the loads of a function that has run, noted of its objects
values.py   the values that the symbols of such a function had
named.py    what global names lead to, and what the classes of arguments hold, looked up once
codes.py    facts about code: the stores of each run, the names; functions behind decorators
callees.py  callees that are not read, and their possible reads of their arguments
loads.py    a reader of bytecode: the loads and stores of a function
operands.py the operand stack that the reader follows
stack.py    symbols for the values on a function's stack
reads.py    Reads: the reads seen in a callable's runs, by object
peek.py     attributes and items of objects, without running user code
origins.py  the origin of code: the user's, a package's, or machinery that is not read
"""

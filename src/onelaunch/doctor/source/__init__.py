"""Rules on the source: nothing is run, and torch is not imported.

scan.py           `scan`: files and folders, and the functions that ran in a diagnosis
reader.py         a file is read as it would run: statements
expressions.py    expressions
calls.py          calls, followed into the functions of the file
results.py        what functions and methods of libraries give
torch_names.py    which of torch's do, by name
objects.py        numbers that change: attributes, globals, variables of loops
program.py        one file: its imports, functions, classes and annotations
scope.py          the state of reading, and the form of rules
values.py         what is known of a value
blocking.py       the rules of what blocks a capture
silent.py         the rules of what a bare graph gets wrong in silence
ran.py            the lines that run in a diagnosis
comments.py       ``# onelaunch: allow NAME -- reason``
configuration.py  ``[tool.onelaunch.doctor]`` in pyproject.toml

A rule speaks of what it is sure of: a value is a tensor if an annotation, a function of torch or a
use that only tensors know says so, and what is not known is never at fault.
"""

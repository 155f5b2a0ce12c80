"""The lint: faults in files that nobody runs, by names and patterns; torch is not imported.

scan.py           `scan`: files and folders
lint.py           the rules, in one function after another
names.py          the names of a file: imports, functions, what is graphed
comments.py       ``# onelaunch: allow NAME -- reason``
"""

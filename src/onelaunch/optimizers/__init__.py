"""Optimizer steps inside a capture, and the numbers that each replay reads anew.

capturable.py    which optimizers can be captured; `ol.capturable`
steps.py         the steps of a capture
scalars.py       PatchedScalars: numbers that each call writes into the recording
traced_float.py  floats that remember what is computed from them
trials.py        which numbers a recording can take, tried on parameters of a few elements
"""

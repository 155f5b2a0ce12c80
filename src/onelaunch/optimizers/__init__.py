"""Optimizer steps inside a capture, and the numbers that each replay reads anew.

capturable.py    `ol.capturable`, and refusals of optimizers that cannot be captured
steps.py         the steps of a capture; refusals of schedules and counters in it
scalars.py       PatchedScalars: numbers that each call writes into the recording
traced_float.py  TracedFloat: a float that notes what is computed from it
trials.py        trials on small parameters: the numbers that a recording can follow
"""

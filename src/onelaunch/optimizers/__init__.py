"""Optimizer steps inside a capture.

capturable.py    `ol.capturable`, and refusals of optimizers that cannot be captured
steps.py         the steps of a capture; refusals of schedules and counters in it
"""

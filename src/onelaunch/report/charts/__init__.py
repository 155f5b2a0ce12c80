"""The charts of a report, as specifications for Vega-Lite.

chart.py      a chart, and what all have alike
walls.py      the wall time of each engine, with its host and GPU parts
errors.py     error against speed
timelines.py  one call of some engines, on one time axis
memory.py     the memory of each recording
steps.py      the steps of a plan, as a waterfall
ratios.py     two comparisons: the ratio of each engine's times
"""

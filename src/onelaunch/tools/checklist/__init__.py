"""The inference checklist, applied to a callable: each step tried, checked, measured, and kept only
if it is right and pays.

plan.py       the result as data: what was tried, what is kept
shown.py      the result as a document
optimize.py   `optimize`: the search, and its result against the original
search.py     the search: each step in order, again, taken out, and in pairs
clock.py      the time that it may take
turns.py      times of two callables, taken in turns
check.py      the check against float64, or bit for bit
apply.py      a saved plan on a callable
build.py      a callable made of a workload by a list of steps
subject.py    the copy that steps change, and the callable that comes out
step.py       one step
steps.py      all of them, in their orders; those to Inductor's kernels and to one launch
modes.py      the steps on modes, layout and settings
norms.py      the steps on norms and the layers before them
branches.py   the step on sums of convolutions
parallel.py   the step on layers of one input
channels.py   the step on channel counts
precision.py  the steps to 16 and 8 bits
layers.py     layers that may be rewritten
"""

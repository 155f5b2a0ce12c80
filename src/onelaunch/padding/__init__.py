"""Calls of any size at a few captured sizes, and the proof that padding changes nothing.

bucketed.py     Graphed with buckets: which recording serves a size, calls above the largest
strategy.py     a call recorded at the size of its bucket
pad.py          tensors to the size of a bucket and back
padded_call.py  a call around a recording that does not pad and cut inside
chunks.py       a call above the largest size, in chunks of it
proof.py        whether padding changes a result, and how results are cut back
compare.py      whether results at two sizes agree, and how their shapes follow
samples.py      what is compared: the caller's rows, and random numbers
backprop.py     a callable with its backward, to compare gradients
taint/          which elements depend on the padding, followed through the operations of a run
"""

"""Which of warm-up, capture, replay and eager a call gets, and the memory that this takes.

graphed.py    Graphed: a callable whose calls replay once they can
attempt.py    a call on its way to a recording: where its signature stands, how it is recorded
table.py      its recordings, and what users ask of them
signature.py  what of a call decides whether and what it can replay
changing.py   arguments that are others at each call, so that no signature comes again
warmup.py     the runs before a capture, and what they show
pool.py       `ol.Pool`, and the manager of its memory and budget
stats.py      what recordings cost and did, as data
ungraphed.py  why the gradients of a signature are not graphed
options.py    the options of `ol.graph`, checked
"""

"""Calls of any size at a few captured sizes, and the proof that padding changes nothing.

bucketed.py     Graphed with buckets: the recording for a size, calls above the largest
background.py   the same, captured while calls run eagerly, or at larger buckets
strategy.py     a call recorded at the size of its bucket
pad.py          arguments padded to the size of a bucket, results cut back
attention.py    attention by kernels whose masks hide padding whatever the scores are
padded_call.py  a call around a recording: padded and cut outside, or checked where values hide
chunks.py       a call above the largest size, in chunks of that size, and the proof for it
joined_calls.py several calls as one, for a batcher
named_rows.py   arguments that name rows, in a proof and in each call
dry_run.py      rolled-back runs at any size, for the proof
proof.py        the proof that padding changes no result, and the cuts of results
compare.py      the comparison of runs at two sizes: layout, shapes that follow it, gradients
samples.py      arguments for a proof: the caller's rows, and random numbers
taint/          taint analysis: the elements that depend on padding
"""

"""Sizes that vary from call to call, as data.

buckets.py   `ol.Buckets`
ragged.py    `ol.Ragged`
fit.py       the bucket sizes that waste the least
batching.py  the batch that is cheapest by the times of the sizes
dims.py      dimensions whose size varies
"""

"""Where a call's time goes, what bounds it, and the most that each remedy can gain.

measure.py    `ol.profile`: times, a trace, counts and peaks
profile.py    the result, as data and JSON
shown.py      the result as a document
breakdown.py  the parts of a call's time, and its heaviest kernels, from a trace
counting.py   the arithmetic and the bytes of each operator
peaks.py      the machine's bandwidth and matrix products per second, measured
roofline.py   the time that arithmetic and bytes take at these peaks
remedies.py   what each remedy can gain at most
"""

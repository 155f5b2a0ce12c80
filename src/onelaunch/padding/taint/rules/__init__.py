"""Propagation rules: the taint of an operation's results, from the taint of its inputs.

table.py        the table of rules, by operation
call.py         TaintedCall: one operation, as rules get it
elementwise.py  operations that keep each element by itself
reduction.py    operations along dimensions: sums, the largest, softmax, norms
products.py     sums of products, and solutions for each matrix
windows.py      convolution, pooling, resampling
places.py       elements that change places, or are picked by index
rows.py         values that name rows: where they put elements
layers.py       attention and other layers that are one operation
"""

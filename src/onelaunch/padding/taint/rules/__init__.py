"""What each operation does to the taint of its inputs.

table.py        the rule of each operation
call.py         TaintedCall: one operation, as a rule sees it
elementwise.py  operations that keep each element by itself
reduction.py    along dimensions: sums, the largest, softmax, norms
products.py     sums of products, and what is solved for each matrix
windows.py      convolution, pooling, resampling
places.py       elements that change places, or are picked by numbers
layers.py       attention and other layers that are one operation
"""

"""The rules on slow inference, OL601 to OL614, which read a watched run.

listener.py   writes down what a run shows, and asks the rules
record.py     what a run showed, as plain data
products.py   matrix products and convolutions: their shapes, arithmetic and traffic
modules.py    the module that runs, its path and its mode
calls.py      norms and dropouts, as they were called
flow.py       what memory holds between two writes, without keeping it
trace.py      what that comes from: layers, sums of them, copies
machine.py    the machine by which work is judged
modes.py      the rules on train mode and grad mode
settings.py   the rules on float32, TF32, cuDNN's benchmark and the layout
norms.py      the rules on norms and the layers before them
layers.py     the rules on branches, channel counts, thin layers and many tiny kernels
separable.py  the rule on depthwise-separable convolutions, which measures them

They see one call. Where a gradient is wanted, all of them are silent: a backward in the callable,
or results that require grad with a module in train mode or an argument that requires grad.
"""

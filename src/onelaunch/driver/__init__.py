"""A device that records and replays, and calls that torch does not dispatch to one.

protocol.py         Driver, Graph, DevicePool: a device's duties, and nothing of how
select.py           the driver of a call: `cuda/`, or `onelaunch.testing`, which needs no GPU
cuda/               CUDA graphs: launches, copies in, random numbers, streams, memory
aten.py             operations and the memory that they write, read off the schema
dispatch.py         torch's kernels, past autograd, autocast and modes
schedule.py         the lanes of a recording, for its users to see
edges.py            the true order of a recording's operations, by the memory that they touch; lanes
overlaps.py         tensors that share memory
dependent_launch.py kernels of Inductor's that start while the one before ends
refusals.py         operations that a capture refuses
function_modes.py   function modes that torch does not notice, and that are on in backwards
known_causes.py     functions of libraries that are refused, and the ways to do without
host_reads.py       reads by the host that torch does not dispatch
host_factories.py   tensors of Python numbers, made on the host and then copied to the device
capture_query.py    the answer to code that asks whether it is being captured
seeding.py          seeding in a capture, watched; the generators of Python and NumPy
host_generator.py   the host's default generator in a capture: seeds, states that are set, draws
substitutes.py      functions of random state, storages and events, replaced during a capture
attention_seeds.py  seeds handed to a backward: on the host in eager, on the device in a capture
distance.py         the distance between the results of two runs
rows.py             rows added and left off by torch's operations
"""

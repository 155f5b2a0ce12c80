"""The rules of what Python decides in each call, and a graph once: in its capture."""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule, of_function, of_module

_STEP = """\
import torch


class Step:
    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.optimizer = torch.optim.SGD([self.weight], {lr})

    def __call__(self, x):
        self.optimizer.zero_grad()
        loss = (x * self.weight).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"]{moved}
        return loss.detach()


model = Step()
args = (torch.ones(4, 8),)
"""

FROZEN: tuple[Rule, ...] = (
    Rule(
        code="OL500",
        name="replay-differs",
        severity="silently-wrong",
        title="a bare replay gives something else than eager",
        what="A graph recorded by hand was replayed beside eager calls, on the same inputs several "
        "times and on others, and a result, an argument or an attribute came out another. No "
        "other rule says why.",
        why="A replay runs kernels and no Python: what Python decides anew in each call stays as "
        "it was in the capture. `ol.graph` compares two runs, operation by operation, and refuses "
        "a callable whose runs differ (OL117).",
        problems="The line is that of the first operation that got another number in a second "
        "call; where no operation did, it is the line where the callable begins. A callable that "
        "does not repeat its own results is not judged.",
        same_as=("OL117", "OL501", "OL502", "OL503", "OL504", "OL507", "OL510"),
        fix="pass what changes as an argument, `fast(x, torch.tensor(value))`; or keep it in a "
        "tensor that is changed in place",
        example=of_module(
            ["self.scales = itertools.cycle([1.0, 0.5, 0.25])"],
            ["return x * next(self.scales)"],
            imports="import itertools",
        ),
        instead=of_module(
            ['self.register_buffer("scales", torch.tensor([1.0, 0.5, 0.25]))'],
            ["self.scales.copy_(self.scales.roll(-1))", "return x * self.scales[0]"],
        ),
    ),
    Rule(
        code="OL501",
        name="python-counter",
        severity="silently-wrong",
        title="a number or a list that each call changes in Python",
        what="An attribute, an item or the length of a container is another after a call, and "
        "another again after the next.",
        why="A replay runs no Python: the number stays as the capture left it, nothing is "
        "appended, and kernels repeat what they were given. `ol.graph` follows a number that the "
        "callable moves on, or records each value, up to eight; what it cannot follow it refuses "
        "(OL117, OL118), and a list that only grows it does not fill.",
        problems="The line is found by its code: of two lines that store the same attribute in "
        "one function, the first is named. Iterators and objects with state in C are not seen.",
        same_as=("OL117", "OL118"),
        fix='keep it in a tensor that is changed in place: `self.register_buffer("n", '
        "torch.zeros((), dtype=torch.long))` for `self.n = 0`; and where a branch asks for it, "
        "choose on the device: `torch.where(self.n % 2 == 0, a, b)`",
        example=of_module(["self.calls = 0"], ["self.calls += 1", "return x / self.calls"]),
        instead=of_module(
            ['self.register_buffer("calls", torch.zeros(()))'],
            ["self.calls.add_(1)", "return x / self.calls"],
        ),
    ),
    Rule(
        code="OL502",
        name="host-random",
        severity="silently-wrong",
        title="a random number drawn on the host",
        what="Python's or NumPy's generator draws a number in the call; for a model on a GPU, so "
        "does torch's generator of the CPU.",
        why="The host draws once, in the capture, and each replay repeats that number. torch's "
        "generator of the device goes on from replay to replay. `ol.graph` refuses a call that "
        "moves Python's or NumPy's generator (OL117), and host values that are random (OL103).",
        problems="A number that decides nothing, such as the name of a temporary file, is found "
        "too. NumPy's draws are seen between two operations; the line is searched there.",
        same_as=("OL117", "OL103", "OL104"),
        fix="draw on the device: `torch.rand((), device=x.device)`",
        example=of_function("return x * random.random()", imports="import random"),
        instead=of_function("return x * torch.rand((), device=x.device)"),
    ),
    Rule(
        code="OL503",
        name="clock",
        severity="silently-wrong",
        title="the time is read",
        what="A line of the user's own reads a clock of `time` or `datetime`.",
        why="A replay reads no clock: it repeats the time of the capture, and a duration taken "
        "inside is that of the capture too. `ol.graph` refuses two runs that differ (OL117); a "
        "time that only Python sees is not taken again.",
        problems="A clock in a library is not reported, as logging reads one. A clock whose value "
        "decides nothing is found too.",
        same_as=("OL117",),
        fix="read it before the call, and pass it as a tensor: `fast(x, torch.tensor(now, "
        "dtype=torch.float64))`",
        example=of_function("return x * (time.perf_counter() % 1)", imports="import time"),
        instead="""\
import time

import torch


def model(x, now):
    return x * (now % 1)


now = torch.tensor(time.perf_counter(), dtype=torch.float64)
args = (torch.ones(4, 8), now)
""",
    ),
    Rule(
        code="OL504",
        name="changing-global",
        severity="silently-wrong",
        title="a global that changes",
        what="A global variable that the callable's code names is another after each call.",
        why="A replay repeats the value that the capture read, whatever the global holds later. "
        "`ol.graph` compares the globals that it saw read before each call, follows a number that "
        "changes, or records each value, up to eight, and then refuses (OL118).",
        problems="A global that other code changes between calls is not seen.",
        same_as=("OL117", "OL118"),
        fix="make it a tensor, `value = torch.tensor(1.0)`, and change it in place, "
        "`value.mul_(0.9)`; or pass it as an argument",
        example=of_function(
            "global temperature",
            "temperature *= 0.9",
            "return torch.softmax(x / temperature, -1)",
            x="torch.arange(8.0)",
            before="temperature = 1.0",
        ),
        instead=of_function(
            "temperature.mul_(0.9)",
            "return torch.softmax(x / temperature, -1)",
            x="torch.arange(8.0)",
            before="temperature = torch.ones(())",
        ),
    ),
    Rule(
        code="OL508",
        name="float-option",
        severity="silently-wrong",
        title="an optimizer's number that moves is a Python float",
        what="An optimizer steps in the call with a float, such as `lr`, that changes from call to "
        "call, or that a scheduler was set up to move.",
        why="The float is a constant of the recorded kernels: the schedule goes on and the steps "
        "keep the rate of the capture. `ol.graph` reads such numbers at each call and writes them "
        "into the recording; it refuses a schedule that steps inside (OL122).",
        problems="A schedule written by hand outside of the call is not seen.",
        same_as=("OL122", "OL123"),
        fix="make it a tensor, `SGD(parameters, lr=torch.tensor(0.1), fused=True)`, and change it "
        "in place: `lr.mul_(0.9)`",
        example=_STEP.format(lr="lr=0.1", moved=" *= 0.9"),
        instead=_STEP.format(lr="lr=torch.tensor(0.1), fused=True", moved=".mul_(0.9)"),
    ),
    Rule(
        code="OL509",
        name="grad-flip",
        severity="silently-wrong",
        title="`requires_grad` changes in each call",
        what="A call leaves a tensor of its state with another `requires_grad` than it found, and "
        "so does the next.",
        why="The flag is Python's: no replay sets it, and the kernels of the backward are those of "
        "the flag in the capture. A flag that is put back within the call does no harm. `ol.graph` "
        "has the flag in what a call must match, and a recording for each.",
        same_as=("OL117",),
        fix="leave the flag as it is, and take `tensor.detach()` where no gradient is wanted",
        example="""\
import torch


class Model:
    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(8))

    def __call__(self, x):
        self.weight.requires_grad_(not self.weight.requires_grad)
        return (x * self.weight).sum()


model = Model()
args = (torch.ones(4, 8),)
""",
        instead="""\
import torch


class Model:
    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(8))

    def __call__(self, x):
        return (x * self.weight.detach()).sum()


model = Model()
args = (torch.ones(4, 8),)
""",
    ),
    Rule(
        code="OL511",
        name="unregistered-generator",
        severity="silently-wrong",
        title="a `torch.Generator` of one's own",
        what="An operation draws from a `torch.Generator` that is not the default one.",
        why="A graph moves the generators on that it knows, and by hand that is the default one. "
        "CUDA refuses to capture a draw from another before "
        "`CUDAGraph.register_generator_state`; where the capture itself draws, replays begin "
        "further on in the stream of numbers than eager does. `ol.graph` registers the "
        "generators that the callable reaches.",
        same_as=("OL104",),
        fix="draw from the default generator: `torch.manual_seed(0)` for `generator = "
        "torch.Generator(device)`, and no `generator=`; or "
        "`cuda_graph.register_generator_state(generator)`",
        example="""\
import torch

args = (torch.ones(4, 8),)
generator = torch.Generator(args[0].device)


def model(x):
    return x + torch.randn(8, generator=generator, device=x.device)
""",
        instead="""\
import torch

args = (torch.ones(4, 8),)
torch.manual_seed(0)


def model(x):
    return x + torch.randn(8, device=x.device)
""",
    ),
    Rule(
        code="OL513",
        name="host-print",
        severity="silently-wrong",
        title="text is printed",
        what="A line of the user's own calls `print`, of no tensor.",
        why="A replay prints nothing: what looks like a log of each call is one of its captures. "
        "`ol.graph` repeats no print either; a print of a tensor is refused (OL101).",
        problems="Prints in a library, and logging, are not reported.",
        same_as=("OL101",),
        fix="print after the call: `y = fast(x); print(y)`",
        example=of_function('print("called")', "return x * 2"),
        instead=of_function("return x * 2"),
    ),
)

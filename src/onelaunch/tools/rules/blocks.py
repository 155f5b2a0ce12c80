"""The rules of what blocks a capture: each has the code of a `CaptureError`, or of a warning.

Titles, reasons and fixes are the catalogue's. Codes without an example are of a capture's options,
of several processes, or of memory that runs out: no call by itself shows them.
"""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule, of_error, of_function, of_module
from onelaunch.tools.rules.training import TRAINING

_CHECKPOINT = """\
import torch
from torch.utils.checkpoint import checkpoint

layer = torch.nn.Linear(3, 3)


def model(x):
    return checkpoint(layer, x, use_reentrant={reentrant})


args = (torch.ones(2, 3, requires_grad=True),)
"""
_CLAMPED = """\
class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)"""

BLOCKS: tuple[Rule, ...] = (
    of_error(
        "OL101",
        "finds every read of a device tensor by Python: `.item()`, `bool()`, `int()`, `float()`, "
        "`.tolist()`, `.numpy()`, printing and formatting, `if` and `while` on a tensor's value, "
        "checks such as `torch.equal`, and operations that read a value inside, as "
        "`torch.linalg.inv` does for its error code",
        of_function("if x.sum() > 0:", "    return x / 2", "return x"),
        of_function("return torch.where(x.sum() > 0, x / 2, x)"),
        problems="A read that only some inputs come by is found with such inputs alone. In files "
        "that are only read, a value is a tensor where an annotation or a function of torch says "
        "so in the same function.",
    ),
    of_error(
        "OL102",
        "finds operations whose result is as large as the data says: an index by a mask, "
        "`nonzero`, `unique`, `masked_select`, `bincount`, `repeat_interleave` without a size, "
        "a sparse tensor made of a dense one",
        of_function("return x[x > 0].sum()", x="torch.randn(8)"),
        of_function("return torch.where(x > 0, x, 0).sum()", x="torch.randn(8)"),
    ),
    of_error(
        "OL103",
        "finds copies between the host and the device: `.cpu()`, `.to()` of a tensor that a call "
        "brings on the host, a result that is moved to the host inside",
        of_function("return (x * 2).cpu()"),
        of_function("return x * 2"),
        problems="values that are the same at each call are no fault (`torch.tensor([1.0], "
        "device=x.device)`, a table of the host): `ol.graph` keeps a copy on the device. A bare "
        "graph cannot capture these either",
    ),
    of_error(
        "OL104",
        "finds tensors of the host in a computation on the device whose value each call may change",
        of_function("return x * torch.rand(())", x='torch.ones(4, device="cuda")'),
        of_function("return x * torch.rand((), device=x.device)", x='torch.ones(4, device="cuda")'),
        problems="only seen where the callable runs on a device: on a CPU all tensors are the "
        "host's",
    ),
    of_error(
        "OL105",
        "finds tensors of a call that stay in a list, a closure or a plain object afterwards",
        of_function("y = x * 2", "seen.append(y)", "return y", before="seen = []"),
        of_function("return x * 2  # append it after the call"),
    ),
    of_error(
        "OL106",
        "finds generators that are seeded, or whose state is set, in the call",
        of_function("torch.manual_seed(0)", "return x + torch.rand_like(x)"),
        of_function(
            "return x + torch.rand_like(x)", before="torch.manual_seed(0)  # before the call"
        ),
    ),
    of_error(
        "OL107",
        "finds tensors from outside that get other sizes or strides in place",
        of_function("x.t_()", "return x * 2", x="torch.ones(4, 3)"),
        of_function("return x.t() * 2", x="torch.ones(4, 3)"),
    ),
    of_error(
        "OL108",
        "finds results of a class that cannot be made again from the tensors in them",
        of_function("return iter(x * 2)", x="torch.ones(4, 3)"),
        of_function("return x * 2", x="torch.ones(4, 3)"),
    ),
    of_error(
        "OL109",
        "finds what a device refuses under capture: waits (`torch.cuda.synchronize`, a stream's or "
        "an event's), queries of events, operators that PyTorch tags as unsafe in graphs, tensors "
        "of sparse and nested layouts",
        of_function(
            "y = x * 2", "torch.cuda.synchronize()", "return y", x='torch.ones(4, device="cuda")'
        ),
        of_function("return x * 2", x='torch.ones(4, device="cuda")'),
        problems="where there is no GPU, `torch.Event` and `torch.Stream` raise; those of "
        "`torch.cuda`, and its waits, do nothing there and are found. An operator that is made of "
        "others (`CompositeImplicitAutograd`) is judged by these, not by its own tags",
    ),
    of_error("OL110", "finds state that the first call makes and that stays"),
    of_error("OL111", "finds captures that do not fit into memory"),
    of_error(
        "OL112",
        "finds hooks on tensors of a forward, and backward hooks of its submodules",
        of_module(
            ["self.layer = nn.Linear(3, 3)"],
            [
                "y = self.layer(x)",
                "y.register_hook(lambda grad: grad.clamp(-1, 1))",
                "return y.sum()",
            ],
            x="torch.ones(2, 3)",
        ),
        of_module(
            ["self.layer = nn.Linear(3, 3)"],
            ["return Clamped.apply(self.layer(x)).sum()"],
            x="torch.ones(2, 3)",
            before=_CLAMPED,
        ),
    ),
    of_error(
        "OL113",
        "finds tensors from outside that require grad and are changed in place",
    ),
    of_error(
        "OL114",
        "finds parameters that no attribute, closure or global of the callable leads to",
        """
import functools

import torch

weight = torch.nn.Parameter(torch.ones(3))
model = functools.partial(torch.mul, weight)
args = (torch.ones(2, 3),)
""",
        of_function(
            "return weight * x",
            x="torch.ones(2, 3)",
            before="weight = torch.nn.Parameter(torch.ones(3))",
        ),
    ),
    of_error(
        "OL115",
        "finds arguments that a backward inside gives a gradient",
        of_function(
            "(x * x).sum().backward()", "return x.grad", x="torch.ones(2, requires_grad=True)"
        ),
        of_function(
            "x = x.detach().requires_grad_()",
            "(x * x).sum().backward()",
            "return x.grad",
            x="torch.ones(2, requires_grad=True)",
        ),
    ),
    of_error(
        "OL116",
        "finds a backward that runs inside another one, as in a reentrant checkpoint",
        _CHECKPOINT.format(reentrant=True),
        _CHECKPOINT.format(reentrant=False),
    ),
    of_error(
        "OL117",
        "finds callables of which two runs of one call differ: by Python's or NumPy's random "
        "numbers, a clock, an iterator, a cache that grows",
        of_function("return x * random.random()", imports="import random"),
        of_function("return x * torch.rand((), device=x.device)"),
    ),
    of_error(
        "OL118",
        "finds numbers that the callable reads and moves on at each call; one that is only "
        "counted, or that only tensors take, is followed and no fault",
        of_module(
            ["self.step = 0"],
            ["self.step += 1", "return x.neg() if self.step % 2 == 0 else x * 2"],
            x="torch.ones(8)",
        ),
        of_module(
            ['self.register_buffer("step", torch.zeros((), dtype=torch.long))'],
            ["self.step += 1", "return torch.where(self.step % 2 == 0, x.neg(), x * 2)"],
            x="torch.ones(8)",
        ),
    ),
    of_error("OL119", "finds calls that leave grad mode or a mode like it changed"),
    *TRAINING,
    of_error(
        "OL130",
        "finds wrappers that synchronise gradients between processes by hooks",
    ),
    of_error("OL140", "finds results that padding to a bucket would change"),
    of_error("OL302", "finds arguments that cannot be compared"),
    of_error("OL306", "finds backwards that need the host where the forward does not"),
    of_error("OL307", "finds state that each call makes anew"),
    of_error(
        "OL308",
        "finds forward hooks of submodules, whose Python no replay runs",
        """
import torch

model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
shapes = []
model[0].register_forward_hook(lambda module, args, result: shapes.append(result.shape))
args = (torch.ones(2, 3),)
""",
        """
import torch

model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
args = (torch.ones(2, 3),)
""",
        severity="silently-wrong",
    ),
    of_error(
        "OL309",
        "finds lists, dicts and sets that each call adds to, and replays do not",
        of_function("lengths.append(len(x))", "return x * 2", before="lengths = []"),
        of_function("return x * 2  # count after the call"),
        same_as=("OL105", "OL117", "OL308"),
        severity="silently-wrong",
    ),
)

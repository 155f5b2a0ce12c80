"""Small programs for the rules on the source: ``#! OL101`` ends each line that is at fault."""

from __future__ import annotations

HEAD = """
import math, random, time
import datetime
from collections import defaultdict, deque
from typing import Optional
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
import onelaunch as ol
"""

FORWARDS = {
    "item": "return x * x.sum().item()  #! OL101",
    "tolist": "return x.tolist()  #! OL101",
    "numpy": "return x.detach().numpy()  #! OL101",
    "array": "return np.asarray(x)  #! OL101",
    "bool": "return bool(x.any())  #! OL101",
    "int": "return int(x[0, 0])  #! OL101",
    "float": "return float(x.mean())  #! OL101",
    "print": "print('x is', x)  #! OL101",
    "print_of_shape": "print('x is', x.shape, x.dtype, x.device, x.dim())  #! OL513",
    "f_string": "name = f'{x.sum()}'  #! OL101",
    "f_string_of_shape": "name = f'{x.shape} {x.size(0)} {len(x)}'",
    "str": "name = str(x)  #! OL101",
    "branch": "if x.sum() > 0:  #! OL101\n    return -x",
    "branch_on_any": "if (x > 0).any():  #! OL101\n    return -x",
    "branch_on_shape": "if x.shape[0] > 1 and x.dim() == 2 and len(x) > 1:\n    return -x",
    "branch_on_none": "y = None\nif y is None or x is not None:\n    return -x",
    "branch_on_kind": "if x.requires_grad or x.is_cuda or isinstance(x, Tensor):\n    pass",
    "branch_on_dtype": "if x.dtype == torch.float16 or x.device.type == 'cpu':\n    return -x",
    "branch_on_number": "if x.numel() > 4 and x.size(-1) % 2 == 0:\n    return -x",
    "added": "y = x.sum()\ny += 1\nz = y.item()  #! OL101",
    "while": "while x.norm() > 1:  #! OL101\n    x = x / 2",
    "assert": "assert (x >= 0).all()  #! OL101",
    "assert_of_shape": "assert x.shape[1] == 4, f'{x}'",
    "raise": "if x.dim() > 2:\n    raise ValueError(f'{x}')",
    "not": "y = not x.any()  #! OL101",
    "and": "y = x.any() and 1  #! OL101",
    "last_of_and": "y = self.training and x.sum()",
    "choice": "y = 1 if x.max() > 0 else 2  #! OL101",
    "in_dict": "y = 'a' in {'a': x}",
    "max_of_python": "y = max(x[0, 0], x[0, 1])  #! OL101",
    "max_of_numbers": "y = max(x.shape[0], x.shape[1])",
    "all_of_python": "y = all(x[0] > 0)  #! OL101",
    "range": "for i in range(x.long()[0, 0]):  #! OL101\n    pass",
    "range_of_shape": "for i in range(x.shape[0]):\n    y = x[i]",
    "slice_by_shape": "y = x[: x.shape[0] // 2]",
    "equal": "y = torch.equal(x, x)  #! OL101",
    "allclose": "y = x.allclose(x)  #! OL101",
    "is_nonzero": "y = torch.is_nonzero(x.sum())  #! OL101",
    "nonzero": "y = x.nonzero()  #! OL102",
    "nonzero_as_tuple": "y = torch.nonzero(x, as_tuple=True)  #! OL102",
    "nonzero_static": "y = torch.nonzero_static(x, size=3)",
    "argwhere": "y = torch.argwhere(x)  #! OL102",
    "masked_select": "y = x.masked_select(x > 0)  #! OL102",
    "masked_fill": "y = x.masked_fill(x > 0, 0.0)",
    "unique": "y = x.unique()  #! OL102",
    "unique_consecutive": "y = torch.unique_consecutive(x)  #! OL102",
    "bincount": "y = torch.bincount(x.long().flatten(), minlength=4)  #! OL102",
    "where_of_one": "y = torch.where(x > 0)  #! OL102",
    "where_of_three": "y = torch.where(x > 0, x, 0.0)",
    "mask": "y = x[x > 0]  #! OL102",
    "mask_of_rows": "keep = x.sum(1) > 0\ny = x[keep & ~torch.isnan(x[:, 0])]  #! OL102",
    "mask_among": "y = x[:, x[0] > 0]  #! OL102",
    "mask_assigned_number": "y = x.clone()\ny[x > 0] = 0.0",
    "index": "y = x[x.long().argmin(1)]\nz = x[torch.arange(2, device=x.device)]",
    "cpu": "y = x.cpu()  #! OL103",
    "cpu_numpy": "y = x.cpu().numpy()  #! OL103",
    "cpu_then": "y = x.cpu()  #! OL103\nif y.sum() > 0:\n    return y.max().item()",
    "to_cpu": "y = x.to('cpu')  #! OL103",
    "to_cpu_device": "y = x.to(torch.device('cpu'))  #! OL103",
    "to_cpu_keyword": "y = x.to(device='cpu')  #! OL103",
    "to_other": "y = x.to(x.device)\nz = x.to(torch.float16).to(x)",
    "device_random": "y = torch.randperm(4, device=x.device)",
    "constant": "y = x * torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)",
    "constant_device": "y = x * torch.tensor(2.0, device=x.device)",
    "host_numbers": "y = [v.item() for v in torch.linspace(0, 1, 4)]",
    "host_made": "n = torch.tensor([1, 2]).max()\ny = x[: n.item()]",
    "seed": "torch.manual_seed(0)  #! OL106",
    "seed_cuda": "torch.cuda.manual_seed_all(0)  #! OL106",
    "synchronize": "torch.cuda.synchronize()  #! OL109",
    "random": "y = x * random.random()  #! OL502",
    "random_numpy": "y = x * np.random.rand()  #! OL502",
    "random_state": "state = random.getstate()",
    "random_torch": "y = x * torch.rand_like(x)",
    "time": "y = x * time.time()  #! OL503",
    "time_counter": "y = x * time.perf_counter()  #! OL503",
    "now": "y = x * datetime.datetime.now().microsecond  #! OL503",
    "sleep": "time.sleep(0.0)",
    "local_count": "n = 0\nfor row in x:\n    n += 1",
    "local_list": "rows = []\nfor row in x:\n    rows.append(row)\ny = torch.stack(rows)",
    "local_dict": "rows = {}\nrows['a'] = x",
    "scripting": "if torch.jit.is_scripting():\n    print(x)",
    "not_capturing": "if not torch.cuda.is_current_stream_capturing():\n    print(x)",
    "not_capturing_and": "if not torch.cuda.is_current_stream_capturing() and x.any():\n    pass",
    "narrowed": "y = 1 if isinstance(x, (int, float)) and x > 0 else 2",
    "unknown_call": "y = vars(self).get('training')\nif y > 2:\n    return y.item()",
    "data_ptr": "address = x.data_ptr()",
    "comprehension": "y = [v.item() for v in x[0]]  #! OL101",
    "condition_inside": "y = [row for row in x if row.sum() > 0]  #! OL101",
    "kept_across_branches": "y = x\nif self.training:\n    y = -x\nz = y.sum().item()  #! OL101",
    "lost_across_branches": "y = x\nif self.training:\n    y = 1\nz = bool(y)",
    "tried": "try:\n    y = x.max().item()  #! OL101\nexcept ValueError:\n    y = 0",
    "with": "with torch.no_grad():\n    y = x.max().item()  #! OL101",
    "inner": "def inner(v):\n    return v.max().item()  #! OL101\nreturn inner(x)",
    "inner_not_called": "def inner(v):\n    return v.item()\nreturn x",
    "multi_line": "y = (\n    x\n    .sum()\n    .item()  #! OL101\n)",
}
"""Bodies of the `forward` of a module, whose argument is `x: Tensor`."""

FILES = {
    "no_graph": """
def train(loader, model):
    for x in loader:
        loss = model(x).sum()
        print(loss.item())
        loss.backward()
""",
    "helper_of_forward": """
def scale(v):
    return v / v.max().item()  #! OL101

def unused(v):
    return v.max().item()

class Net(nn.Module):
    def forward(self, x: Tensor):
        return self.inner(scale(x))

    def inner(self, y):
        return y if y.sum() > 0 else -y  #! OL101

    def other(self, y: Tensor):
        return y.item()
""",
    "computed_of_an_argument": """
@ol.graph
def f(x):
    y = x * 2
    return y.item()  #! OL101
def g(a, b, scale=2.0, name=None):
    size = a.shape[0] * 2
    loss = -((a - b) ** 2) / scale
    if scale * 3 > 1 or size > 3:
        loss = loss * 2
    title = name + 'x'
    title.index('x')
    return helper(a) if loss.mean() > 1 else loss  #! OL101
def helper(x):
    h = x / 3
    return h.sum().item()  #! OL101
fast = torch.compile(g)
def nowhere(x):
    y = x * 2
    return y.item()
""",
    "computed_of_what_may_be_a_number": """
class Net(nn.Module):
    def forward(self, n, x: Config, *rest, width=2):
        if isinstance(n, int):
            n = torch.tensor(n)
        return (width * 2).item(), (x * 2).item(), (rest[0] * 2).item(), (self.k * 2).item()
""",
    "unannotated": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale, flag=False, mask=None):
        if flag:
            scale = scale * 2
        if x.sum() > scale:  #! OL101
            return self.linear(x)
        return x.item()  #! OL101
""",
    "optional": """
class Net(nn.Module):
    def forward(self, x: Tensor, mask: Optional[Tensor] = None, n: "int | None" = None):
        if mask is not None and mask.any():  #! OL101
            return x
        return x if n else -x
""",
    "wrong_annotation": """
class Net(nn.Module):
    def forward(self, x: Tensor, verbose_output: Tensor = False):
        return (x,) if verbose_output else x
""",
    "items_of_lists": """
class Net(nn.Module):
    def forward(self, x: Tensor):
        self.sizes[0] = 0
        sizes = list(x.shape)
        sizes[1] = sizes[1] // 2
        host = torch.zeros(3, device="cpu")
        return x.view(sizes) * host.max().item()
""",
    "either": """
class Net(nn.Module):
    def forward(self, x: "Tensor | float"):
        return 1 if x > 0 else 2
""",
    "not_a_module": """
class Transform:
    def forward(self, data):
        return data.sum().item()

class Other(Transform):
    def forward(self, data):
        return data.sum().item()

class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign() * x.sum().item()
""",
    "counter": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.steps = 0, 0
        self.losses = []
        self.seen = deque()

    def forward(self, x: Tensor):
        self.steps += 1  #! OL501
        self.losses.append(x)  #! OL309
        self.seen.append(x)  #! OL309
        return x
""",
    "counter_assigned": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor):
        self.steps = self.steps + 1  #! OL501
        return x
""",
    "global_counter": """
calls = 0
log = []

def step(x):
    global calls
    calls += 1  #! OL504
    log.append(x)  #! OL309
    return x * 2

fast = ol.graph(step)
""",
    "address": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x: Tensor):
        self.address = x.data_ptr()  #! OL510
        self.seen.append(1)  #! OL309
        same = x.data_ptr() == x.data_ptr()
        return x
""",
    "closure": """
def main():
    n = 0
    losses, scale = [], 1.0

    def step(x):
        nonlocal n
        n += 1  #! OL501
        loss = x.sum() * scale
        losses.append(loss)  #! OL309
        return loss.item()  #! OL101

    fast = ol.graph(step)
    for x in torch.ones(4, 3):
        fast(x)
        scale *= 0.5
""",
    "closure_of_the_call": """
class Net(nn.Module):
    def forward(self, x: Tensor):
        rows = []
        n = 0

        def keep(row):
            nonlocal n
            n += 1
            rows.append(row)

        for row in x:
            keep(row * 2)
        return torch.stack(rows)
""",
    "several_callables": """
def first(x: Tensor):
    return x.item()  #! OL101

def second(x: Tensor):
    return x.tolist()  #! OL101

def third(x: Tensor):
    return x.tolist()

fast = torch.cuda.make_graphed_callables((first, second), ((), ()))
print(third(torch.ones(3)))
""",
    "graphed_lambda": """
fast = ol.graph(lambda x: x * x.sum().item())  #! OL101
""",
    "decorated_method": """
class Solver:
    @ol.graph
    def step(self, x: Tensor):
        return x.item()  #! OL101
""",
    "checkpointed": """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def forward(self, x: Tensor):
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        return x * x.max().item()  #! OL101
""",
    "recursive": """
def walk(x: Tensor, n):
    if n == 0:
        return x
    return walk(x * 2, n - 1)

class Net(nn.Module):
    def forward(self, x: Tensor):
        return walk(x, 3).item()
""",
    "shadowed": """
class Net(nn.Module):
    def forward(self, x: Tensor, random, print):
        print(x)
        return x * random.random()
""",
}
"""Whole files."""


def of_forward(body: str) -> str:
    """Return the file of a module whose `forward` has a body."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"{HEAD}\nclass Net(nn.Module):\n    def forward(self, x: Tensor):\n{lines}\n"

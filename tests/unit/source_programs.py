"""Small programs for the rules on the source: ``#! OL101`` ends each line that is at fault."""

from __future__ import annotations

HEAD = """
import math, random, time
import datetime
import itertools
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
    "percent": "name = 'x: %s' % x  #! OL101",
    "percent_of_several": "name = '%s %s' % (x.shape, x)  #! OL101",
    "format": "name = '{}'.format(x)  #! OL101",
    "str": "name = str(x)  #! OL101",
    "branch": "if x.sum() > 0:  #! OL101\n    return -x",
    "branch_on_any": "if (x > 0).any():  #! OL101\n    return -x",
    "branch_on_shape": "if x.shape[0] > 1 and x.dim() == 2 and len(x) > 1:\n    return -x",
    "branch_on_none": "y = None\nif y is None or x is not None:\n    return -x",
    "branch_on_kind": "if x.requires_grad or x.is_cuda or isinstance(x, Tensor):\n    pass",
    "branch_on_dtype": "if x.dtype == torch.float16 or x.device.type == 'cpu':\n    return -x",
    "branch_on_number": "if x.numel() > 4 and x.size(-1) % 2 == 0:\n    return -x",
    "while": "while x.norm() > 1:  #! OL101\n    x = x / 2",
    "assert": "assert (x >= 0).all()  #! OL101",
    "assert_of_shape": "assert x.shape[1] == 4, f'{x}'",
    "raise": "if x.dim() > 2:\n    raise ValueError(f'{x}')",
    "not": "y = not x.any()  #! OL101",
    "and": "y = x.any() and 1  #! OL101",
    "last_of_and": "y = self.training and x.sum()",
    "choice": "y = 1 if x.max() > 0 else 2  #! OL101",
    "chain": "y = 0 < x.sum() < 1  #! OL101",
    "in": "y = 3.0 in x  #! OL101",
    "in_list": "y = x[0, 0] in [1.0, 2.0]  #! OL101",
    "in_dict": "y = 'a' in {'a': x}",
    "max_of_python": "y = max(x[0, 0], x[0, 1])  #! OL101",
    "max_of_numbers": "y = max(x.shape[0], x.shape[1])",
    "any_of_python": "y = any(v > 0 for v in x[0])  #! OL101",
    "all_of_python": "y = all(x[0] > 0)  #! OL101",
    "range": "for i in range(x.long()[0, 0]):  #! OL101\n    pass",
    "range_of_shape": "for i in range(x.shape[0]):\n    y = x[i]",
    "slice": "y = x[: x.long()[0, 0]]  #! OL101",
    "slice_by_shape": "y = x[: x.shape[0] // 2]",
    "equal": "y = torch.equal(x, x)  #! OL101",
    "allclose": "y = x.allclose(x)  #! OL101",
    "is_nonzero": "y = torch.is_nonzero(x.sum())  #! OL101",
    "arange": "y = torch.arange(x.max())  #! OL101",
    "one_hot": "y = F.one_hot(x.long())  #! OL101",
    "one_hot_sized": "y = F.one_hot(x.long(), 4)\nz = F.one_hot(x.long(), num_classes=4)",
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
    "repeats": "y = torch.repeat_interleave(x, x[0].long(), dim=1)  #! OL102",
    "repeats_sized": "y = torch.repeat_interleave(x, x[0].long(), dim=1, output_size=6)",
    "repeats_number": "y = x.repeat_interleave(2, dim=0)",
    "packed": "y = nn.utils.rnn.pack_padded_sequence(x[..., None], [2] * 4)  #! OL102",
    "cpu": "y = x.cpu()  #! OL103",
    "cpu_numpy": "y = x.cpu().numpy()  #! OL103",
    "cpu_then": "y = x.cpu()  #! OL103\nif y.sum() > 0:\n    return y.max().item()",
    "to_cpu": "y = x.to('cpu')  #! OL103",
    "to_cpu_device": "y = x.to(torch.device('cpu'))  #! OL103",
    "to_cpu_keyword": "y = x.to(device='cpu')  #! OL103",
    "to_other": "y = x.to(x.device)\nz = x.to(torch.float16).to(x)",
    "host_random_index": "y = torch.randperm(4).to(x.device)  #! OL103",
    "host_random_cuda": "y = torch.rand(4).cuda()  #! OL103",
    "device_random": "y = torch.randperm(4, device=x.device)",
    "constant": "y = x * torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)",
    "constant_device": "y = x * torch.tensor(2.0, device=x.device)",
    "host_numbers": "y = [v.item() for v in torch.linspace(0, 1, 4)]",
    "host_branch": "if torch.rand(()) < 0.5:  #! OL104\n    return -x",
    "host_random_item": "y = x * torch.rand(()).item()  #! OL104",
    "host_random_float": "y = x * float(torch.rand(()))  #! OL104",
    "host_random_truth": "y = 1 if torch.randint(2, ()) else 2  #! OL104",
    "host_made": "n = torch.tensor([1, 2]).max()\ny = x[: n.item()]",
    "seed": "torch.manual_seed(0)  #! OL106",
    "seed_cuda": "torch.cuda.manual_seed_all(0)  #! OL106",
    "synchronize": "torch.cuda.synchronize()  #! OL109",
    "stream": "torch.cuda.current_stream().synchronize()  #! OL109",
    "event": "event = torch.cuda.Event()\nevent.record()\nevent.synchronize()  #! OL109",
    "event_query": "event = torch.cuda.Event()\nevent.record()\nevent.query()  #! OL109",
    "stream_query": "torch.cuda.current_stream().query()  #! OL109",
    "wait_stream": "torch.cuda.current_stream().wait_stream(torch.cuda.Stream())",
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
    "debug": "debug = False\nif debug:\n    print(x)",
    "narrowed": "y = 1 if isinstance(x, (int, float)) and x > 0 else 2",
    "unknown_call": "y = vars(self).get('training')\nif y > 2:\n    return y.item()",
    "data_ptr": "address = x.data_ptr()",
    "walrus": "if (total := x.sum()) > 0:  #! OL101\n    pass",
    "comprehension": "y = [v.item() for v in x[0]]  #! OL101",
    "condition_inside": "y = [row for row in x if row.sum() > 0]  #! OL101",
    "unpacked": "a, b = x.chunk(2)\nif a.any():  #! OL101\n    pass",
    "values_indices": "values, places = x.max(dim=1)\nif values.any():  #! OL101\n    pass",
    "kept_across_branches": "y = x\nif self.training:\n    y = -x\nz = y.sum().item()  #! OL101",
    "lost_across_branches": "y = x\nif self.training:\n    y = 1\nz = bool(y)",
    "tried": "try:\n    y = x.max().item()  #! OL101\nexcept ValueError:\n    y = 0",
    "with": "with torch.no_grad():\n    y = x.max().item()  #! OL101",
    "lambda": "f = lambda v: v.sum().item()  #! OL101\nreturn f(x)",
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
    "layer_of_what_is_not_known": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, ids, cache):
        x = self.start(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, cache)
            probs = self.head(self.norm(x[:, -1])).softmax(-1)
            if probs.max() > 0.9:  #! OL101
                break
        if self.norm(x).mean() > 0:
            return x
        return probs
""",
    "unannotated": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale, flag=False, mask=None):
        if flag:
            scale = scale * 2
        y = self.linear(x)
        if y.sum() > scale:  #! OL101
            return y
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
    "buffers": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(4))
        self.limit = 3

    def forward(self, x):
        self.steps += 1
        if self.limit > 2:
            x = x + 1
        if self.steps > 3:  #! OL101
            return x
        return x * self.weight.sum().item()  #! OL101
""",
    "counter": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.steps = 0, 0
        self.losses = []
        self.seen = deque()
        self.by_name = {}
        self.numbers = itertools.count()
        self.steps = 0

    def forward(self, x: Tensor):
        self.steps += 1  #! OL501
        self.losses.append(x)  #! OL309
        self.seen.append(x)  #! OL309
        self.by_name["x"] = x  #! OL501
        next(self.numbers)  #! OL501
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
    "size_noted": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = 0
        self.width = 0

    def forward(self, x: Tensor):
        self.width = x.shape[1]
        if self.rows != len(x):
            self.rows = len(x)  #! OL507
        return x
""",
    "rebound": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("other", None)
        self.weight = nn.Parameter(torch.ones(4))
        self.last = None

    def forward(self, x: Tensor):
        self.state = torch.tanh(self.state + x)  #! OL512
        self.weight.data.mul_(2)
        self.state += 1
        self.state = self.state.to(x.device)
        self.state = F.normalize(self.state, out=self.state)
        self.last = x * 2
        return x
""",
    "group": """
class Step:
    def __init__(self, weight):
        self.optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(self, x: Tensor):
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.9  #! OL508
        self.optimizer.param_groups[0]["lr"].mul_(0.9)

fast = ol.graph(Step(torch.ones(3)).step)
""",
    "memo": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.memo = {}

    def forward(self, x: Tensor):
        if "grid" not in self.memo:
            self.memo["grid"] = torch.ones_like(x)
        return x + self.memo["grid"]
""",
    "cache_by_shape": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x: Tensor):
        key = (x.shape[0], x.shape[1])
        if key not in self.cache:
            self.cache[key] = torch.ones_like(x)  #! OL507
        return x + self.cache[key]
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
    "global_moving": """
scale = 1.0
fixed = 2.0

@ol.graph
def step(x):
    return x * scale * fixed  #! OL504

for epoch in range(3):
    step(torch.ones(3))
    scale *= 0.5
""",
    "global_moved_by_function": """
scale = 1.0

def anneal():
    global scale
    scale = scale * 0.5

@torch.compile(mode="reduce-overhead")
def step(x):
    return x * scale  #! OL504
""",
    "attribute_moving": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta, self.scale = 1.0, 1.0
        self.merged = False

    def anneal(self):
        self.beta *= 0.9
        self.merged = True

    def set_scale(self, scale):
        self.scale = scale

    def forward(self, x: Tensor):
        if self.merged:
            return x
        return x * self.beta * self.scale  #! OL504
""",
    "inputs": """
@ol.graph
def step(x, y, out):
    x.add_(1)  #! OL505
    y[0] = 2  #! OL505
    z = x * 2
    z.mul_(2)
    z[0] = 1
    v = y.view(-1)
    v.zero_()  #! OL505
    torch.mul(z, z, out=out)
    return z
""",
    "aliases": """
def view(x: Tensor):
    return x.view(-1)  #! OL506

def same(x: Tensor, y: Tensor):
    return x + y, y  #! OL506

def copy(x: Tensor):
    return x.clone()

a, b, c = ol.graph(view), torch.compile(same), ol.graph(copy)
""",
    "not_an_entry": """
class Part(nn.Module):
    def forward(self, x: Tensor):
        x.relu_()
        return x
""",
    "entry_of_a_module": """
class Net(nn.Module):
    def forward(self, x: Tensor):
        return x.relu_()  #! OL505 OL506

net = Net()
fast = ol.graph(net)
""",
    "option": """
class Sgd:
    def __init__(self, weight):
        self.weight = weight
        self.lr = 0.1
        self.decay = 0.9
        self.steps = 0

    def slow_down(self):
        self.lr *= 0.5

    def step(self, gradient: Tensor, momentum: Tensor):
        momentum.mul_(self.decay).add_(gradient, alpha=self.lr)  #! OL505 OL508
        total = gradient * 2
        total -= self.lr * gradient  #! OL508

sgd = Sgd(torch.ones(3))
fast = ol.graph(sgd.step)
""",
    "grad": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor):
        self.linear.requires_grad_(False)  #! OL509
        self.linear.weight.requires_grad = True  #! OL509
        for p in self.parameters():
            p.requires_grad_(False)  #! OL509
        y = x.detach().requires_grad_()
        return self.linear(y)

@ol.graph
def step(x: Tensor, y: Tensor):
    z = x.detach().requires_grad_()
    y.requires_grad_()  #! OL509
    return z * y
""",
    "address": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x: Tensor):
        self.address = x.data_ptr()  #! OL510
        self.seen.append(x.data_ptr())  #! OL309 OL510
        same = x.data_ptr() == x.data_ptr()
        return x
""",
    "generator": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator("cuda")

    def forward(self, x: Tensor):
        y = torch.rand(3, device=x.device, generator=self.generator)  #! OL511
        return y + torch.rand(3, device=x.device, generator=None)
""",
    "generator_registered": """
generator = torch.Generator("cuda")
graph = torch.cuda.CUDAGraph()
graph.register_generator_state(generator)

@ol.graph
def step(x):
    return x + torch.rand(3, device=x.device, generator=generator)
""",
    "own_rng": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x: Tensor):
        return x * self.rng.random()  #! OL502
""",
    "bare_body": """
def main():
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    print(x)
    with torch.cuda.graph(graph):
        y = x * 2
        print(y)  #! OL101
    print(y)

graph = torch.cuda.CUDAGraph()
x = torch.ones(3, device="cuda")
with torch.cuda.graph(graph):
    y = x.cpu()  #! OL103
y.item()
""",
    "closure": """
def main():
    n, losses, scale = 0, [], 1.0

    def step(x):
        nonlocal n
        n += 1  #! OL501
        loss = x.sum() * scale  #! OL504
        losses.append(loss)  #! OL309
        return loss.item()  #! OL101

    fast = ol.graph(step)
    for x in torch.ones(4, 3):
        fast(x)
        scale *= 0.5
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
    "inherited": """
class First(nn.Module):
    def forward(self, x: Tensor):
        return self.inner(x)

    def inner(self, x):
        return x

class Second(First):
    def inner(self, x):
        return x.tolist()  #! OL101
""",
    "checkpointed": """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def forward(self, x: Tensor):
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        return x * x.max().item()  #! OL101
""",
    "resized": """
@ol.graph
def step(x: Tensor):
    y = x.clone().t_()
    x.t_()  #! OL107
    return y
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
    "default_device": """
torch.set_default_device("cuda")

class Net(nn.Module):
    def forward(self, x: Tensor):
        return x + torch.rand(4).cuda()
""",
    "shadowed": """
class Net(nn.Module):
    def forward(self, x: Tensor, random, print):
        print(x)
        return x * random.random()
""",
    "layers": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = nn.LSTM(4, 4)
        self.third = Unknown()

    def forward(self, x):
        y, state = self.second(self.first(x))
        if self.third(y):
            return y
        return y.any() or x  #! OL101
""",
}
"""Whole files."""


def of_forward(body: str) -> str:
    """Return the file of a module whose `forward` has a body."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"{HEAD}\nclass Net(nn.Module):\n    def forward(self, x: Tensor):\n{lines}\n"

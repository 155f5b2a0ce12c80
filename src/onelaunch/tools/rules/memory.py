"""The rules of memory that a graph captured by hand has to itself, or knows by its address."""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule, of_function, of_module

MEMORY: tuple[Rule, ...] = (
    Rule(
        code="OL505",
        name="mutated-input",
        severity="silently-wrong",
        title="an argument is written",
        what="An operation writes the memory of an argument.",
        why="By hand, the graph has its own copy of each argument and writes that; the caller's "
        "tensor stays as it was. State that the callable holds, such as a cache among its "
        "buffers, is written where it is, and is right. With `ol.graph` the caller's own tensor "
        "is written.",
        same_as=("OL113",),
        fix="work on a copy, `x = x.clone()`, and return it; or keep the tensor as a buffer of the "
        "module",
        example="""\
import torch


def model(cache, x):
    cache.mul_(0.9).add_(x)
    return cache.sum()


args = (torch.zeros(4, 8), torch.ones(4, 8))
""",
        instead="""\
import torch


def model(cache, x):
    cache = cache * 0.9 + x
    return cache, cache.sum()


args = (torch.zeros(4, 8), torch.ones(4, 8))
""",
    ),
    Rule(
        code="OL506",
        name="aliased-output",
        severity="silently-wrong",
        title="a result shares memory with an argument or with state",
        what="A result is an argument, a parameter or a buffer, or a view of one.",
        why="By hand, the result is static memory of the graph, or a clone of it: a write to it no "
        "longer reaches the argument, and a later change of the argument no longer shows in it. "
        "`ol.graph` returns the very tensor, or the same view of the caller's.",
        problems="It does not matter to a caller who writes to neither.",
        fix="return a copy: `x.flatten().clone()`",
        example=of_function("return x.flatten()"),
        instead=of_function("return x.flatten().clone()"),
    ),
    Rule(
        code="OL507",
        name="shape-keyed-cache",
        severity="silently-wrong",
        title="a cache by size",
        what="The first call stores tensors under a size of its arguments, or fills a tensor and "
        "notes for which size; the second finds them.",
        why="A graph captured on a hit has the address of the cached memory in it, and none of "
        "the code that fills it. A call of another size that fills it anew, or drops it, leaves "
        "the graph with values of the other size, or with freed memory. `ol.graph` checks, "
        "before each call, the attributes that decided and the tensors that were read.",
        problems="A cache that keeps all sizes for good is right under a graph, if it was filled "
        "before the capture; it is found too. `functools.lru_cache` is not seen.",
        same_as=("OL117", "OL307"),
        fix="compute it in each call, `table = compute(n)` without the `if`: a graph makes that "
        "cheap; or once for the largest size",
        example=of_module(
            ["self.rows = 0", 'self.register_buffer("table", torch.zeros(64, 1))'],
            [
                "if self.rows != len(x):",
                "    self.rows = len(x)",
                "    self.table[: len(x)] = torch.linspace(0, 1, len(x), device=x.device)[:, None]",
                "return x + self.table[: len(x)]",
            ],
        ),
        instead=of_module(
            [], ["return x + torch.linspace(0, 1, len(x), device=x.device)[:, None]"]
        ),
    ),
    Rule(
        code="OL510",
        name="stored-address",
        severity="silently-wrong",
        title="the address of a tensor is kept",
        what="What `data_ptr()` gave is in an attribute, an item or a key after the call.",
        why="In a graph every tensor has the same address for ever, whatever is copied into it: a "
        "cache by address never misses again, and an address that is passed on may be freed. "
        "`ol.graph` compares what such code read before each call; an address that only decides "
        "in Python makes two runs differ (OL117).",
        same_as=("OL117",),
        fix="compute it in each call, `features = compute(x)` without the `if`: a graph makes that "
        "cheap; or have the caller say that the tensor is new",
        example=of_module(
            ["self.address, self.features = 0, None"],
            [
                "if self.address != x.data_ptr():",
                "    self.address = x.data_ptr()",
                "    self.features = x.cos()",
                "return self.features + 1",
            ],
            x="torch.arange(8.0)",
        ),
        instead=of_module([], ["return x.cos() + 1"], x="torch.arange(8.0)"),
    ),
    Rule(
        code="OL512",
        name="rebound-state",
        severity="silently-wrong",
        title="state that each call replaces",
        what="A call reads a tensor from an attribute, item or global, and puts another there.",
        why="A replay reads the memory that the capture read, and the assignment is Python: the "
        "state stops moving on. State that is changed in place goes on. `ol.graph` makes such "
        "state an input and binds the new tensor after each replay.",
        same_as=("OL105", "OL307"),
        fix="change it in place: `self.state.copy_(new)`",
        example=of_module(
            ['self.register_buffer("state", torch.zeros(8))'],
            ["self.state = torch.tanh(self.state + x)", "return self.state * 2"],
            x="torch.ones(8)",
        ),
        instead=of_module(
            ['self.register_buffer("state", torch.zeros(8))'],
            ["self.state.copy_(torch.tanh(self.state + x))", "return self.state * 2"],
            x="torch.ones(8)",
        ),
    ),
)

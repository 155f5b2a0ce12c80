"""The fix of each rule, pasted into the rule's example as a reader would do it: word for word, but
for the names that stand for the reader's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Code:
    """A piece of code in the text of a fix.

    Args:
        text: as the fix has it.
        names: a name in it -> the code of the example that it stands for; others as keywords.
    """

    def __init__(self, text: str, names: Mapping[str, str] = {}, **others: str) -> None:
        self.text, self.names = text, {**names, **others}

    def taken_from(self, fix: str) -> str:
        """Return the code with the names of the example, if the fix has it."""
        assert self.text in fix, f"{self.text!r} is not in the fix: {fix}"
        if not self.names:
            return self.text
        keys = sorted(self.names, key=len, reverse=True)
        any_of = "|".join(
            rf"(?<![\w.]){re.escape(k)}(?!\w)" if k[0].isalpha() else re.escape(k) for k in keys
        )
        return re.sub(any_of, lambda found: self.names[found[0]], self.text)


Part = Code | str
"""Code of the fix, or text that a reader writes around it."""


@dataclass(frozen=True)
class Paste:
    """How a fix becomes part of an example.

    Attributes:
        edits: text of the example -> what stands there instead.
        call: the call of the graphed callable, `fast`, with its arguments, `x`, `args`; what `y`
            is then, or what `fast` gave, is the result.
        setup: what is done once with `fast`.
        bad, good: what is done after each call of the example and of the pasted program.
        kept: an expression for what both leave behind.
        fresh: whether each call gets copies of the arguments.
        moves: whether results are to differ from call to call, as those of draws do. They are
            compared with the pasted program in eager, and the others with the example.
    """

    edits: tuple[tuple[str, tuple[Part, ...]], ...] = ()
    call: tuple[Part, ...] = ("y = fast(*args)",)
    setup: tuple[Part, ...] = ()
    bad: str = ""
    good: str = ""
    kept: str = "None"
    fresh: bool = False
    moves: bool = False


def joined(parts: tuple[Part, ...], fix: str) -> str:
    return "".join(p if isinstance(p, str) else p.taken_from(fix) for p in parts)


def pasted(example: str, paste: Paste, fix: str) -> str:
    """Return an example with a fix pasted into it."""
    for old, parts in paste.edits:
        assert example.count(old) == 1, old
        example = example.replace(old, joined(parts, fix))
    return example


_DRAW = Code("torch.rand((), device=x.device)")
_BUFFER = 'self.register_buffer("n", torch.zeros((), dtype=torch.long))'
_GRADIENTS = "[p.grad for p in {}.parameters()]"
_BACKWARD = {"bad": "y.sum().backward()", "good": "y.sum().backward()"}
_APPENDS = "lambda module, args, result: shapes.append(result.shape)"
_LINES = "torch.linspace(0, 1, len(x), device=x.device)[:, None]"


def replaced(*edits: tuple[Any, ...], **how: Any) -> Paste:
    """A paste of edits: each a text of the example, and what stands there instead."""
    return Paste(tuple((old, parts) for old, *parts in edits), **how)


def called(*parts: Part, without: str = "", **how: Any) -> Paste:
    """A paste that changes the call, and takes a text out of the example."""
    edits = [(without,)] if without else []
    return replaced(*edits, call=parts, **how)


PASTED: dict[str, Paste] = {
    "OL101": replaced(
        (
            "if x.sum() > 0:\n        return x / 2\n    return x",
            "return ",
            Code("torch.where(condition, a, b)", condition="x.sum() > 0", a="x / 2", b="x"),
        )
    ),
    "OL102": replaced(("x[x > 0]", Code("torch.where(mask, x, 0)", mask="x > 0"))),
    "OL103": replaced(
        ("(x * 2).cpu()", "x * 2"), call=(Code("y = fast(x.to(device)).cpu()", device="x.device"),)
    ),
    "OL104": replaced(("torch.rand(())", _DRAW), moves=True),
    "OL105": called(Code("seen.append(fast(x))"), without="    seen.append(y)\n", kept="seen"),
    "OL106": called(
        Code("torch.manual_seed(seed); fast(x)", seed="0"), without="    torch.manual_seed(0)\n"
    ),
    "OL107": replaced(("x.t_()", Code("x = x.t()")), fresh=True),
    "OL108": replaced(("iter(x * 2)", Code("tuple(rows)", rows="x * 2")), bad="y = tuple(y)"),
    "OL109": called(
        Code("y = fast(x); torch.cuda.synchronize()"), without="    torch.cuda.synchronize()\n"
    ),
    "OL112": replaced(
        ("        y.register_hook(lambda grad: grad.clamp(-1, 1))\n",),
        ("return y.sum()", "return y"),
        call=(
            Code("y = fast(x); y.register_hook(hook)", hook="lambda grad: grad.clamp(-1, 1)"),
            "; y = y.sum()",
        ),
        bad="y.backward()",
        good="y.backward()",
        kept=_GRADIENTS.format("model"),
    ),
    "OL114": replaced(
        (
            "functools.partial(torch.mul, weight)",
            Code("lambda x: f(w, x)", f="torch.mul", w="weight"),
        ),
        **_BACKWARD,
        kept="weight.grad",
    ),
    "OL115": replaced(
        ("def model(x):\n", "def model(x):\n    ", Code("x = x.detach().requires_grad_()"), "\n"),
        fresh=True,
    ),
    "OL116": replaced(
        (
            "checkpoint(layer, x, use_reentrant=True)",
            Code("checkpoint(..., use_reentrant=False)", {"...": "layer, x"}),
        ),
        **_BACKWARD,
        kept=_GRADIENTS.format("layer"),
    ),
    "OL117": replaced(("random.random()", _DRAW), moves=True),
    "OL118": replaced(
        ("self.step = 0", Code(_BUFFER, n="step")),
        (
            "x.neg() if self.step % 2 == 0 else x * 2",
            Code(
                "torch.where(self.n % 2 == 0, a, b)",
                {"self.n": "self.step"},
                a="x.neg()",
                b="x * 2",
            ),
        ),
    ),
    "OL120": replaced(
        (
            "torch.optim.Adam(layer.parameters())",
            Code("torch.optim.Adam(..., fused=True)", {"...": "layer.parameters()"}),
        ),
        kept="list(layer.parameters())",
    ),
    "OL122": called(
        Code("fast(x); scheduler.step()", scheduler="schedule"),
        without="    schedule.step()\n",
        kept="list(layer.parameters())",
    ),
    "OL308": replaced(
        (f"model[0].register_forward_hook({_APPENDS})\n",),
        setup=(Code("fast.register_forward_hook(hook)", hook=_APPENDS),),
        kept="shapes",
    ),
    "OL309": called(
        Code("y = fast(x); seen.append(value)", seen="lengths", value="len(x)"),
        without="    lengths.append(len(x))\n",
        kept="lengths",
    ),
    "OL500": replaced(
        ("forward(self, x)", "forward(self, x, scale)"),
        ("next(self.scales)", "scale"),
        ("(torch.ones(4, 8),)", "(torch.ones(4, 8), torch.tensor(0.5))"),
        call=(Code("fast(x, torch.tensor(value))", value="next(model.scales)"),),
    ),
    "OL501": replaced(("self.calls = 0", Code(_BUFFER, n="calls"))),
    "OL502": replaced(("random.random()", _DRAW), moves=True),
    "OL503": replaced(
        ("def model(x)", "def model(x, now)"),
        ("time.perf_counter()", "now"),
        ("(torch.ones(4, 8),)", "(torch.ones(4, 8), torch.tensor(1.5, dtype=torch.float64))"),
        call=(Code("fast(x, torch.tensor(now, dtype=torch.float64))", now="time.perf_counter()"),),
        moves=True,
    ),
    "OL504": replaced(
        ("temperature = 1.0", Code("value = torch.tensor(1.0)", value="temperature")),
        ("temperature *= 0.9", Code("value.mul_(0.9)", value="temperature")),
    ),
    "OL505": replaced(
        ("    cache.mul_(0.9)", "    ", Code("x = x.clone()", x="cache"), "\n    cache.mul_(0.9)"),
        ("return cache.sum()", "return cache, cache.sum()"),
        call=("cache, y = fast(*args); args = (cache, args[1])",),
        kept="args[0]",
    ),
    "OL506": replaced(("x.flatten()", Code("x.flatten().clone()"))),
    "OL507": replaced(
        (
            "        if self.rows != len(x):\n            self.rows = len(x)\n"
            f"            self.table[: len(x)] = {_LINES}\n"
            "        return x + self.table[: len(x)]\n",
            "        ",
            Code("table = compute(n)", {"compute(n)": _LINES}),
            "\n        return x + table\n",
        )
    ),
    "OL508": replaced(
        (
            "torch.optim.SGD([self.weight], lr=0.1)",
            "torch.optim.",
            Code("SGD(parameters, lr=torch.tensor(0.1), fused=True)", parameters="[self.weight]"),
        ),
        ('["lr"] *= 0.9', '["lr"]', Code(".mul_(0.9)")),
        kept="model.weight",
    ),
    "OL509": replaced(
        (
            "        self.weight.requires_grad_(not self.weight.requires_grad)\n"
            "        return (x * self.weight).sum()",
            "        return (x * ",
            Code("tensor.detach()", tensor="self.weight"),
            ").sum()",
        )
    ),
    "OL510": replaced(
        (
            "        if self.address != x.data_ptr():\n"
            "            self.address = x.data_ptr()\n            self.features = x.cos()\n"
            "        return self.features + 1\n",
            "        ",
            Code("features = compute(x)", {"compute(x)": "x.cos()"}),
            "\n        return features + 1\n",
        )
    ),
    "OL511": replaced(
        ("generator = torch.Generator(args[0].device)", Code("torch.manual_seed(0)")),
        (", generator=generator",),
        moves=True,
    ),
    "OL512": replaced(
        (
            "self.state = torch.tanh(self.state + x)",
            Code("self.state.copy_(new)", new="torch.tanh(self.state + x)"),
        )
    ),
    "OL513": called(
        Code("y = fast(x); print(y)", {"print(y)": 'print("called")'}),
        without='    print("called")\n',
    ),
}
"""Rule -> how its fix is pasted, of what blocks a capture or is wrong in silence."""

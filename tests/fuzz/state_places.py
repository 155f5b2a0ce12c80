"""Places that a callable reads: how each is built, read and changed, as source text.

A place is a chain of links, from a root name down to a leaf. In a link's text `@` at the end of a
name is a number of its own, `#` the expression of what holds it, and `$` that of what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Something that holds one value."""

    make: str
    """The expression that builds it around `$`."""
    read: str
    """The expression that reads the value of `#`."""
    write: str = ""
    """The statement that sets it to `$`; empty where it cannot be."""
    define: str = ""
    """Statements before all others: classes and functions."""
    changes: tuple[str, ...] = ()
    """More statements that change what a read of `#` gives."""
    moved: bool = True
    """May a call write here by `write`?"""


def _class(body: str, head: str = "class C@:") -> str:
    return head + "\n" + "\n".join("    " + line for line in body.splitlines())


_INIT = "def __init__(self, v):\n    self.v = v\n"
_SUBCLASS = "\nclass D@(C@):\n    pass"

LINKS = (
    Link("C@($)", "#.v", "#.v = $", _class(_INIT)),
    Link("C@($)", "#.v", "#.v = $", _class("v = 7\n" + _INIT), ("del #.v", "type(#).v = $")),
    Link("C@()", "#.v", "type(#).v = $", _class("v = 5"), ("#.v = $", "C@.v = $")),
    Link(
        "D@()", "#.v", "C@.v = $", _class("v = 5") + _SUBCLASS, ("D@.v = $", "#.v = $"),
    ),
    Link("C@($)", "#.v", "#.v = $", _class("__slots__ = ('v',)\n" + _INIT)),
    Link(
        "C@($)", "getattr(#, 'w', #.v)", "#.v = $", _class("__slots__ = ('v', 'w')\n" + _INIT),
        ("#.w = $",),
    ),
    Link("C@($)", "#.v", "#.v = $", "@dataclasses.dataclass\n" + _class("v: object")),
    Link(
        "C@($)", "#.v", "object.__setattr__(#, 'v', $)",
        "@dataclasses.dataclass(frozen=True, slots=True)\n" + _class("v: object"), moved=False,
    ),
    Link("types.SimpleNamespace(v=$)", "#.v", "#.v = $", "", ("#.__dict__ = {'v': $}",)),
    Link("types.ModuleType('m')", "getattr(#, 'v', 3)", "#.v = $"),
    Link("{'k': $}", "#['k']", "#['k'] = $", "", ("#.update(k=$)", "#.clear(); #['k'] = $")),
    Link("{'k': $}", "#.get('j', #['k'])", "#['k'] = $", "", ("#['j'] = $",)),
    Link("{'k': $}", "next(iter(#.values()))", "#['k'] = $", "", ("del #['k']; #['l'] = $",)),
    Link("{1: $}", "[v for k, v in #.items() if k][-1]", "#[1] = $", "", ("#[2] = $",)),
    Link("[0, $]", "#[1]", "#[1] = $", "", ("#[:] = [1, $]", "#.insert(1, $)")),
    Link("[$]", "[v for v in #][-1]", "#[0] = $", "", ("#.append($)", "#.extend([$, $])")),
    Link("($, 1)", "#[0]"),
    Link("collections.deque([$])", "#[-1]", "#[-1] = $", "", ("#.append($)", "#.appendleft(1)")),
    Link("collections.defaultdict(lambda: $)", "#['k']", "#['k'] = $"),
    Link("collections.OrderedDict(k=$)", "#['k']", "#['k'] = $"),
    Link("C@($)", "#.v", "", "C@ = collections.namedtuple('C@', 'v')"),
    Link(
        "C@($)", "#.v", "#.v = $",
        _class("def __init__(self, v):\n    super().__init__([1, 2])\n    self.v = v",
               "class C@(list):"),
        ("#.v = $; #.append(1)",),
    ),
    Link(
        "C@.of($)", "#.v", "#.v = $",
        _class("@classmethod\ndef of(cls, v):\n    t = cls((1, 2))\n    t.v = v\n    return t",
               "class C@(tuple):"),
    ),
    Link(
        "C@.of($)", "#.v", "#.v = $",
        _class("@classmethod\ndef of(cls, v):\n    t = cls()\n    t.v = v\n    return t",
               "class C@(dict):"),
    ),
    Link(
        "C@.of($)", "C@.A.v", "C@.A.v = $",
        _class("A = 1\nB = 2\n@classmethod\ndef of(cls, v):\n    cls.A.v = v\n    return cls",
               "class C@(enum.Enum):"),
    ),
    Link(
        "C@.of($)", "#.scaled()", "#.v = $",
        _class("A = 1\ndef scaled(self):\n    return self.v\n"
               "@classmethod\ndef of(cls, v):\n    cls.A.v = v\n    return cls.A",
               "class C@(enum.Enum):"),
        ("C@.scaled = lambda self: $",),
    ),
    Link(
        "C@($)", "#.p", "#.v = $", _class(_INIT + "@property\ndef p(self):\n    return self.v"),
        ("C@.p = property(lambda self: $)", "type(#).p = property(lambda self: $)"),
    ),
    Link(
        "C@($)", "#.p", "#.v = $",
        "class E@:\n    k = 1\n    def __get__(self, o, c=None):\n        return o.v\n"
        + _class(_INIT + "p = E@()"),
        ("E@.__get__ = lambda self, o, c=None: $", "C@.p = $"),
    ),
    Link(
        "C@($)", "#.p", "C@.__dict__['p'].v = $",
        "class E@:\n    def __get__(self, o, c=None):\n        return getattr(self, 'v', o.v)\n"
        + _class(_INIT + "p = E@()"),
        ("#.v = $",),
    ),
    Link(
        "C@", "#.p", "C@.v = $",
        "class M@(type):\n    @property\n    def p(cls):\n        return cls.v\n"
        + _class("v = 5", "class C@(metaclass=M@):"),
        ("M@.p = property(lambda cls: $)",),
    ),
    Link(
        "C@($)", "#.get()", "#.v = $", _class(_INIT + "def get(self):\n    return self.v"),
        ("C@.get = lambda self: $", "#.get = lambda: $"),
    ),
    Link(
        "C@($)", "#.get()", "#.v = $",
        _class(_INIT + "def get(self):\n    return self.v")
        + "\nclass D@(C@):\n    def get(self):\n        return 3",
        ("#.__class__ = D@", "#.__class__ = C@"),
    ),
    Link(
        "C@($)", "#.v", "#.v = $", _class(_INIT) + "\nclass D@(C@):\n    v = property(lambda s: 3,"
        " lambda s, v: None)", ("#.__class__ = D@", "#.__class__ = C@"),
    ),
    Link(
        "C@($)", "D@(#).read()", "#.v = $",
        _class(_INIT) + "\nclass D@:\n    def __init__(self, o):\n        self.o = o\n"
        "    def read(self):\n        return self.o.v",
        ("D@.read = lambda self: $", "D@.__init__ = lambda self, o: setattr(self, 'o', C@($))"),
    ),
    Link("C@($)", "getattr(#, 'v')", "#.v = $", _class(_INIT)),
    Link("C@($)", "getattr(#, 'vw'[:1])", "#.v = $", _class(_INIT), ("setattr(#, 'v', $)",)),
    Link("C@($)", "getattr(#, 'v1', #.v)", "#.v = $", _class(_INIT), ("#.v1 = $", "C@.v1 = $")),
    Link("C@($)", "(#.w if hasattr(#, 'w') else #.v)", "#.v = $", _class(_INIT), ("#.w = $",)),
    Link("C@($)", "vars(#)['v']", "#.v = $", _class(_INIT)),
    Link("C@($)", "#.__dict__['v']", "#.v = $", _class(_INIT), ("#.__dict__ = {'v': $}",)),
    Link(
        "C@($)", "f@(**vars(#))", "#.v = $", _class(_INIT) + "\ndef f@(v, w=None):\n"
        "    return v if w is None else w", ("#.w = $", "f@.__defaults__ = ($,)"),
    ),
    Link("C@($)", "operator.attrgetter('v')(#)", "#.v = $", _class(_INIT)),
    Link("{'k': $}", "operator.itemgetter('k')(#)", "#['k'] = $"),
    Link("{'k': $}", "f@(**#)", "#['k'] = $", "def f@(k, w=None):\n    return w or k"),
    Link("[$]", "f@(*#)", "#[0] = $", "def f@(*v):\n    return v[-1]", ("#.append($)",)),
    Link("[C@($), C@(2)]", "[o.v for o in #][0]", "#[0].v = $", _class(_INIT), ("#.reverse()",)),
    Link("[C@($)]", "list(map(lambda o: o.v, #))[0]", "#[0].v = $", _class(_INIT)),
    Link("[C@($)]", "next(o.v for o in #)", "#[0].v = $", _class(_INIT)),
    Link(
        "C@($)", "last@(#).v", "last@(#).v = $", _class(_INIT + "next = None") + "\n"
        "def last@(o):\n    while o.next is not None:\n        o = o.next\n    return o",
        ("#.next = C@($)", "#.next = None"), moved=False,
    ),
    Link(
        "functools.partial(f@, $)", "#()", "",
        "def f@(v, w=None):\n    return v if w is None else w",
        ("#.keywords['w'] = $", "f@.__code__ = (lambda v, w=None: 3).__code__",
         "f@.__defaults__ = ($,)"),
    ),
    Link(
        "functools.partial(f@, k=$)", "#()", "#.keywords['k'] = $", "def f@(k):\n    return k",
        moved=False,
    ),
    Link("(lambda v=$: v)", "#()", "#.__defaults__ = ($,)", moved=False),
    Link("(lambda *, v=$: v)", "#()", "#.__kwdefaults__['v'] = $", moved=False),
    Link("close@($)", "#()", "#.__closure__[0].cell_contents = $", "def close@(v):\n"
         "    def inner():\n        return v\n    return inner", moved=False),
    Link("tag@($)", "#.v", "#.v = $", "def tag@(v):\n    def f():\n        return 1\n"
         "    f.v = v\n    return f"),
    Link(
        "C@($)", "#.v", "#.v = $",
        _class("def __init__(self, v):\n    super().__init__()\n    self.v = v",
               "class C@(torch.nn.Module):"),
        ("#.register_buffer('b', None)",),
    ),
    Link(
        "C@($)", "#['k']", "#.d['k'] = $",
        _class("def __init__(self, v):\n    self.d = {'k': v}\n"
               "def __getitem__(self, k):\n    return self.d[k]"),
        ("C@.__getitem__ = lambda self, k: $",),
    ),
    Link(
        "C@($)", "#(1)", "#.v = $", _class(_INIT + "def __call__(self, k):\n    return self.v"),
        ("C@.__call__ = lambda self, k: $",),
    ),
    Link(
        "C@($)", "enter@(#)", "#.v = $",
        _class(_INIT + "def __enter__(self):\n    return self.v\ndef __exit__(self, *e):\n    pass")
        + "\ndef enter@(o):\n    with o as v:\n        return v",
        ("C@.__enter__ = lambda self: $",),
    ),
    Link(
        "C@($)", "[*#][0]", "#.v = $", _class(_INIT + "def __iter__(self):\n    yield self.v"),
        ("C@.__iter__ = lambda self: iter([$])",),
    ),
    Link(
        "C@($)", "#.get()", "C@.s = $",
        _class(_INIT + "s = 2\n@classmethod\ndef get(cls):\n    return cls.s"),
    ),
    Link(
        "C@($)", "#.w", "#.v = $",
        _class(_INIT + "def __getattr__(self, name):\n    return self.v"),
        ("#.w = $", "C@.w = $"),
    ),
    Link("{'a': {'k': $}, 'b': {'k': 2}}", "#['a']['k']", "#['a']['k'] = $", "",
         ("#['a'], #['b'] = #['b'], #['a']", "#['a'] = {'k': $}")),
    Link("C@($)", "read@(#, *('v',))", "#.v = $", _class(_INIT) + "\ndef read@(o, *names):\n"
         "    for n in names:\n        o = getattr(o, n)\n    return o"),
    Link("C@($)", "match@(#)", "#.v = $", _class(_INIT) + "\ndef match@(o):\n    match o:\n"
         "        case C@(v=v):\n            return v", ("#.__class__ = type('D', (C@,), {})",)),
    # What lies behind a method in C.
    Link("{'k': $}.get", "#('k')", "#.__self__['k'] = $", "", ("#.__self__.clear()",)),
    Link("{'k': $}.values", "list(#())[0]", "#.__self__['k'] = $"),
    Link("[0, $].__getitem__", "#(1)", "#.__self__[1] = $", "", ("#.__self__.reverse()",)),
    Link("collections.deque([$]).copy", "#()[-1]", "#.__self__[-1] = $"),
    Link("functools.partial({'k': $}.get, 'k')", "#()", "#.func.__self__['k'] = $"),
    Link("C@($).__getattribute__", "#('v')", "#.__self__.v = $", _class(_INIT)),
    Link("var@($)", "#.get()", "#.set($)", "def var@(v):\n    c = contextvars.ContextVar('c@')\n"
         "    c.set(v)\n    return c"),
    Link("var@($).get", "#()", "#.__self__.set($)",
         "def var@(v):\n    c = contextvars.ContextVar('c@')\n    c.set(v)\n    return c"),
    Link("C@($)", "object.__getattribute__(#, 'v')", "#.v = $", _class(_INIT)),
    Link("C@($)", "#.__dict__.get('v')", "#.v = $", _class(_INIT)),
    Link("C@($)", "held@(#)", "#.v = $", _class(_INIT) + "\ndef held@(o):\n    d = vars(o)\n"
         "    return d['v']", ("vars(#)['v'] = $",)),
    Link(
        "C@($)", "vars(#)['v']", "#.v = $",
        _class("def __init__(self, v):\n    super().__init__()\n    self.v = v",
               "class C@(torch.nn.Module):"),
    ),
    Link(
        "C@.of($)", "#._value_", "#._value_ = $",
        _class("A = 1\n@classmethod\ndef of(cls, v):\n    cls.A._value_ = v\n    return cls.A",
               "class C@(enum.Enum):"),
    ),
    Link("C@($)", "try@(#)", "#.v = $", _class(_INIT) + "\ndef try@(o):\n    try:\n"
         "        return o.w\n    except AttributeError:\n        return o.v", ("#.w = $",)),
)  # fmt: skip

ROOTS = (
    Link("", "g@", "g@ = $", "g@ = $"),
    Link("", "root@.v", "root@.v = $", "class root@:\n    v = $"),
    Link("", "cell@()", "cell@.set($)",
         "def make@(v):\n    def get():\n        return v\n    def set(w):\n        nonlocal v\n"
         "        v = w\n    get.set = set\n    return get\ncell@ = make@($)"),
    Link("", "call.v@", "call.v@ = $", "__after__ call.v@ = $"),
    Link("", "default@()", "default@.__defaults__ = ($,)", "def default@(v=$):\n    return v"),
    Link("", "helper@()", "g@ = $", "g@ = $\ndef helper@():\n    return g@"),
    Link("", "table@['f']()", "g@ = $",
         "g@ = $\ntable@ = {'f': lambda: g@, 'g': lambda: 3}"),
)  # fmt: skip

NUMBERS = ("2", "3", "2.0", "True", "1", "0.5", "-1.5", "4", "0.0", "-0.0")
TENSORS = ("T(1)", "T(2)", "T(3)", "T(4)", "T(5)")
CHOSEN = ("(True, T(1), T(2))", "(False, T(3), T(4))", "(0, T(5), T(5))")
OPTIONAL = (*TENSORS[:3], "None", "None")
FUNCTIONS = (
    "torch.sin", "torch.cos", "(lambda y: y * 2)", "(lambda y, k=3: y - k)",
    "functools.partial(torch.mul, other=2)", "functools.partial(torch.add, alpha=2, other=1)",
    "torch.nn.ReLU()", "Twice(1.5)", "Twice(2).method",
)  # fmt: skip
WORDS = ("'sin'", "'cos'", "'abs'", "'neg'")
SHAPED = ("T(1)", "T(2)", "H(3)", "L(4)", "T(5)[:2]")
MODES = ("True", "False", "1", "0")

USES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "number": (NUMBERS, (
        "y = y * $", "y = y + $", "y = torch.add(y, 1, alpha=float($))", "y = y.clamp(max=$)",
        "y = y * 2 if $ > 1.9 else y - 1", "y = torch.where(y > 0, y, y * $)",
        "y = y + torch.full_like(y, $)", "y = torch.stack([y] * int($ * $ + 1)).sum(0)",
        "for _ in range(int(abs($))):\n        y = y * 1.5",
        "y = y if isinstance($, float) else y + 1",
        "y = y + len(str($))", "n = $\n    y = y * n if n else -y",
    )),
    "tensor": (TENSORS, ("y = y + $", "y = y * $", "y = $ - y", "y = torch.cat([y, $])[:4] * 2",
                         "y = y + $.mul_(0.5)")),
    "optional": (OPTIONAL, (
        "y = y + $ if $ is not None else y * 2",
        "t = $\n    y = y + 1 if t is None else y * t", "y = y * 3 if $ is None else y",
        "t = $\n    y = y * 2 if t is None else y + t.mul_(0.5)",
    )),
    "function": (FUNCTIONS, ("y = $(y)", "y = list(map($, [y]))[0]")),
    "word": (WORDS, ("y = getattr(torch, $)(y)", "y = getattr(y, $)()",
                     "y = {'sin': y * 2, 'cos': y - 1}.get($, y)")),
    "shaped": (SHAPED, (
        "y = y * $.shape[0]", "y = y + 1 if $.dtype == torch.float64 else y * 2",
        "y = y + 1 if $.requires_grad else y * $.numel()", "y = y * len($)",
        "y = y + $.stride(0) * $.dim()",
    )),
    "chosen": (CHOSEN, (
        "y = y + $[1] if $[0] else y * $[2]", "y = y + ($[1] if $[0] else $[2]).mul_(0.5)",
    )),
    "mode": (MODES, (
        "y = y + 1 if $ else y * 2", "y = torch.nn.functional.dropout(y, 0.0, bool($))",
        "y = y * (not $)",
    )),
}  # fmt: skip

MOVES: dict[str, tuple[str, ...]] = {
    "number": ("%s + 1", "1 - %s", "(%s + 1) %% 3", "%s * 0.5"),
    "mode": ("not %s",),
    "tensor": ("y * 1", "%s + 1", "y.detach().clone()", "%s * 0.5 + y"),
    "optional": ("y * 2", "None", "y if %s is None else None"),
}

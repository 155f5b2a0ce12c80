"""A capture that is refused half-way leaves Python's state as it was, in order."""

from __future__ import annotations

import array
import copy
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

pytestmark = pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")


class Thing:
    def __init__(self, v: object = 0) -> None:
        self.v = v

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


class Slots:
    __slots__ = ("v", "w")

    def __init__(self, v: object = 0) -> None:
        self.v = v

    def __repr__(self) -> str:
        return f"Slots({self.v}, {getattr(self, 'w', None)})"


class Sealed(list):  # type: ignore[type-arg]
    """Its own methods are not called by a rollback."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("sealed")

    def __delitem__(self, key: Any) -> None:
        raise TypeError("sealed")

    def clear(self) -> None:
        raise TypeError("sealed")


class Turned(OrderedDict):  # type: ignore[type-arg]
    """Tells its keys in another order than it has them."""

    def __iter__(self) -> Any:
        return iter(list(OrderedDict.__iter__(self))[::-1])


class Net(nn.Module):
    """Changes its state, and then asks for a number that only the device knows."""

    def __init__(self, state: dict[str, object], change: Callable[[Any, int], object]) -> None:
        super().__init__()
        vars(self).update(state, n=0)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.change(self, self.n)
        return x * 2 if x.sum().item() > 1000 else x

    def shown(self) -> tuple[object, ...]:
        """The state in order, and which of its names are of one object."""
        state = {k: v for k, v in vars(self).items() if k not in _OF_MODULES}
        ids = list(map(id, state.values()))
        return list(state), repr(list(state.values())), [ids.index(i) for i in ids]


_OF_MODULES = {*vars(nn.Module()), "change"}
CASES: dict[str, tuple[Callable[[], dict[str, object]], Callable[[Any, int], object]]] = {}


def case(**state: object) -> Callable[[Callable[[Any, int], object]], Callable[[Any, int], object]]:
    def add(change: Callable[[Any, int], object]) -> Callable[[Any, int], object]:
        CASES[change.__name__] = lambda: copy.deepcopy(state), change
        return change

    return add


@case(items=[0])
def a_list_rebound(net: Any, n: int) -> None:
    net.items = [*net.items, n]


@case(items=(shared := [0]), same=shared)
def a_list_of_two_names(net: Any, n: int) -> None:
    net.items = [*net.same, n]
    net.same.append(n)
    net.same, net.items = net.items, net.same


@case(a=[1], b=[2])
def two_lists_swapped(net: Any, n: int) -> None:
    net.a, net.b = net.b, net.a


@case(items=[3, 1, 2])
def a_list_in_place(net: Any, n: int) -> None:
    net.items.sort(key=str)
    net.items.insert(1, n)
    net.items[0] = [n]
    net.items[0].append(net.items.pop())


@case(items=Sealed([1, 2, 3]))
def a_list_of_a_class(net: Any, n: int) -> None:
    list.__setitem__(net.items, 0, n)
    net.items.reverse()


@case(table={"a": 1, "b": 2, "c": 3})
def the_order_of_a_dict(net: Any, n: int) -> None:
    first = next(iter(net.table))
    net.table[first] = net.table.pop(first)


@case(table={"a": 1, "b": 2, "c": 3})
def a_dict_popped(net: Any, n: int) -> None:
    net.table[n] = net.table.popitem()


@case(table=OrderedDict(a=1, b=2, c=3))
def the_order_of_an_ordered_dict(net: Any, n: int) -> None:
    net.table.move_to_end(next(iter(net.table)))


@case(table=Turned(a=1, b=2, c=3))
def the_order_of_a_class(net: Any, n: int) -> None:
    net.table.move_to_end(next(OrderedDict.__iter__(net.table)))
    net.table[n] = n


@case(table=defaultdict(list), counts=Counter("aab"))
def dicts_of_other_classes(net: Any, n: int) -> None:
    net.table[n].append(n)
    net.table.default_factory = deque if n % 2 else list
    net.counts.update("cb")


@case(held={1, 2, 3, 4, 5})
def a_set_shrunk(net: Any, n: int) -> None:
    net.held.remove(n)


@case(held={8, 1, "a", "b"})
def a_set_grown(net: Any, n: int) -> None:
    net.held.discard(1)
    net.held.update({16 * n, n, "c"})


@case(held=set(range(100)))
def a_large_set(net: Any, n: int) -> None:
    net.held -= set(range(20 * n, 20 * n + 20))
    net.held.add(-n)


@case(line=deque([1, 2, 3], maxlen=3))
def a_deque(net: Any, n: int) -> None:
    net.line.rotate(1)
    net.line.appendleft(n)


@case(raw=bytearray(b"abc"), numbers=array.array("i", [1, 2, 3]))
def bytes_and_arrays(net: Any, n: int) -> None:
    net.raw[0] = n
    net.raw.append(n)
    net.numbers.append(net.numbers.pop(0))
    net.numbers.extend([n, n])


@case(box=Thing(1))
def an_object_rebound(net: Any, n: int) -> None:
    net.box = Thing((n, net.box.v))


@case(box=Thing(1), other=Thing([2]))
def the_attributes_of_an_object(net: Any, n: int) -> None:
    net.box.v, net.other.v = net.other.v, net.box.v
    del net.other.v
    net.other.more, net.other.v = n, [n]
    net.box.__dict__ = {"w": n, **vars(net.box)}


@case(box=Slots(1))
def the_slots_of_an_object(net: Any, n: int) -> None:
    net.box.v = [net.box.v]
    net.box.w = n


@case(box=Slots(1))
def a_slot_that_only_the_capture_sets(net: Any, n: int) -> None:
    if n == 2:
        net.box.w = [n]


@case(kind=Thing())
def the_class_of_an_object(net: Any, n: int) -> None:
    net.kind.__class__ = type(f"Thing{n}", (Thing,), {})


@case(box=types.SimpleNamespace(a=1))
def an_attribute_of_a_class(net: Any, n: int) -> None:
    kind: Any = type(net)
    kind.seen = [*getattr(kind, "seen", ()), n]


@case(f=None)
def the_defaults_of_a_function(net: Any, n: int) -> None:
    net.f = net.f or types.FunctionType(_one.__code__, {}, "f", (1,))
    net.f.__defaults__ = (net.f() + n,)
    net.f.seen = [n]
    net.last = net.f()


def _one(a: int = 1) -> int:
    return a


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_then_runs_eagerly(rand: Rand, name: str) -> None:
    state, change = CASES[name]
    worlds = [type("World", (Net,), {})(state(), change) for _ in range(2)]
    eager, graphed = worlds
    fast = ol.graph(graphed, warmup=1, on_refusal="eager")
    with torch.no_grad():
        for i in range(4):
            assert_same(fast(rand(i, 3)), eager(rand(i, 3)))
            got, expected = graphed.shown(), eager.shown()
            assert (got[0], got[2]) == (expected[0], expected[2])
            assert got[1].replace(_address(graphed), "") == expected[1].replace(_address(eager), "")
            assert getattr(type(graphed), "seen", None) == getattr(type(eager), "seen", None)


def _address(net: Any) -> str:
    """The text of a function, which tells its address."""
    return repr(getattr(net, "f", "no function"))


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_raises(rand: Rand, name: str) -> None:
    state, change = CASES[name]
    net = type("World", (Net,), {})(state(), change)
    fast = ol.graph(net, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        seen = net.shown(), getattr(type(net), "seen", None)
        with pytest.raises(ol.CaptureError, match="OL101"):
            fast(rand(1, 3))
    assert (net.shown(), getattr(type(net), "seen", None)) == seen


def test_what_requires_grad(device: torch.device, rand: Rand) -> None:
    plain, written, weight = rand(7, 3), rand(8, 3), nn.Parameter(rand(9, 3))
    factor = nn.Parameter(rand(6, 3), requires_grad=False)  # else the second call is refused ahead

    def f(x: Tensor) -> Tensor:
        plain.requires_grad_()
        with torch.enable_grad():
            written.mul_(factor)
            (weight * x).sum().backward()
        return x * 2 if x.sum().item() > 1000 else x

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        plain.requires_grad_(False)
        factor.requires_grad_()
        weight.grad = None
        with pytest.raises(ol.CaptureError, match="OL101"):
            fast(rand(1, 3))
    assert not plain.requires_grad
    assert not written.requires_grad
    assert written.is_leaf
    assert weight.grad is None


seen: list[int] = []
last: list[int] = []


def test_globals_and_variables(rand: Rand) -> None:
    count, line = 0, deque([0])
    seen.clear()
    globals()["last"] = [0]

    def f(x: Tensor) -> Tensor:
        nonlocal count, line
        global last
        count, line, last = count + 1, deque([*line, count]), [*last, count]
        seen.append(count)
        return x * 2 if x.sum().item() > 1000 else x

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 3))
    assert count == 4
    assert list(line) == [0, 0, 1, 2, 3]
    assert last == [0, 0, 1, 2, 3]
    assert seen == [1, 2, 3, 4]


class Late:
    """State that only `late` reads, which runs for the first time in the call that is captured."""

    def __init__(self) -> None:
        self.on = False
        self.h = 0.0
        self.items: list[int] = []
        self.queue = deque([1])
        self.kinds: defaultdict[str, int] = defaultdict(int)
        self.bytes = bytearray(b"a")
        self.thing = Thing(Thing([0]))
        self.slots = Slots(0)
        self.named = types.SimpleNamespace(count=0, seen={1})

    def late(self) -> None:
        self.items.append(len(self.items))
        self.queue.appendleft(len(self.queue))
        self.kinds["k"] += 1
        self.bytes.append(1)
        self.thing.v.v[0] += 1
        self.thing.v.w = Thing(self.thing.v.v)
        self.slots.v += 1
        self.named.count += 1
        self.named.seen.add(len(self.named.seen) + 1)

    def shown(self) -> str:
        return repr({k: v for k, v in vars(self).items() if k not in ("on", "h")})


def stored(s: Any, x: Tensor) -> Tensor:
    """The capture runs twice: `h` becomes an input."""
    if s.on:
        s.late()
    s.h = s.h * 0.5 + x.mean(0)
    return s.h * 2


def refused(s: Any, x: Tensor) -> Tensor:
    if s.on:
        s.late()
        return x if float(x.sum()) > 1000 else x + 1
    return x + 1


LATE: list[tuple[Any, dict[str, Any]]] = [
    (stored, {}),
    (stored, {"on_refusal": "eager", "compile": True}),
    (stored, {"inputs": "rebind"}),
    (refused, {"on_refusal": "eager"}),
    (refused, {"on_refusal": "eager", "compile": True}),
]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("f", "options"), LATE)
@pytest.mark.parametrize("calls", [3, 5])
def test_what_a_capture_is_the_first_to_read(
    rand: Rand, f: Any, options: dict[str, Any], calls: int
) -> None:
    eager, graphed = Late(), Late()
    fast = ol.graph(lambda x: f(graphed, x), **options)
    with torch.no_grad():
        for i in range(12):
            eager.on = graphed.on = i >= calls and i % 4 == calls % 4
            x = rand(i, 3, 3)
            torch.testing.assert_close(fast(x), f(eager, x))
            assert graphed.shown() == eager.shown(), i


def test_an_optimizer_that_first_steps_in_a_capture(rand: Rand) -> None:
    """As of an actor that learns in every fourth call."""

    def losses(graphs: bool) -> tuple[list[Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        device = rand(0, 1).device
        actor, critic = nn.Linear(3, 3).to(device), nn.Linear(3, 1).to(device)
        acts = torch.optim.SGD(actor.parameters(), 0.1, momentum=0.9)
        judges = torch.optim.SGD(critic.parameters(), 0.1)
        calls = 0

        def step(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            judges.zero_grad()
            loss = critic(x).square().mean()
            loss.backward()
            judges.step()
            if calls % 4 == 0:
                acts.zero_grad()
                (-critic(actor(x)).mean()).backward()
                acts.step()
            return loss.detach()

        fast = ol.graph(step, on_refusal="eager") if graphs else step
        found = [fast(rand(i, 4, 3)) for i in range(12)]
        return found, {**actor.state_dict(), "calls": calls}

    assert_same(losses(True), losses(False))


def test_what_a_capture_does_not_read_is_left_to_other_threads(rand: Rand) -> None:
    """A thread fills a queue while a capture runs and is refused."""
    state, begun, filled = Late(), threading.Lock(), threading.Lock()  # a lock is no state
    assert begun.acquire()
    assert filled.acquire()

    def fill() -> None:
        with begun:
            state.queue.append(2)
        filled.release()

    def f(x: Tensor) -> Tensor:
        if state.on:
            state.late = 3  # type: ignore[method-assign]
            if begun.locked():
                begun.release()
                assert filled.acquire(timeout=10)
            return x if float(x.sum()) > 1000 else x + 1
        return x * 2

    fast, other = ol.graph(f, warmup=1), threading.Thread(target=fill)
    other.start()
    with torch.no_grad():
        fast(rand(0, 3))
        state.on = True
        assert_same(fast(rand(1, 3)), rand(1, 3) + 1)  # it reads the host for the first time
        del state.late
        with pytest.raises(ol.CaptureError, match="OL101"):
            fast(rand(1, 3))
    other.join()
    assert list(state.queue) == [1, 2]
    assert "late" not in vars(state)


def test_what_a_run_that_stands_changed_stays(rand: Rand) -> None:
    """The callable's own exception is the caller's, as in eager, and so is what it did before."""
    net = Thing([0])

    def f(x: Tensor) -> Tensor:
        net.v = [*net.v, 1]
        net.last = Thing()
        if len(net.v) == 3:
            raise ValueError("of the user")
        return x * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        with pytest.raises(ValueError, match="of the user"):
            fast(rand(1, 3))
    assert net.v == [0, 1, 1]


def test_a_large_list_is_copied_once_for_an_attempt(
    rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onelaunch.state import rollback

    made: list[int] = []
    of = rollback._contents
    monkeypatch.setattr(
        rollback,
        "_contents",
        lambda c: made.append(id(c)) or of(c),  # type: ignore[func-returns-value]
    )
    numbers = list(range(100_000))
    fast = ol.graph(lambda x: x * numbers[3], warmup=1)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
    assert replays(fast) == 2
    assert made.count(id(numbers)) == 1


def test_warming_up_ahead_of_a_call(rand: Rand) -> None:
    net = Thing(OrderedDict(a=1, b=2))
    items = [net]

    def f(x: Tensor) -> Tensor:
        net.v.move_to_end("a")
        items[:] = [*items, net]
        return x * 2

    with torch.no_grad(), pytest.raises(ol.CaptureError, match="OL110"):
        ol.graph(f).capture(rand(0, 3))
    assert list(net.v) == ["a", "b"]
    assert items == [net]

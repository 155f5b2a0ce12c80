"""Programs as people write them, run twice: eagerly, and with what they graph graphed.

A program is a function of a `Run`. It builds its model and its data, passes what is to be graphed
through `run.graph`, and shows through `run.see` what a user would look at. `play` runs it twice
with the same seeds and compares all that was seen, then and at the end, and the random state that
is left.
"""

from __future__ import annotations

import dataclasses
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn

import onelaunch as ol
from tests.device.drop_in import bits, describe, random_tensor

Kind = Literal["training", "inference"]
Verdict = Literal["replayed", "refused", "wrong", "error"]

TOLERANCE = {
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-3, 1e-4),
    torch.bfloat16: (3e-2, 2e-2),
    torch.float16: (1e-2, 5e-3),
}
"""Relative and absolute, on a GPU, where atomics and cuBLAS's choices move the last bits."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One program, and what is to come of it.

    Attributes:
        on: the kinds of device that it runs on.
        refused: for a kind of device, the code of the CaptureError that ends it, or of the warning
            that tells that nothing of it was graphed.
        warns: the codes of the warnings that it gives, as many as there may be.
        replays: at least so many launches.
        recordings: at most so many captures, of all that it graphs together.
        exact: on a CPU the results are eager's bit for bit. False where the documents say that the
            order of a sum differs.
    """

    name: str
    kind: Kind
    body: Callable[[Run], None]
    on: tuple[str, ...] = ("cpu", "cuda")
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warns: tuple[str, ...] = ()
    replays: int = 3
    recordings: int = 4
    exact: bool = True

    @property
    def file(self) -> str:
        """The file that it is written in, without its ending."""
        return self.body.__module__.rpartition(".")[2]


PROGRAMS: dict[str, Program] = {}


def _register(kind: Kind, options: dict[str, Any]) -> Callable[[Any], Any]:
    def register(body: Callable[[Run], None]) -> Callable[[Run], None]:
        name = body.__name__
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, kind, body, **options)
        return body

    return register


def training(**options: Any) -> Callable[[Any], Any]:
    """Enter a function as a training program; the options are `Program`'s."""
    return _register("training", options)


def inference(**options: Any) -> Callable[[Any], Any]:
    """Enter a function as an inference program."""
    return _register("inference", options)


@dataclasses.dataclass
class Outcome:
    """What became of a program.

    Attributes:
        exact: whether all results were eager's bit for bit; None where they were not compared.
    """

    verdict: Verdict
    code: str | None = None
    warned: tuple[str, ...] = ()
    replays: int = 0
    captures: int = 0
    exact: bool | None = None
    text: str = ""

    def unexpected(self, program: Program, device: torch.device) -> str | None:
        """What of it is not as the program says; None where all is."""
        code = program.refused.get(device.type)
        if device.type == "tape" and self.code in program.refused.values():
            code = self.code  # it refuses as CUDA does, and libraries take it for a CPU
        wanted = "replayed" if code is None else "refused"
        if (self.verdict, self.code) != (wanted, code):
            return f"{self.verdict} {self.code or ''}, expected {wanted} {code or ''}\n{self.text}"
        if not set(self.warned) <= set(program.warns):
            return f"warned: {self.text or self.warned}"
        if code is None and self.replays < program.replays:
            return f"{self.replays} replays, expected {program.replays} at least"
        if self.captures > program.recordings:
            return f"{self.captures} recordings were made, expected {program.recordings} at most"
        return None


class Run:
    """One run of a program.

    Attributes:
        device: where its tensors live.
        graphs: what it graphed; nothing in the eager run.
    """

    def __init__(self, device: torch.device, graphed: bool) -> None:
        self.device = device
        self.graphs: list[Any] = []
        self.seen: list[tuple[str, Any]] = []
        self._graphed = graphed
        self._kept: list[tuple[str, Any]] = []

    def graph(self, fn: Any = None, **options: Any) -> Any:
        """`ol.graph` in the graphed run, and in the eager one the callable itself."""
        if fn is None:
            return lambda f: self.graph(f, **options)
        if self._graphed:
            fn = ol.graph(fn, **options)
            self.graphs.append(fn)
        return fn

    def see(self, *values: Any, **named: Any) -> None:
        """Note what is to be equal: now, and once more when the program has ended."""
        for name, value in [*enumerate(values), *named.items()]:
            label = f"{len(self.seen)}: {name}"
            held = _detached(value)
            self.seen.append((label, _noted(held)))
            self._kept.append((f"{label}, at the end", held))

    def rand(self, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values that depend on the seed and the shape alone."""
        return random_tensor(seed, *shape, dtype=dtype, device=self.device)

    def ints(self, seed: int, high: int, *shape: int, low: int = 0) -> Tensor:
        """Integers from `low` up to `high`, which is left out."""
        generator = torch.Generator().manual_seed(2000 + seed)
        return torch.randint(low, high, shape, generator=generator).to(self.device)

    def close(self) -> None:
        """Note what was seen as it is now, and the random state that is left."""
        self.seen += [(label, _noted(value)) for label, value in self._kept]
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        states["numpy"] = [str(part) for part in numpy.random.get_state()]
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        self.seen += [(f"random state of {name}", _noted(s)) for name, s in states.items()]


@dataclasses.dataclass
class _Noted:
    """A tensor as it was: what can be asked of it, and its values on the host."""

    about: dict[str, object]
    values: Tensor


@dataclasses.dataclass
class _Held:
    """A tensor that a program showed: its memory without its graph, which would count as in use."""

    about: dict[str, object]
    memory: Tensor


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """What a container holds; None of anything else. Caches hold layers, and these tensors."""
    if isinstance(value, nn.Module):
        return iter(value.state_dict().items())
    if isinstance(value, Mapping):
        return ((repr(key), child) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return ((str(i), child) for i, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    if type(value).__module__ == "transformers.cache_utils":
        return iter(sorted(vars(value).items()))
    return None


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Held(describe(value), value.detach())
    children = _children(value)
    if children is None:
        return value
    return type(value).__name__, [(name, _detached(child)) for name, child in children]


def _noted(value: Any) -> Any:
    if isinstance(value, _Held):
        value = _Noted(value.about, value.memory.to("cpu", copy=True))
    elif isinstance(value, Tensor):
        value = _Noted(describe(value), value.detach().to("cpu", copy=True))
    elif isinstance(value, (list, tuple)):
        value = [_noted(child) for child in value]
    return value


def _differences(got: Any, expected: Any, at: str, exact: bool) -> Iterator[str]:
    """Where two notes differ."""
    if isinstance(expected, _Noted) and isinstance(got, _Noted):
        if got.about != expected.about:
            yield f"{at}: {got.about} is not {expected.about}"
        elif not _equal(got.values, expected.values, exact):
            yield f"{at}: {got.values.flatten()[:6]} is not {expected.values.flatten()[:6]}"
    elif isinstance(expected, list) and isinstance(got, list) and len(got) == len(expected):
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            yield from _differences(a, b, f"{at}[{i}]", exact)
    elif isinstance(expected, float) and isinstance(got, float) and not exact:
        if abs(got - expected) > 1e-4 + 1e-3 * abs(expected):
            yield f"{at}: {got} is not {expected}"
    elif isinstance(expected, (bool, int, float, str, type(None), torch.dtype, list, _Noted)):
        nan = isinstance(got, float) and got != got and expected != expected
        if not nan and got != expected:
            yield f"{at}: {got!r} is not {expected!r}"


def _equal(got: Tensor, expected: Tensor, exact: bool) -> bool:
    if got.layout != torch.strided:
        got, expected = got.to_dense(), expected.to_dense()
    if exact or expected.dtype not in TOLERANCE:
        return torch.equal(bits(got), bits(expected))
    rtol, atol = TOLERANCE[expected.dtype]
    return torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def compare(got: Run, expected: Run, exact: bool) -> str | None:
    """The first difference between two runs; None where there is none."""
    if [label for label, _ in got.seen] != [label for label, _ in expected.seen]:
        return f"{len(got.seen)} things were seen, and {len(expected.seen)} in eager"
    for (label, a), (_, b) in zip(got.seen, expected.seen, strict=True):
        for difference in _differences(a, b, label, exact):
            return difference
    return None


def _once(program: Program, device: torch.device, graphed: bool) -> tuple[Run, Exception | None]:
    """One run, and what ended it early."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    run = Run(device, graphed)
    try:
        program.body(run)
        run.close()
    except Exception as error:  # noqa: BLE001  the caller says what becomes of it
        return run, error
    return run, None


def _without_atomics(program: Program, device: torch.device) -> str | None:
    """How two runs differ whose kernels add in one order: atomics alone move a sum's last bits,
    and training makes more of them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (eager, _), (fast, failed) = (_once(program, device, graphed=g) for g in (False, True))
            return _told(failed) if failed is not None else compare(fast, eager, exact=False)
    finally:
        torch.use_deterministic_algorithms(before)


def play(program: Program, device: torch.device) -> Outcome:
    """Run a program eagerly and graphed, and say what became of it."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("ignore")  # what libraries warn of is theirs
        warnings.simplefilter("always", ol.GraphWarning)
        eager, failed = _once(program, device, graphed=False)
        if failed is not None:
            return Outcome("error", text=f"in eager: {_told(failed)}")
        fast, failed = _once(program, device, graphed=True)
    stats = [graph.stats() for graph in fast.graphs]
    outcome = Outcome(
        "replayed",
        warned=tuple(_codes([str(w.message) for w in raised])),
        replays=sum(s.replays for s in stats),
        captures=sum(s.captures for s in stats),
        text="\n".join(str(w.message) for w in raised),
    )
    if isinstance(failed, ol.CaptureError):
        outcome.verdict, outcome.code, outcome.text = "refused", failed.code, str(failed)
    elif failed is not None:
        outcome.verdict, outcome.text = "error", _told(failed)
    else:
        outcome.exact = compare(fast, eager, exact=True) is None
        difference = compare(fast, eager, exact=program.exact and device.type != "cuda")
        if difference is not None and device.type == "cuda":
            difference = _without_atomics(program, device)
        if difference is not None:
            outcome.verdict, outcome.text = "wrong", f"{difference}\n{outcome.text}"
    if outcome.verdict == "replayed" and outcome.replays == 0 and outcome.warned:
        outcome.verdict, outcome.code = "refused", outcome.warned[0]
    for graph in fast.graphs:
        graph.reset()
    return outcome


def _codes(texts: Sequence[str]) -> list[str]:
    """The codes in square brackets at the beginning of messages."""
    return sorted({text[1:].partition("]")[0] for text in texts})


def _told(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-12:])

"""What comes out of a call that fails, and what it leaves switched on: nothing."""

from __future__ import annotations

import dis
import functools
import gc
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, refused, replays


def scripted(source: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch 2.15 on TorchScript is deprecated
        return torch.jit.CompilationUnit(source)


INTERPRETED = """
def branching(x):
    if bool(x.sum() > 0):
        return x * 2
    return x

def reading(x):
    return x * float(x.max())

def growing(x):
    return torch.nonzero(x)
"""

SWALLOWED: dict[str, Callable[[Tensor], Any]] = {}


def swallowed(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    SWALLOWED[f.__name__] = f
    return f


@swallowed
def caught(x: Tensor) -> Tensor:
    with suppress(RuntimeError):
        return x * x.max().item()
    return x


@swallowed
def another(x: Tensor) -> Tensor:
    try:
        return x * x.max().item()
    except RuntimeError as error:
        raise ValueError("no maximum") from error


@swallowed
def another_in_handler(x: Tensor) -> Tensor:
    try:
        return x * x.max().item()
    except RuntimeError:
        raise KeyError("no maximum")  # noqa: B904


@swallowed
def printed(x: Tensor) -> Tensor:
    try:
        return x * len(x.tolist())
    except RuntimeError as error:
        raise ValueError("no list") from error


@pytest.mark.parametrize("name", ["branching", "reading", "growing"])
def test_a_refusal_in_torchscript(rand: Rand, name: str) -> None:
    function = getattr(scripted(INTERPRETED), name)

    def f(x: Tensor) -> Tensor:
        return function(x)  # the line

    with torch.no_grad():
        error = refused(ol.graph(f, warmup=1), rand(0, 3))
    assert error.code in ("OL101", "OL102")
    assert "# the line" in (error.where or "")
    eager = ol.graph(f, warmup=1, on_refusal="eager")
    with pytest.warns(ol.GraphWarning, match=error.code):
        alike(eager, f, rand, 3, calls=2)
    alike(eager, f, rand, 3)


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_refusal_that_the_callable_makes_something_of(rand: Rand, name: str) -> None:
    with torch.no_grad():
        refused(ol.graph(SWALLOWED[name], warmup=1), rand(0, 3), match="OL101")


# Modes.


def modes() -> dict[str, object]:
    """All that is switched on in this thread."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "autocast dtype": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "functorch": torch._C._functorch.peek_interpreter_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "profile": sys.getprofile(),
        "collector": gc.isenabled(),
        "keys": str(torch._C._dispatch_tls_local_exclude_set()),
        "keys of modes": [
            torch._C._dispatch_tls_is_dispatch_key_included(key)
            for key in ("Python", "PythonTLSSnapshot")
        ],
    }


@contextmanager
def every_mode(kind: str) -> Generator[None]:
    """Modes that a callable switches on for itself."""
    kind = "cpu" if kind == "tape" else kind
    with (
        torch.autocast(kind, torch.bfloat16, cache_enabled=False),
        torch.enable_grad(),
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        yield


class Custom(torch.autograd.Function):
    raising: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if Custom.raising is not None:
            raise Custom.raising
        return grad * 2


class Stop(BaseException):
    """What is no `Exception`."""


class Failing(nn.Module):
    """Fails in call number `at`, in a way of its own."""

    def __init__(self, device: torch.device, how: str, at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, device=device)
        self.how, self.at, self.calls = how, at, [0]
        self.inner = ol.graph(lambda x: torch.tanh(self.fail(x)), warmup=1)

    def fail(self, x: Tensor) -> Tensor:
        if self.calls[0] != self.at:
            return x
        if self.how == "refusal":
            x.sum().item()
        elif self.how == "error":
            raise ValueError("of the user")
        elif self.how == "torch's error":
            x @ x.new_ones(7, 7)
        elif self.how == "interrupt":
            raise KeyboardInterrupt
        elif self.how == "exit":
            raise SystemExit
        elif self.how == "stop":
            raise Stop
        elif self.how == "memory":
            raise torch.OutOfMemoryError("of the user")
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        with every_mode(x.device.type):
            y = self.linear(x)
            with torch.no_grad():
                y = y + self.fail(y)
            y = y.float() + self.inner(x)
        return y if torch.is_grad_enabled() else y.detach()


WAYS = ("refusal", "error", "torch's error", "interrupt", "exit", "stop", "memory")


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("at", [1, 2, 3], ids=["warm-up", "second", "capture"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_no_mode_is_left_on(
    device: torch.device, rand: Rand, how: str, at: int, grad: bool
) -> None:
    model = Failing(device, how, at)
    fast = ol.graph(model, warmup=2)
    before = modes()
    with torch.set_grad_enabled(grad):
        inside = modes()
        for i in range(6):
            with suppress(BaseException):
                y = fast(rand(i, 3, 4))
                if grad:
                    y.sum().backward()
            assert modes() == inside
    assert modes() == before
    if at != 3 or how not in ("refusal", "memory"):  # which undo the count, and come again
        assert replays(fast) > 0
    _others_go_on(rand)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_dispatch_key_of_modes_is_not_left_on(device: torch.device, rand: Rand, at: int) -> None:
    """As by a guard of torch's that ends after the mode in it was popped."""
    calls = count()

    def f(x: Tensor) -> Tensor:
        if next(calls) == at:
            torch._C._dispatch_tls_set_dispatch_key_included("Python", True)
            raise KeyboardInterrupt
        return x * 2

    fast = ol.graph(f, warmup=2, on_refusal="eager")
    before = modes()
    for i in range(4):
        with suppress(KeyboardInterrupt), torch.no_grad():
            fast(rand(i, 3))
        assert modes() == before


@pytest.mark.parametrize("how", [ValueError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_no_mode_is_left_on_by_a_backward(
    device: torch.device, rand: Rand, how: type[BaseException], at: int
) -> None:
    fast = ol.graph(lambda x, w: Custom.apply(x @ w), warmup=1)
    before = modes()
    try:
        for i in range(5):
            Custom.raising = how("in a backward") if i == at else None
            w = rand(9, 4, 4).requires_grad_()
            with suppress(how):
                fast(rand(i, 3, 4), w).sum().backward()
            assert modes() == before
    finally:
        Custom.raising = None
    _others_go_on(rand)


def _others_go_on(rand: Rand) -> None:
    """No lock is held, no thread is taken for one that warms up or captures."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            fast = ol.graph(lambda x: x * 2, warmup=1)
            alike(fast, lambda x: x * 2, rand, 3, calls=4)
            assert replays(fast) == 3
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not failed, failed


MODES = ("/torch/overrides.py", "/torch/utils/_python_dispatch.py", "/contextlib.py")


GUARD = "/onelaunch/testing/engine.py"
"""The emulated device's guard, which C++ calls where nothing may raise: that ends the process."""


def in_a_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a thread of its own.

    Where a trace raises on the last line of an `except`, Python 3.11 does not come to the
    instruction that ends the handling, and the thread goes on in it: each later exception has that
    one, and the frames that it holds, for a context.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test, *args, **kwargs).result()

    return run


class _Interrupt:
    """A trace that raises at the line number `step` that runs in Python, in `files`."""

    def __init__(self, step: int, files: tuple[str, ...]) -> None:
        self.left, self._files = step, files
        self.where = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name.endswith(GUARD):
            return None
        if event == "line" and name.endswith(self._files) and self.left > 0:
            self.left -= self.left > 1 or not _leaves_with(frame)
            if self.left == 0:
                self.where = "".join(traceback.format_stack(frame, limit=12))
                raise KeyboardInterrupt
        return self


def _leaves_with(frame: Any) -> bool:
    """Return whether a frame is between the block of a `with` and its exit, a lock's release, say.

    Python looks for a Ctrl-C after calls and at jumps, and never there; a trace may raise there,
    and the lock would be held for good.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    at += 2 * (dis.opname[code[at]] == "SWAP")  # over what the block returns
    given = [(dis.opname[code[i]], code[i + 1]) for i in range(at, min(at + 6, len(code)), 2)]
    return len(given) == 3 and all(
        name == "LOAD_CONST" and frame.f_code.co_consts[number] is None for name, number in given
    )


def _in_every_mode(device: torch.device) -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device)

    def f(x: Tensor) -> Tensor:
        with every_mode(x.device.type):
            y = model(x).float()
        return y if torch.is_grad_enabled() else y.detach()

    return f


def test_a_trace_spares_the_exit_of_a_with() -> None:
    spared: list[int] = []
    lock = threading.Lock()

    def f() -> int:
        with lock:
            return 1

    def g() -> None:
        with lock:
            pass

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and _leaves_with(frame):
            spared.append(frame.f_lineno - frame.f_code.co_firstlineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f()
        g()
    finally:
        sys.settrace(before)
    assert spared == [1, 1]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("files", "every"), [(("",), 8), (MODES, 30)], ids=["anywhere", "as modes change"]
)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@in_a_thread
def test_an_interrupt_leaves_no_mode_on(
    device: torch.device, rand: Rand, grad: bool, files: tuple[str, ...], every: int
) -> None:
    """Ctrl-C comes between any two lines, those of torch and onelaunch too."""
    with torch.set_grad_enabled(grad):
        assert _interrupt_captures(_in_every_mode(device), rand, files, every) > 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("files", [MODES, ("/gc_pause.py",)], ids=["modes", "collector"])
@in_a_thread
def test_an_interrupt_leaves_no_mode_on_with_buckets(
    device: torch.device, rand: Rand, files: tuple[str, ...]
) -> None:
    with torch.no_grad():
        _interrupt_captures(lambda x: x * 2, rand, files, 12, buckets=ol.Buckets(0, (4,)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@in_a_thread
def test_a_debugger_sees_a_capture(device: torch.device, rand: Rand, grad: bool) -> None:
    """A frame that is traced keeps more references than another."""

    def trace(frame: Any, event: str, arg: Any) -> Any:
        return trace

    fast = ol.graph(_in_every_mode(device))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.set_grad_enabled(grad):
            for i in range(5):
                fast(rand(i, 3, 4))
    finally:
        sys.settrace(before)
    assert replays(fast) == 2


def _interrupt_captures(
    f: Any, rand: Rand, files: tuple[str, ...], every: int, **options: Any
) -> int:
    """Interrupt one capture after another, each later than the last; return how late the last."""
    before = modes()
    step = 1
    while True:
        fast = ol.graph(f, warmup=1, **options)
        interrupt = _Interrupt(step, files)
        fast(rand(0, 3, 4))
        x = rand(1, 3, 4)
        # Python loses what is raised in a `__del__`; pytest's hook would keep it, and its frames.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        sys.settrace(interrupt)
        try:
            fast(x)  # captures
        except KeyboardInterrupt:
            pass
        except ol.CaptureError as error:
            raise AssertionError(f"the interrupt of\n{interrupt.where} is lost") from error
        finally:
            sys.settrace(None)
            sys.unraisablehook = hook
        left = {k: (v, before[k]) for k, v in modes().items() if v != before[k]}
        assert not left, f"{step}: {left} after\n{interrupt.where}"
        if interrupt.left > 0:
            break
        step += max(1, step // every)
    _others_go_on(rand)
    return step

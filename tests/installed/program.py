"""A program for an installed onelaunch, with torch alone beside it, as `test_installed.py` runs it.

    python program.py ROOT README.md [NATIVE]

Args:
    ROOT: the folder or zip that onelaunch comes from.
    README.md: its first two blocks are run, a model and a training step.
    NATIVE: the beginning of what is said of the check in C.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch import testing
from onelaunch.state.native_guard import native_guard
from onelaunch.tools.report.document import Document
from onelaunch.tools.report.page import page

DEVICES = ("cuda",) if torch.cuda.is_available() else ("cpu", "tape")
scale = 2.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() * self.factor * scale


def holds(claim: bool, what: object) -> None:
    """Raise where a claim does not hold; `assert` does nothing under -O."""
    if not claim:
        raise AssertionError(what)


def runs_the_readme(readme: str) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", Path(readme).read_text(), re.DOTALL | re.MULTILINE
    )
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks[:2]:
        exec(compile(block, readme, "exec"), namespace)
    holds(namespace["fast"].recordings[0].replays == 97, namespace["fast"].recordings)


def trains(device: str) -> None:
    model = Scaled().to(device)
    twin = copy.deepcopy(model)
    fast: Any = ol.graph(model)
    for net, run in ((model, fast), (twin, twin)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(8):
            optimizer.zero_grad()
            run(torch.randn(4, 8).to(device)).square().mean().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    holds(fast.recordings[0].replays == 5, fast.recordings)


def sees_what_changes(device: str) -> None:
    """An attribute and a global of the program, which a recording holds as constants."""
    global scale
    model = Scaled().to(device)
    fast: Any = ol.graph(model)
    x = torch.randn(4, 8).to(device)
    with torch.no_grad():
        for factor, now in ((1.0, 2.0), (3.0, 2.0), (3.0, 5.0), (1.0, 5.0)):
            model.factor, scale = factor, now
            for _ in range(5):
                torch.testing.assert_close(fast(x), model(x))
    holds(len(fast.recordings) == 4, fast.recordings)


def is_refused(device: str, code: str, fn: Callable[[Tensor], Tensor]) -> None:
    """The refusal names the line of the program."""
    fast: Any = ol.graph(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(6):
                fast(torch.ones(4).to(device))
        except ol.CaptureError as error:
            line = f"{Path(__file__).name}:{fn.__code__.co_firstlineno}: "
            holds(error.code == code and line in str(error.where), error)
            return
    raise AssertionError(f"{fn} was captured")


def main(root: str, readme: str, native: str = "in use") -> None:
    warnings.simplefilter("error")  # torch has been imported, which says that it found no NumPy
    if "tape" in DEVICES:
        testing.install()  # before a backward: it counts the devices
    holds(str(ol.__file__).startswith(root), ol.__file__)
    holds(importlib.util.find_spec("numpy") is None, "NumPy is here")
    runs_the_readme(readme)
    holds(native_guard().reason.startswith(native), native_guard().reason)
    for device in DEVICES:
        trains(device)
        sees_what_changes(device)
        is_refused(device, "OL117", lambda x: x * random.random())
    is_refused(DEVICES[-1], "OL101", lambda x: x / x.norm().item())
    (found, *_) = ol.diagnose(lambda x: x / x.norm().item(), (torch.ones(8),)).findings
    holds(found.file.endswith(Path(__file__).name), found)
    nothing = Document(command="", title="", answer=("",))
    holds(":root" in page(nothing), "the page has no style")
    print("it runs")


if __name__ == "__main__":
    main(*sys.argv[1:])

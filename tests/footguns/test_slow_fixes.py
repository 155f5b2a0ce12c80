"""The fix of each finding that is slow is tried: pasted into the program, it ends the finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onelaunch
from tests.footguns.pasted import Code, Part, Paste, pasted, replaced
from tests.footguns.slow_runs import BY_CODE, program, slow
from tests.footguns.slow_runs import settings as settings

APART = {"OL613": "another architecture, which no code says", "OL614": "see below"}
"""Rule -> why its fix is not pasted into the program."""
_LINEAR_ARGS = "args = (torch.randn(64, 1024),)\n"
_CONV_ARGS = "args = (torch.randn(1, 64, 56, 56),)\n"
_PRECISION = 'torch.set_float32_matmul_precision("{}")'
_BENCHMARK = "torch.backends.cudnn.benchmark"
_IMAGE = "args = (torch.randn(1, 3, 16, 16),)\n"


def after(line: str, *parts: Part) -> Paste:
    """Paste code as a line of its own, after another."""
    return replaced((line, line, *parts, "\n"))


PASTED: dict[str, Paste] = {
    "OL601": after("nn.Dropout(0.1))\n", Code("model.eval()", model="net")),
    "OL602": replaced(
        ("    return net(x)\n", "    ", Code("with torch.inference_mode():"), " return net(x)\n")
    ),
    "OL603": replaced(
        (
            _LINEAR_ARGS,
            Code("model.to(torch.bfloat16)"),
            "\nargs = (",
            Code("x.to(torch.bfloat16)", x="torch.randn(64, 1024)"),
            ",)\n",
        )
    ),
    "OL604": replaced((_PRECISION.format("highest"), Code(_PRECISION.format("high")))),
    "OL605": replaced((f"{_BENCHMARK} = False", Code(f"{_BENCHMARK} = True"))),
    "OL606": after(_CONV_ARGS, Code("model.to(memory_format=torch.channels_last)")),
    "OL607": after(
        _IMAGE,
        Code(
            "with torch.no_grad(): norm.running_mean -= layer.bias",
            norm="model[1]",
            layer="model[0]",
        ),
        "\n",
        Code("layer.bias = None", layer="model[0]"),
    ),
    "OL608": after(
        _IMAGE,
        Code(
            "model[0] = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1]); "
            "model[1] = nn.Identity()"
        ),
    ),
    "OL609": replaced(("nn.InstanceNorm2d(8)", Code("nn.BatchNorm2d(channels)", channels="8"))),
    "OL610": replaced(
        ("self.wide(x) + self.narrow(x)", "self.wide(x)"),
        (
            "model = Block().eval()\n",
            "model = Block().eval()\n",
            Code(
                "with torch.no_grad(): wide.weight += "
                "F.pad(narrow.weight, (1, 1, 1, 1)); wide.bias += narrow.bias",
                {"wide": "model.wide", "narrow": "model.narrow", "F": "nn.functional"},
            ),
            "\n",
        ),
    ),
    "OL611": replaced(
        ("nn.Linear(1024, 1001", "nn.Linear(1024, ", Code("(n + 7) // 8 * 8", n="1001")),
        ("nn.Linear(1001", "nn.Linear(", Code("(n + 7) // 8 * 8", n="1001")),
    ),
    "OL612": replaced(
        (
            "depthwise, nn.Conv2d(2, 4, 1)",
            Code(
                "nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2)",
                {"inputs": "2", "outputs": "4", "kernel_size": "3"},
            ),
        )
    ),
}
TRAINED_ANEW = {"OL601", "OL609", "OL611", "OL612"}
"""The fix changes what the model computes."""
ROUNDS = {"OL603": 0.05, "OL604": 1e-2, "OL606": 1e-4, "OL607": 1e-4, "OL608": 1e-4, "OL610": 1e-4}
"""Rule -> how far results move at most."""


def test_the_fix_of_each_rule_is_pasted() -> None:
    assert PASTED.keys() | APART.keys() == BY_CODE.keys()


@pytest.mark.parametrize("code", PASTED)
def test_a_fix_that_is_pasted_ends_the_finding(code: str, tmp_path: Path) -> None:
    rule, graded = BY_CODE[code], code == "OL602"
    torch.manual_seed(0)
    model, args = program(rule.example, tmp_path)
    (found,) = (f for f in slow(model, *args, grad=graded) if f.code == code)
    text = pasted(rule.example, PASTED[code], found.fix)
    torch.manual_seed(0)
    better, given = program(text, tmp_path)
    assert code not in {f.code for f in slow(better, *given, grad=graded)}
    if code not in TRAINED_ANEW:
        limit = ROUNDS.get(code, 0.0)
        with torch.no_grad():
            one, other = model(*args), better(*given).to(args[0].dtype)
        torch.testing.assert_close(other, one, rtol=limit, atol=limit)


def test_many_kernels_become_one_launch(tmp_path: Path) -> None:
    model, args = program(BY_CODE["OL614"].example, tmp_path)
    (found,) = (f for f in slow(model, *args) if f.code == "OL614")
    fast: Any = eval(found.fix, {"onelaunch": onelaunch, "model": model})
    for _ in range(6):
        torch.testing.assert_close(fast(*args), model(*args))
    assert len(fast.recordings) == 1
    assert fast.stats().replays > 0

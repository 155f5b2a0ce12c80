"""Modes and settings that slow inference down: one line at the start of a program changes each."""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule

_LIGHT = (
    "Work below 0.1 GFLOP in a call is not reported: it takes no longer than a launch. Recurrent "
    "layers are not counted, since torch's flop counter has no formula for them."
)
_SHORT = " The CPU stands for a GPU where there is none, and there it gains less or nothing."

_TWO_LINEAR = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).eval()
"""
_DROPPING = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)){mode}


def model(x):
    with torch.inference_mode():
        return net(x)


args = (torch.randn(4, 8),)
"""
_CALLED = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


{mode}def model(x):
    return net(x)


args = (torch.randn(4, 8),)
"""
_CONVOLUTION = """\
import torch
from torch import nn

model = nn.Conv2d(64, 64, 3, padding=1).eval()
args = (torch.randn(1, 64, 56, 56),)
"""

SETTINGS: tuple[Rule, ...] = (
    Rule(
        code="OL601",
        name="train-mode",
        severity="slow",
        title="train mode where no gradient is wanted",
        what="A module in train mode that then drops values, or takes the statistics of the batch, "
        "while autograd is off or no parameter requires grad; or a call such as "
        "`F.dropout(x, 0.1)`, which drops unless it is told not to, in a model in eval mode.",
        why="Dropout and the statistics of a batch cost kernels, and a batch norm in train mode "
        "cannot be folded into the convolution before it. And the results are wrong: they change "
        "from call to call, depend on the other rows of the batch, and each call moves the "
        "running statistics.",
        problems="Whoever wants it (Monte Carlo dropout, new statistics for a batch norm) "
        "allows it with a comment. Recurrent layers of torch are known by their class alone.",
        fix="call `model.eval()` before inference",
        example=_DROPPING.format(mode=""),
        instead=_DROPPING.format(mode=".eval()"),
    ),
    Rule(
        code="OL602",
        name="grad-mode",
        severity="slow",
        title="autograd records a call that has no backward",
        what="A model in eval mode whose results require grad, though nothing in the callable "
        "runs a backward.",
        why="Autograd makes a node for each operation, which costs the host microseconds, and "
        "keeps what a backward would need until the result is freed: the memory of all layers "
        "instead of one or two.",
        problems="A backward that the caller runs later is not seen. To stay silent where a model "
        "trains, nothing is reported if any module is in train mode, or if an argument requires "
        "grad; fine-tuning in eval mode is for a comment to allow.",
        fix="`model.requires_grad_(False)` where it never trains; or call it inside "
        "`with torch.inference_mode():`",
        example=_CALLED.format(mode=""),
        instead=_CALLED.format(mode="@torch.inference_mode()\n"),
    ),
    Rule(
        code="OL603",
        name="float32",
        severity="slow",
        title="float32 where half precision would do",
        what="More than half of the arithmetic of matrix products and convolutions is in float32. "
        "The finding is at the line with the most of it.",
        why="Tensor cores multiply float16 and bfloat16 twice as fast as TF32, and 16 times as "
        "fast as float32 without it (A100: 312, 156 and 19.5 TFLOP/s), and half the bytes cross "
        "the memory.",
        problems=f"Whether the results are still good enough is for you to measure: "
        f"`onelaunch compare` does, against float64. GPUs older than Volta are left out. {_LIGHT}"
        + _SHORT,
        fix="`model.to(torch.bfloat16)` and `x.to(torch.bfloat16)`, or call it inside "
        '`with torch.autocast("cuda", torch.bfloat16):`',
        example=_TWO_LINEAR + "args = (torch.randn(64, 1024),)\n",
        instead=_TWO_LINEAR
        + "model.to(torch.bfloat16)\nargs = (torch.randn(64, 1024, dtype=torch.bfloat16),)\n",
    ),
    Rule(
        code="OL604",
        name="tf32-off",
        severity="slow",
        title="float32 with TF32 off",
        what="Matrix products in float32 while torch's precision for them is the highest, which "
        "is its default, or convolutions in float32 with `torch.backends.cudnn.allow_tf32` off; "
        "where they are a tenth of the arithmetic or more.",
        why="TF32 rounds the factors to 10 bits of mantissa and adds in float32. Tensor cores "
        "then multiply 8 times as fast (A100: 156 and 19.5 TFLOP/s). Nothing else changes: neither "
        "code nor dtypes.",
        problems=f"It has no effect before Ampere, where it is not reported. {_LIGHT}" + _SHORT,
        fix='torch.set_float32_matmul_precision("high")',
        example=_TWO_LINEAR
        + """\
args = (torch.randn(64, 1024),)
torch.set_float32_matmul_precision("highest")
""",
        instead=_TWO_LINEAR
        + """\
args = (torch.randn(64, 1024),)
torch.set_float32_matmul_precision("high")
""",
    ),
    Rule(
        code="OL605",
        name="cudnn-benchmark-off",
        severity="slow",
        title="cuDNN may not look for the fastest algorithm",
        what="Convolutions that are a tenth of the arithmetic or more, with "
        "`torch.backends.cudnn.benchmark` off.",
        why="cuDNN has several algorithms for a convolution, and guesses which is best. With the "
        "setting on it measures them once for each shape, and keeps the fastest. A graph repeats "
        "the chosen one in every launch.",
        problems="Newer versions of cuDNN guess well, and often nothing is gained: measure it. The "
        "first call of each shape takes longer: with shapes that vary from call to "
        "call it does not pay, and one call does not show whether they do. Algorithms add in "
        "different orders, so that results may change in their last bits from run to run. Nothing "
        f"is reported where determinism is asked for. {_LIGHT}",
        fix="torch.backends.cudnn.benchmark = True",
        example=_CONVOLUTION + "torch.backends.cudnn.benchmark = False\n",
        instead=_CONVOLUTION + "torch.backends.cudnn.benchmark = True\n",
    ),
    Rule(
        code="OL606",
        name="contiguous-convolution",
        severity="slow",
        title="convolutions in contiguous layout",
        what="Two-dimensional convolutions whose input and weight are both laid out as (N, C, H, "
        "W), where they are a tenth of the arithmetic or more. One finding for all of them.",
        why="Tensor cores want the channels last. For other layouts cuDNN transposes the input "
        "and the result of each convolution, or takes a slower algorithm.",
        problems="It pays in half precision, and in TF32; in float32 without TF32 there is little "
        "to gain. An operation without a kernel for the layout copies back to contiguous, and from "
        f"there on it is lost. {_LIGHT}" + _SHORT,
        fix="`model.to(memory_format=torch.channels_last)`; the inputs follow by themselves, or "
        "with `x.to(memory_format=torch.channels_last)`",
        example=_CONVOLUTION,
        instead=_CONVOLUTION + "model.to(memory_format=torch.channels_last)\n",
    ),
)

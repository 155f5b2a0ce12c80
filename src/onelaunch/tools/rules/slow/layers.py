"""Rules on architectures that are slow in inference: norms, branches, channels, kernels."""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule

_HEAD = "import torch\nfrom torch import nn\n\n"
_IMAGES = "args = (torch.randn(1, 3, 16, 16),)\n"
_BRANCHES = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(8, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return torch.relu({result})


model = Block().eval()
{after}args = (torch.randn(1, 8, 16, 16),)
"""
_SCALES = """\
import torch

scales = torch.rand(150, 64)


def model(x):
{body}    return x


args = (torch.randn(16, 64),)
"""

LAYERS: tuple[Rule, ...] = (
    Rule(
        code="OL607",
        name="bias-before-norm",
        severity="slow",
        title="a bias right before a norm",
        what="A convolution with a bias whose result only a norm of each channel reads: a "
        "BatchNorm, an InstanceNorm, or a GroupNorm with a group for each channel.",
        why="On a GPU PyTorch adds the bias of a convolution by a kernel of its own (`add_` after "
        "`cudnn_convolution`), which reads and writes the whole result once more. A norm "
        "that computes its statistics subtracts the mean, and the bias with it, exactly: it "
        "changes nothing. One with running statistics (BatchNorm in eval mode) does not cancel "
        "it, but can hold it: a running mean that is less by the bias gives the same numbers.",
        problems="A GroupNorm of several channels a group and a LayerNorm subtract a mean over "
        "many channels, which does not cancel a bias: they are not reported, nor linear layers, "
        "whose bias the matrix product adds by the way. Folding a BatchNorm into the convolution "
        "(OL608) takes one bias for both.",
        fix="make the layer with `bias=False`; of a trained one before a BatchNorm: "
        "`with torch.no_grad(): norm.running_mean -= layer.bias`, then `layer.bias = None`; "
        "neither, if you fold the BatchNorm (OL608)",
        example=_HEAD
        + "model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()\n"
        + _IMAGES,
        instead=_HEAD
        + "convolution = nn.Conv2d(3, 8, 3, bias=False)\n"
        + "model = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU()).eval()\n"
        + _IMAGES,
    ),
    Rule(
        code="OL608",
        name="unfolded-batchnorm",
        severity="slow",
        title="a BatchNorm that the layer before could do",
        what="A BatchNorm with running statistics that alone reads the result of a convolution or "
        "linear layer. One finding for all of them.",
        why="In eval mode it multiplies each channel by a constant and adds another. Scaled "
        "weights and a bias do the same, so that its kernel and its pass over memory go.",
        problems="A convolution that had no bias gets one, which eager PyTorch adds by a kernel "
        "of its own on a GPU: there is little to gain until something fuses that, as "
        "`torch.compile`, TensorRT and `torch.cudnn_convolution_relu` do. A linear layer and a "
        "convolution with a bias gain at once. The model cannot train on as before: fold a copy. "
        "Weights that are computed anew at each call are left out. A forward hook between the two "
        "is not seen.",
        fix="parent[0] = torch.nn.utils.fusion.fuse_conv_bn_eval(parent[0], parent[1]); "
        "parent[1] = nn.Identity()",
        example=_HEAD
        + "convolution = nn.Conv2d(3, 8, 3, bias=False)\n"
        + "model = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU()).eval()\n"
        + _IMAGES,
        instead=_HEAD
        + "from torch.nn.utils.fusion import fuse_conv_bn_eval\n\n"
        + "convolution = nn.Conv2d(3, 8, 3, bias=False)\n"
        + "folded = fuse_conv_bn_eval(convolution.eval(), nn.BatchNorm2d(8).eval())\n"
        + "model = nn.Sequential(folded, nn.ReLU()).eval()\n"
        + _IMAGES,
    ),
    Rule(
        code="OL609",
        name="inference-statistics",
        severity="slow",
        title="a norm that computes statistics at each call",
        what="An InstanceNorm or BatchNorm without running statistics, in inference.",
        why="The whole input must be read for its mean and variance before the first result can "
        "be written: two passes over memory, and nothing to fold into the layer before.",
        problems="It is a choice of the model, to be trained with: style transfer needs the "
        "statistics of each image, for one. LayerNorm, RMSNorm and GroupNorm have no running "
        "statistics to choose, and are not reported.",
        fix="train with `nn.BatchNorm2d(channels)`, or with `track_running_stats=True`",
        example=_HEAD
        + "convolution = nn.Conv2d(3, 8, 3, bias=False)\n"
        + "model = nn.Sequential(convolution, nn.InstanceNorm2d(8)).eval()\n"
        + _IMAGES,
        instead=_HEAD
        + "convolution = nn.Conv2d(3, 8, 3, bias=False)\n"
        + "model = nn.Sequential(convolution, nn.BatchNorm2d(8)).eval()\n"
        + _IMAGES,
    ),
    Rule(
        code="OL610",
        name="parallel-branches",
        severity="slow",
        title="convolutions of one input whose results are added",
        what="Two or more convolutions of the same input, with the same stride and groups and "
        "windows of one centre, whose results are added, batch norms in eval mode in between.",
        why="Convolutions are linear: the sum is one convolution, whose kernel is the sum of "
        "theirs, the smaller ones padded with zeros (RepVGG, arXiv:2101.03697). One kernel then "
        "reads the input once, instead of one for each branch and one for each sum.",
        problems="An identity beside the branches could merge too, as a kernel of 1; it is "
        "not counted. Branches that are concatenated are not reported.",
        fix="pad the smaller kernel and add: `with torch.no_grad(): wide.weight += "
        "F.pad(narrow.weight, (1, 1, 1, 1)); wide.bias += narrow.bias`",
        example=_BRANCHES.format(result="self.wide(x) + self.narrow(x)", after=""),
        instead=_BRANCHES.format(
            result="self.wide(x)",
            after="""\
with torch.no_grad():
    model.wide.weight += nn.functional.pad(model.narrow.weight, (1, 1, 1, 1))
    model.wide.bias += model.narrow.bias
""",
        ),
    ),
    Rule(
        code="OL611",
        name="odd-channels",
        severity="slow",
        title="channel counts that do not fill tensor cores",
        what="Convolutions without groups, and linear layers, with channels that are no multiple "
        "of 8 (of 32 in int8), on a line with 5 % of the arithmetic or more.",
        why="Tensor cores load 16 bytes at a time: 8 numbers of half precision, 4 of TF32; NVIDIA "
        "advises multiples of 8 in half precision and of 32 in int8. With others a kernel pads, "
        "loads fewer bytes at a time, or does without tensor cores.",
        problems="Counts up to 4 are left out: an image has 3 channels, and nobody chooses that. "
        "In float32 multiples of 4 are enough as long as you stay there.",
        fix="round the number of channels up to a multiple of 8, `(n + 7) // 8 * 8`, with zeros in "
        "trained weights",
        example=_HEAD
        + "model = nn.Sequential(nn.Linear(1024, 1001), nn.ReLU(), nn.Linear(1001, 8)).eval()\n"
        + "args = (torch.randn(128, 1024),)\n",
        instead=_HEAD
        + "model = nn.Sequential(nn.Linear(1024, 1008), nn.ReLU(), nn.Linear(1008, 8)).eval()\n"
        + "args = (torch.randn(128, 1024),)\n",
    ),
    Rule(
        code="OL612",
        name="depthwise-separable",
        severity="slow",
        title="a depthwise-separable convolution slower than the dense one",
        what="A depthwise convolution and the pointwise one that follows it, with norms and "
        "activations in between, of 2 MB of traffic or more, that take longer than one dense "
        "convolution of the same shapes. "
        "Both are measured on this machine, in turns, and reported if the pair took longer in 8 "
        "of 9 rounds and by a tenth or more.",
        why="A depthwise convolution saves arithmetic, and not traffic: it reads and writes all "
        "of its input for a handful of operations a number. With few channels the dense one does "
        "more arithmetic in less time.",
        problems="The figures are of this machine: those of a CPU say little about a GPU. "
        "Activations between the two are not part of them. At most about a second is spent, on "
        "the shapes that move the most bytes. The dense one must be trained anew, unless nothing "
        "is between the two.",
        fix="nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2) in place of both",
        example=_HEAD
        + "depthwise = nn.Conv2d(2, 2, 3, padding=1, groups=2, bias=False)\n"
        + "model = nn.Sequential(depthwise, nn.Conv2d(2, 4, 1)).eval()\n"
        + "args = (torch.randn(1, 2, 512, 512),)\n",
        instead=_HEAD
        + "model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1)).eval()\n"
        + "args = (torch.randn(1, 2, 512, 512),)\n",
    ),
    Rule(
        code="OL613",
        name="thin-layers",
        severity="slow",
        title="thin layers that wait for memory",
        what="Layers of 2 MB of traffic or more, mostly activations, with less than a tenth of "
        "the operations that an A100 does in the time that it moves a byte (78 in TF32, 156 in "
        "half precision), where they are 30 % of the call or more.",
        why="Such a layer takes the time of its traffic: fewer operations do not make it faster. "
        "Many thin layers read and write the activations many times; a few wide ones do more "
        "arithmetic in the same time.",
        problems="Judged by the published figures of an A100 on any machine, not by a measurement. "
        "Layers whose traffic is their weights (a language model that decodes one token) are not "
        "reported: wider ones do not help there, larger batches do.",
        fix="fewer and wider layers: dense convolutions for depthwise ones, 32 channels or more",
        example=_HEAD
        + "layers = [nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(4)]\n"
        + "model = nn.Sequential(*layers).eval()\n"
        + "args = (torch.randn(1, 16, 192, 192),)\n",
        instead=_HEAD
        + "model = nn.Sequential(nn.Conv2d(16, 64, 8, stride=8), nn.Conv2d(64, 256, 3)).eval()\n"
        + "args = (torch.randn(1, 16, 192, 192),)\n",
    ),
    Rule(
        code="OL614",
        name="many-tiny-kernels",
        severity="slow",
        title="many kernels that take less time than their launches",
        what="100 operations or more whose work together takes less time than their launches "
        "at 5 us each. The finding is at the line with the most of them.",
        why="The host launches kernels one by one, at some microseconds each; shorter kernels "
        "leave the GPU waiting for the host. A graph launches all of them at once.",
        problems="An operation counts as one kernel, though some are several. The work is "
        "estimated from arithmetic and traffic by the published figures of an A100.",
        fix="onelaunch.graph(model)",
        example=_SCALES.format(body="    for scale in scales:\n        x = x * scale\n"),
        instead=_SCALES.format(body="    x = x * scales.prod(0)\n"),
    ),
)

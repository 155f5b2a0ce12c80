"""Twenty architectures of timm and torchvision, of different families, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from tests.device.drop_in import replays
from tests.device.results import report

pytestmark = pytest.mark.gpu

TIMM = [
    "resnet18",
    "resnext50_32x4d",
    "efficientnet_b0",
    "mobilenetv3_small_100",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "convnext_atto",
    "swin_tiny_patch4_window7_224",
    "mixer_s32_224",
    "regnetx_002",
    "densenet121",
    "ghostnet_100",
    "coat_tiny",
    "levit_128s",
    "poolformer_s12",
    "xcit_nano_12_p16_224",
]
TORCHVISION = ["alexnet", "vgg11", "squeezenet1_0", "shufflenet_v2_x0_5", "mnasnet0_5", "googlenet"]


def build(library: str, name: str) -> Any:
    torch.manual_seed(0)
    if library == "timm":
        timm = pytest.importorskip("timm")
        model = timm.create_model(name, pretrained=False)
    else:
        torchvision = pytest.importorskip("torchvision")
        extra = {"init_weights": True} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, weights=None, **extra)
    return model.eval().cuda()


@pytest.mark.parametrize(
    ("library", "name"), [("timm", n) for n in TIMM] + [("torchvision", n) for n in TORCHVISION]
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_architecture(library: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(library, name)
    fast = ol.graph(model, warmup=2)
    worst = 0.0
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for i in range(5):
            generator = torch.Generator("cuda").manual_seed(i)
            x = torch.randn(2, 3, 224, 224, device="cuda", generator=generator)
            kept.append((fast(x), model(x)))
        for got, expected in kept:
            torch.testing.assert_close(got, expected)
            worst = max(worst, float((got - expected).abs().max()))
    assert replays(fast) == 3
    (recording,) = fast.recordings
    with capsys.disabled():
        report(
            "architectures.json",
            f"cuda {library} {name}",
            {"result": "as eager", "largest difference": worst, "nodes": recording.nodes},
        )
    fast.reset()

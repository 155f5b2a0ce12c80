"""Image models of timm and torchvision, on a GPU."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

import onelaunch as ol

from .harness import Run, inference, training

GPU = ("cuda",)


def images(run: Run, seed: int, batch: int = 4, size: int = 64) -> Any:
    return run.rand(seed, batch, 3, size, size), run.ints(seed, 10, batch)


def made(run: Run, name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=10, **options).to(run.device)


def vit(run: Run, **options: Any) -> Any:
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return made(run, "vit_tiny_patch16_224", **sizes, **options)


def fit(run: Run, model: Any, optimizer: Any, steps: int = 8) -> None:
    fast = run.graph(model)
    loss_fn = LabelSmoothingCrossEntropy(0.1)
    model.train()
    for i in range(steps):
        x, y = images(run, i)
        loss = loss_fn(fast(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)
    model.eval()
    with torch.no_grad():
        for i in range(5):
            run.see(fast(images(run, i)[0]).argmax(-1))


@training(on=GPU)
def timm_resnet(run: Run) -> None:
    model = made(run, "resnet10t")
    fit(run, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


@training(on=GPU)
def timm_vit_with_stochastic_depth(run: Run) -> None:
    model = vit(run, drop_path_rate=0.2, drop_rate=0.1)
    fit(run, model, create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05))


@training(on=GPU)
def timm_convnext_with_lamb(run: Run) -> None:
    model = made(run, "convnext_atto", drop_path_rate=0.1)
    fit(run, model, create_optimizer_v2(model, "lamb", lr=1e-3))


@training(on=GPU)
def timm_mobilenet_with_an_average(run: Run) -> None:
    model = made(run, "mobilenetv3_small_050").train()
    fast = run.graph(model)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, "rmsproptf", lr=1e-3)
    schedule = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-5)
    for i in range(8):
        x, y = images(run, i)
        loss = F.cross_entropy(fast(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model, step=i)
        schedule.step(i)
        run.see(loss, [group["lr"] for group in optimizer.param_groups])
    run.see(model, average.module)


@training(on=GPU)
def timm_with_mixup_and_mixed_precision(run: Run) -> None:
    model = vit(run).train()
    fast = run.graph(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mixup, loss_fn = Mixup(0.8, 1.0, num_classes=10), SoftTargetCrossEntropy()
    for i in range(8):
        x, y = mixup(*images(run, i))
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = loss_fn(fast(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)


@training(on=GPU)
def timm_as_a_whole_step_in_channels_last(run: Run) -> None:
    model = made(run, "resnet10t").to(memory_format=torch.channels_last).train()
    optimizer = ol.capturable(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @run.graph
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(8):
        x, y = images(run, i)
        run.see(step(x.contiguous(memory_format=torch.channels_last), y))


@training(on=GPU)
def timm_fine_tunes_a_new_head(run: Run) -> None:
    model = made(run, "resnet10t")
    model.requires_grad_(False)
    model.reset_classifier(5)
    model.fc.to(run.device)
    fast = run.graph(model.eval())
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    for i in range(8):
        x, y = images(run, i)
        loss = F.cross_entropy(fast(x), y % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model.fc)


@inference(on=GPU)
def timm_features_of_several_levels(run: Run) -> None:
    fast = run.graph(made(run, "resnet10t", features_only=True).eval())
    with torch.no_grad():
        for i in range(7):
            run.see(fast(images(run, i)[0]))


@inference(on=GPU)
def timm_unpooled_features(run: Run) -> None:
    model = vit(run).eval()
    fast = run.graph(model.forward_features)
    with torch.inference_mode():
        for i in range(7):
            run.see(model.forward_head(fast(images(run, i)[0]), pre_logits=True))


@inference(on=GPU, recordings=5)
def timm_models_of_five_families(run: Run) -> None:
    for name in ("efficientnet_b0", "regnetx_002", "ghostnet_100", "mixer_s32_224", "levit_128s"):
        size = 224 if "224" in name or "levit" in name else 64
        fast = run.graph(made(run, name).eval())
        with torch.inference_mode():
            for i in range(5):
                run.see(fast(images(run, i, 2, size)[0]))


@inference(on=GPU)
def timm_in_half_precision(run: Run) -> None:
    fast = run.graph(made(run, "resnet10t").eval().half())
    with torch.inference_mode():
        for i in range(7):
            run.see(fast(images(run, i)[0].half()).float().softmax(-1))


@inference(on=GPU)
def torchvision_classifiers(run: Run) -> None:
    for name in ("squeezenet1_0", "shufflenet_v2_x0_5"):
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None, num_classes=10)
        fast = run.graph(model.eval().to(run.device))
        with torch.inference_mode():
            for i in range(5):
                run.see(fast(images(run, i)[0]))


@inference(on=GPU, refused={"cuda": "OL109"})
def torchvision_nms_is_refused(run: Run) -> None:
    """How many boxes are left is known when the device has run."""

    @run.graph
    def keep(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return boxes[torchvision.ops.nms(boxes, scores, 0.5)]

    for i in range(5):
        corners = run.rand(i, 9, 2).sigmoid()
        run.see(keep(torch.cat([corners, corners + 0.2], -1), run.rand(i, 9)))


@inference(on=GPU)
def torchvision_boxes_by_hand(run: Run) -> None:
    @run.graph
    def overlaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torchvision.ops.box_iou(a, b).max(-1).values

    for i in range(7):
        a, b = run.rand(i, 9, 2).sigmoid(), run.rand(i + 1, 5, 2).sigmoid()
        run.see(overlaps(torch.cat([a, a + 0.3], -1), torch.cat([b, b + 0.3], -1)))

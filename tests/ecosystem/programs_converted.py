"""Models that were scripted, traced, exported or quantised before they are graphed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization as ao
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Run, inference, training
from .programs_training import labelled, mlp


def quietly(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """TorchScript and torch.ao warn that others take their places."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


def seen(run: Run, model: Any, calls: int = 8) -> None:
    with torch.no_grad():
        for i in range(calls):
            run.see(model(run.rand(i, 6, 8)))


def fitted(run: Run, model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(9):
        x, y = labelled(run, i, 6)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model.state_dict())


# TorchScript


@inference()
def a_traced_model(run: Run) -> None:
    seen(run, run.graph(quietly(torch.jit.trace, mlp(run).eval(), run.rand(0, 6, 8))))


@inference()
def a_scripted_model_that_is_frozen(run: Run) -> None:
    seen(run, run.graph(quietly(lambda: torch.jit.freeze(torch.jit.script(mlp(run).eval())))))


@training()
def a_scripted_model_in_training(run: Run) -> None:
    fitted(run, run.graph(quietly(torch.jit.script, mlp(run))))


# torch.export


def exported(run: Run, model: nn.Module, **options: Any) -> Any:
    return torch.export.export(model, (run.rand(0, 6, 8),), **options)


@inference()
def an_exported_model(run: Run) -> None:
    seen(run, run.graph(exported(run, mlp(run).eval()).module()))


@inference(recordings=2)
def an_exported_model_of_any_batch_size(run: Run) -> None:
    sizes = ({0: torch.export.Dim("batch")},)
    fast = run.graph(exported(run, mlp(run).eval(), dynamic_shapes=sizes).module())
    with torch.no_grad():
        for i in range(12):
            run.see(fast(run.rand(i, 4 + i % 2, 8)))


@training()
def an_exported_model_in_training(run: Run) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    fitted(run, run.graph(exported(run, net.to(run.device)).module()))


@inference(recordings=2)
def an_exported_model_that_gets_other_weights(run: Run) -> None:
    model = exported(run, mlp(run).eval()).module()
    fast = run.graph(model)
    seen(run, fast)
    weights = {key: value * 1.5 for key, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    seen(run, fast)


# Quantised: int8 kernels of torch.ao run on CPUs alone.


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@inference(on=("cpu",))
def weights_quantised_dynamically(run: Run) -> None:
    seen(run, run.graph(quietly(ao.quantize_dynamic, layers(), {nn.Linear})))


@inference(on=("cpu",), refused={"cpu": "OL101"})
def static_quantisation_is_refused(run: Run) -> None:
    """Its scales are read on the host, and its activations are quantised tensors."""
    model: Any = nn.Sequential(ao.QuantStub(), layers(), ao.DeQuantStub()).eval()
    model.qconfig = ao.get_default_qconfig("x86")
    prepared = quietly(ao.prepare, model)
    prepared(run.rand(0, 32, 8))
    seen(run, run.graph(quietly(ao.convert, prepared)))


@training(on=("cpu",))
def quantisation_aware_training(run: Run) -> None:
    model: Any = layers().train()
    model.qconfig = ao.get_default_qat_qconfig("x86")
    fitted(run, run.graph(quietly(ao.prepare_qat, model).to(run.device)))


class Int8Linear(nn.Module):
    """int8 weights and activations, a scale for each row of both."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale.squeeze(1))
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        product = torch._int_mm((x / scale).round().to(torch.int8), self.weight.t())
        return product * scale * self.scale


@inference()
def int8_products(run: Run) -> None:
    model = nn.Sequential(Int8Linear(nn.Linear(32, 64)), nn.ReLU(), Int8Linear(nn.Linear(64, 16)))
    fast = run.graph(model.to(run.device))
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.rand(i, 32, 32)))

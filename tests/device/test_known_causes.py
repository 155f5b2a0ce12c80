"""What libraries do that is refused: the way to do without, pasted, gives what eager gives."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    ContinuousBernoulli,
    Distribution,
    Geometric,
    MultivariateNormal,
    Normal,
)
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import onelaunch as ol
from onelaunch.driver.known_causes import CAUSES

from .drop_in import Rand, assert_same, on_accelerators, on_cpu, on_cpu_and_cuda, replays
from .drop_in import refused as refused_at

Program = Callable[[Tensor], Any]


class Mended(NamedTuple):
    """A program that is refused, and the same with the fix.

    Attributes:
        make: makes both, on a device. The second may have a graphed part, `fast`.
        code: of the refusal.
        words: part of its fix.
    """

    make: Callable[[torch.device], tuple[Program, Program]]
    code: str
    words: str


def both(refused: Program, mended: Program) -> Callable[[torch.device], tuple[Program, Program]]:
    return lambda device: (refused, mended)


def gaussian(device: torch.device) -> tuple[Program, Program]:
    """Inside a step."""

    def step(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)

        def run(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = loss_of(model(x), x, model(x).square() + 0.1)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.01 * p.grad)
            return loss.detach()

        return run

    return step(F.gaussian_nll_loss), step(
        lambda input, target, var: (0.5 * (torch.log(var) + (input - target) ** 2 / var)).mean()
    )


def encoder(device: torch.device, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).to(device).eval()


def causal(device: torch.device) -> tuple[Program, Program]:
    model = encoder(device)
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)

    def forward(x: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            return model(x[:, :, None].expand(5, 4, 8), mask=mask, **options)

    return forward, lambda x: forward(x, is_causal=True)


def padded(device: torch.device) -> tuple[Program, Program]:
    mask = (torch.arange(4) > 2).expand(5, 4).to(device)

    def forward(model: nn.TransformerEncoder) -> Program:
        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = model(x[:, :, None].expand(5, 4, 8), src_key_padding_mask=mask)
            return y[:, :3]  # what is padded is zero in the one, and anything in the other

        return run

    return forward(encoder(device)), forward(encoder(device, enable_nested_tensor=False))


def averaged(device: torch.device) -> tuple[Program, Program]:
    """The average is looked at after the call: where it is a part of it, and where it is not."""

    def made() -> tuple[nn.Module, Any, Program]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        mean = torch.optim.swa_utils.AveragedModel(model)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(x.mean())
                return model(x)

        return model, mean, step

    model, mean, step = made()

    def refused(x: Tensor) -> Any:
        y = step(x)
        mean.update_parameters(model)
        return y

    other, others_mean, others_step = made()
    fast = ol.graph(others_step, warmup=1)

    def mended(x: Tensor) -> Any:
        y = fast(x)
        others_mean.update_parameters(other)
        if others_mean.n_averaged > 5:
            assert_same(others_mean.state_dict(), mean.state_dict())
        return y

    mended.fast = fast  # type: ignore[attr-defined]
    return refused, mended


def packed(device: torch.device) -> tuple[Program, Program]:
    torch.manual_seed(0)
    layer = nn.GRU(1, 3, batch_first=True).to(device)

    def refused(x: Tensor) -> Tensor:
        y, _ = layer(pack_padded_sequence(x[:, :, None], [4] * 5, batch_first=True))
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0].detach()

    return refused, lambda x: layer(x[:, :, None])[0].detach()


def normed(device: torch.device) -> tuple[Program, Program]:
    norms = [nn.BatchNorm1d(4, momentum=m, affine=False).to(device) for m in (None, 0.1)]
    return norms[0], norms[1]


def clipped(x: Tensor, **options: Any) -> Tensor:
    weight = nn.Parameter(torch.ones_like(x))
    (weight * x).square().sum().backward()
    nn.utils.clip_grad_norm_([weight], 1.0, **options)
    assert weight.grad is not None
    return weight.grad


def covariance(x: Tensor) -> Tensor:
    return x.t() @ x + torch.eye(4, device=x.device)


MENDED: dict[str, Mended] = {
    "distribution": Mended(
        both(
            lambda x: Normal(x, x.abs() + 1).log_prob(x * 2),
            lambda x: Normal(x, x.abs() + 1, validate_args=False).log_prob(x * 2),
        ),
        "OL101",
        "validate_args=False",
    ),
    "constraints": Mended(
        both(
            lambda x: MultivariateNormal(x[0], covariance(x)).log_prob(x),
            lambda x: MultivariateNormal(
                x[0], scale_tril=torch.linalg.cholesky_ex(covariance(x)).L, validate_args=False
            ).log_prob(x),
        ),
        "OL101",
        "validate_args=False",
    ),
    "continuous_bernoulli": Mended(
        both(
            lambda x: ContinuousBernoulli(x.sigmoid(), validate_args=False).log_prob(x.sigmoid()),
            lambda x: ContinuousBernoulli(logits=x, validate_args=False).log_prob(x.sigmoid()),
        ),
        "OL101",
        "ContinuousBernoulli(logits=logits",
    ),
    "geometric": Mended(
        both(
            lambda x: Geometric(x.sigmoid()).entropy(),
            lambda x: Geometric(x.sigmoid(), validate_args=False).entropy(),
        ),
        "OL101",
        "validate_args=False",
    ),
    "multivariate_normal": Mended(
        both(
            lambda x: MultivariateNormal(x[0], covariance(x), validate_args=False).log_prob(x),
            lambda x: MultivariateNormal(
                x[0], scale_tril=torch.linalg.cholesky_ex(covariance(x)).L, validate_args=False
            ).log_prob(x),
        ),
        "OL101",
        "cholesky_ex",
    ),
    "functional": Mended(gaussian, "OL101", "torch.log(var)"),
    "batchnorm": Mended(normed, "OL101", "momentum=0.1"),
    "transformer": Mended(causal, "OL101", "is_causal=True"),
    "clip_grad": Mended(
        both(lambda x: clipped(x, error_if_nonfinite=True), clipped),
        "OL101",
        "without `error_if_nonfinite=True`",
    ),
    "swa_utils": Mended(averaged, "OL10[14]", "after the graphed call"),
}
"""The name of a file of torch in the table -> what it does, and the way to do without."""
_ROUNDED = {"ContinuousBernoulli(logits=logits", "pad, and mask the result"}
"""The fixes that compute in another order."""
OTHER = {"rnn", "loop", "_scatter", "base", "_to_dense_adj", "__init__", "wrappers"}
OTHER |= {"wishart", "lowrank_multivariate_normal", "von_mises", "one_hot_categorical", "layer"}
OTHER |= {"kernel", "exact_gp", "variational_strategy", "cholesky", "odeint", "adjoint"}
OTHER |= {"cheb_conv", "aggregation", "data"}
SCHEDULERS = {
    "scheduling_ddim": "DDIMScheduler",
    "scheduling_ddpm": "DDPMScheduler",
    "scheduling_euler_discrete": "EulerDiscreteScheduler",
    "scheduling_lcm": "LCMScheduler",
    "scheduling_lms_discrete": "LMSDiscreteScheduler",
    "scheduling_pndm": "PNDMScheduler",
    "scheduling_unipc_multistep": "UniPCMultistepScheduler",
}
OTHER |= SCHEDULERS.keys()
"""The files with tests of their own."""


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo turns it off for good as it compiles anything.
    monkeypatch.setattr(Distribution, "_validate_args", True)


def functions_in(module: types.ModuleType) -> Iterator[str]:
    """Names of the functions and methods of a module."""
    for value in vars(module).values():
        if inspect.isfunction(value):
            yield inspect.unwrap(value).__code__.co_name
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            yield from (n for n, v in vars(value).items() if inspect.isfunction(v))


@pytest.mark.parametrize("cause", CAUSES, ids=lambda c: f"{Path(c.file).stem}.{c.function}")
def test_the_function_exists(cause: Any) -> None:
    name = cause.file.removesuffix(".py").replace("/", ".")
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"no {name.partition('.')[0]}")
    module = importlib.import_module(name)
    assert str(module.__file__).replace("\\", "/").endswith(cause.file)
    assert cause.function is None or cause.function in set(functions_in(module))
    assert Path(cause.file).stem in MENDED.keys() | OTHER


def mends(case: Mended, device: torch.device, rand: Rand) -> None:
    refused, mended = case.make(device)
    refused_with(case.words, refused, rand(0, 5, 4), code=case.code)
    refused, mended = case.make(device)
    fast: Any = getattr(mended, "fast", None) or ol.graph(mended, warmup=1)
    run = mended if hasattr(mended, "fast") else fast
    for i in range(6):
        expected, got = refused(rand(i, 5, 4)), run(rand(i, 5, 4))
        if case.words in _ROUNDED:
            torch.testing.assert_close(got, expected)
        elif case.words != "momentum=0.1":  # another average
            assert_same(got, expected, f"call {i}")
    assert replays(fast) == 5


@pytest.mark.parametrize("name", MENDED)
def test_the_fix_gives_what_eager_gives(name: str, device: torch.device, rand: Rand) -> None:
    mends(MENDED[name], device, rand)


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_an_encoder(device: torch.device, rand: Rand) -> None:
    """The emulated device has no nested tensors."""
    refused, mended = padded(device)
    refused_with("enable_nested_tensor=False", refused, rand(0, 5, 4), code=r"OL10[12]")
    assert replays(same(mended, refused, [rand(i, 5, 4) for i in range(6)])) == 5


@on_cpu
def test_a_packed_sequence(device: torch.device, rand: Rand) -> None:
    mends(Mended(packed, "OL10[124]", "pad, and mask the result"), device, rand)


@on_cpu_and_cuda
@pytest.mark.parametrize("name", ["GCNConv", "GATConv"])
def test_self_loops_of_graphs(name: str, device: torch.device, rand: Rand) -> None:
    geometric = pytest.importorskip("torch_geometric")
    edges = torch.tensor([[0, 1, 2, 3, 4, 2, 1], [1, 2, 3, 4, 0, 0, 1]], device=device)
    with_loops, _ = geometric.utils.add_remaining_self_loops(edges)

    def conv(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return getattr(geometric.nn, name)(4, 3, **options).to(device).requires_grad_(False)

    plain, mended = conv(), conv(add_self_loops=False)
    program: Program = lambda x: plain(x, edges)  # noqa: E731
    fix = refused_with("add_self_loops=False", program, rand(0, 5, 4), code=r"OL10[12]")
    assert name in fix
    ways: list[Program] = [lambda x: mended(x, with_loops)]
    if name == "GCNConv":
        cached = conv(cached=True)
        ways.append(lambda x: cached(x, edges))
    for way in ways:
        same(way, program, [rand(i, 5, 4) for i in range(6)])


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore:.*OL311:onelaunch.GraphWarning")
def test_a_convolution_that_drops_self_loops(device: torch.device, rand: Rand) -> None:
    geometric = pytest.importorskip("torch_geometric")
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]], device=device)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.conv = nn.Linear(4, 4), geometric.nn.ChebConv(4, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.first(x), edges)

    model = Model().to(device).requires_grad_(False)
    refused_with('on_refusal="split"', model, rand(0, 5, 4), code="OL10[12]")
    fast = ol.graph(model, warmup=1, on_refusal="split")
    for i in range(6):
        torch.testing.assert_close(fast(rand(i, 5, 4)), model(rand(i, 5, 4)))
    assert fast.stats().split_launches >= 1


@on_cpu_and_cuda
def test_a_metric_that_looks_for_nans(device: torch.device, rand: Rand) -> None:
    metrics = pytest.importorskip("torchmetrics")
    refused_with('nan_strategy="disable"', metrics.MeanMetric().to(device), rand(0, 4))
    eager = metrics.MeanMetric().to(device)
    fast = ol.graph(metrics.MeanMetric(nan_strategy="disable").to(device), warmup=1)
    for i in range(8):
        torch.testing.assert_close(fast(rand(i, 4)), eager(rand(i, 4)))
    assert replays(fast)


@on_accelerators
def test_a_loss_over_alignments(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(5, 5).to(device).requires_grad_(False)
    targets = torch.tensor([[1, 2], [3, 4]], device=device)
    lengths = torch.tensor([6, 5], device=device), torch.tensor([2, 1], device=device)

    def loss(y: Tensor) -> Tensor:
        return nn.functional.ctc_loss(y.log_softmax(-1), targets, *lengths)

    refused_with(
        "the loss after the launch", lambda x: loss(layer(x)), rand(0, 6, 2, 5), code="OL10[23]"
    )
    fast = ol.graph(layer, warmup=1)
    for i in range(6):
        torch.testing.assert_close(loss(fast(rand(i, 6, 2, 5))), loss(layer(rand(i, 6, 2, 5))))
    assert replays(fast)


@pytest.mark.parametrize("where", ["arguments", "state", "numbers", "targets too"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_over_alignments_whose_lengths_are_on_the_host(
    device: torch.device, rand: Rand, where: str, whole: bool
) -> None:
    """Torch takes another way with them where its operations are watched, and fails there."""
    targets = torch.tensor([[1, 2], [3, 4]], device="cpu" if where == "targets too" else device)
    lengths: Any = torch.tensor([6, 5]), torch.tensor([2, 1])
    if where == "numbers":
        lengths = (6, 5), (2, 1)

    def world() -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(5, 5).to(device)

        def step(x: Tensor, *given: Tensor) -> Tensor:
            y = layer(x).log_softmax(-1)
            loss = nn.functional.ctc_loss(y, targets, *(given or lengths))
            if whole:
                loss.backward()
                with torch.no_grad():
                    for p in layer.parameters():
                        p.sub_(p.grad, alpha=0.1)
                layer.zero_grad()
            return loss.detach() if whole else loss

        return layer, step

    (layer, step), (other, eager) = world(), world()
    given = lengths if where == "arguments" else ()
    fast = ol.graph(step, warmup=2)
    for i in range(2):
        torch.testing.assert_close(fast(rand(i, 6, 2, 5), *given), eager(rand(i, 6, 2, 5), *given))
    with pytest.raises(ol.CaptureError, match=r"(?s)OL10[234].*ctc_loss") as caught:
        fast(rand(2, 6, 2, 5), *given)
    assert "ctc_loss(y, targets" in str(caught.value.where)
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@on_cpu_and_cuda
def test_a_metric_that_counts_classes(device: torch.device, rand: Rand) -> None:
    metrics = pytest.importorskip("torchmetrics")
    made = [metrics.classification.MulticlassAccuracy(4).to(device) for _ in range(3)]
    target = torch.tensor([0, 1, 2, 3], device=device)
    refused_with("metric.update(y, target)", made[2], rand(0, 4, 4), target, code="OL102")
    layer = nn.Linear(4, 4).to(device).requires_grad_(False)
    fast = ol.graph(layer, warmup=1)
    for i in range(6):
        made[0].update(fast(rand(i, 4, 4)), target)
        made[1].update(layer(rand(i, 4, 4)), target)
    torch.testing.assert_close(made[0].compute(), made[1].compute())
    assert replays(fast)


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers'
@pytest.mark.parametrize("name", SCHEDULERS.values())
def test_a_scheduler_of_diffusion(name: str, device: torch.device, rand: Rand) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = nn.Conv2d(1, 1, 3, padding=1).to(device).requires_grad_(False)

    def made() -> Any:
        scheduler = getattr(diffusers, name)()
        scheduler.set_timesteps(5, device=device)
        return scheduler

    def sampled(model: Any, scheduler: Any) -> Tensor:
        torch.manual_seed(1)
        x = rand(0, 1, 1, 4, 4)
        for t in scheduler.timesteps:
            x = scheduler.step(model(scheduler.scale_model_input(x, t)), t, x).prev_sample
        return x

    scheduler, x = made(), rand(0, 1, 1, 4, 4)

    def step(x: Tensor) -> Tensor:
        return scheduler.step(unet(x), t, x).prev_sample

    for t in scheduler.timesteps[:3]:
        scheduler.scale_model_input(x, t)
        step(x)
    refused_with("after the launch", step, x, code="OL10[12]")
    torch.testing.assert_close(sampled(ol.graph(unet, warmup=1), made()), sampled(unet, made()))


def refused_with(words: str, program: Any, *args: Any, code: str = "OL101") -> str:
    fix = refused_at(ol.graph(program, warmup=1), *args, match=code).fix
    assert words in fix
    return fix


def same(mended: Program, eager: Program, calls: list[Any]) -> Any:
    fast = ol.graph(mended, warmup=1)
    for x in calls:
        torch.testing.assert_close(fast(x), eager(x))
    assert replays(fast) >= len(calls) - 2
    return fast


@on_cpu_and_cuda
def test_sizes_of_graphs(device: torch.device, rand: Rand) -> None:
    geometric = pytest.importorskip("torch_geometric")
    batch = torch.tensor([0, 0, 1, 1, 1], device=device)
    calls = [rand(i, 5, 4) for i in range(6)]
    pool, total = geometric.nn.global_mean_pool, geometric.nn.SumAggregation()
    refused_with("size=n", lambda x: pool(x, batch), calls[0])
    same(lambda x: pool(x, batch, size=2), lambda x: pool(x, batch), calls)
    refused_with("dim_size=n", lambda x: total(x, batch), calls[0])
    same(lambda x: total(x, batch, dim_size=2), lambda x: total(x, batch), calls)
    edges = torch.tensor([[0, 1, 2, 3, 4, 2, 2], [1, 2, 3, 4, 0, 0, 0]], device=device)
    dense = geometric.utils.to_dense_adj

    def adjacency(x: Tensor) -> Tensor:
        return dense(edges, max_num_nodes=5, edge_attr=x.flatten()[:7])[0]

    def mended(x: Tensor) -> Tensor:
        empty = torch.zeros(5, 5, device=edges.device)
        return empty.index_put(tuple(edges), x.flatten()[:7], accumulate=True)

    refused_with("index_put", adjacency, calls[0])
    same(mended, adjacency, calls)


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gaussian_processes(device: torch.device, rand: Rand) -> None:
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.RBFKernel().to(device).requires_grad_(False)
    calls = [rand(i, 5, 4) for i in range(6)]

    def eager(x: Tensor) -> Tensor:
        return kernel(x, x + 1).to_dense()

    def mended(x: Tensor) -> Tensor:
        gaps = (x[:, None] - (x + 1)) / kernel.lengthscale
        return (-0.5 * gaps.square().sum(-1)).exp()

    refused_with("the kernel written out", eager, calls[0])
    same(mended, eager, calls)
    cholesky = importlib.import_module("linear_operator.utils.cholesky").psd_safe_cholesky
    refused_with("ol.graph(network)", lambda x: cholesky(covariance(x)), calls[0])


@pytest.mark.parametrize("solver", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize("method", ["rk4", "dopri5", "implicit_adams"])
def test_solvers(solver: str, method: str, device: torch.device, rand: Rand) -> None:
    solve = getattr(pytest.importorskip("torchdiffeq"), solver)
    times = torch.linspace(0, 1, 3, device=device)

    def made() -> nn.Module:
        class Dynamics(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(4, 4)

            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                return self.net(y).tanh() * (1 + t)

        torch.manual_seed(0)
        return Dynamics().to(device)

    def states(f: Program, y: Tensor) -> Tensor:
        return solve(f, y, times, method=method, rtol=1e-4, atol=1e-4)

    plain, model = made(), made()
    f = ol.graph(model, warmup=1)
    with torch.no_grad():
        refused_with("f = ol.graph(f)", lambda y: states(plain, y), rand(0, 5, 4))
        for i in range(3):
            torch.testing.assert_close(states(f, rand(i, 5, 4)), states(plain, rand(i, 5, 4)))
    before = replays(f)
    assert before >= 12
    if solver == "odeint":
        return
    for i in range(3):
        for each in (f, plain):
            states(each, rand(i, 5, 4)).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert replays(f) >= before + 12


@on_cpu_and_cuda
def test_what_fabric_wraps(device: torch.device, rand: Rand) -> None:
    fabric_of = pytest.importorskip("lightning_fabric").Fabric
    fabric = fabric_of(accelerator=device.type, devices=1)

    def wrapped(graphed: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        model = ol.graph(model, warmup=1) if graphed else model
        return model, fabric.setup(model)

    _, plain = wrapped(graphed=False)
    refused_with("fabric.setup(ol.graph(model)", plain, rand(0, 5, 4), code="OL112")
    fast, around = wrapped(graphed=True)
    for i in range(6):
        for f in (around, plain):
            fabric.backward(f(rand(i, 5, 4)).square().sum())
    torch.testing.assert_close(around.weight.grad, plain.weight.grad)
    assert replays(fast) >= 3


@on_cpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_activations(device: torch.device, rand: Rand) -> None:
    ao = importlib.import_module("torch.ao.quantization")
    torch.manual_seed(0)
    linear = nn.Linear(4, 3).eval().requires_grad_(False)
    model: Any = nn.Sequential(ao.QuantStub(), linear, ao.DeQuantStub()).eval()
    model.qconfig = ao.get_default_qconfig("x86")
    prepared = ao.prepare(model)
    prepared(rand(0, 5, 4))
    refused_with("quantize_dynamic", ao.convert(prepared), rand(0, 5, 4))
    refused_with(
        "quantize_dynamic",
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
        rand(0, 5, 4),
        code="OL109",
    )
    dynamic = ao.quantize_dynamic(nn.Sequential(linear), {nn.Linear})
    same(dynamic, dynamic, [rand(i, 5, 4) for i in range(6)])
    scale = linear.weight.abs().amax(1) / 127
    weight = (linear.weight / scale[:, None]).round().to(torch.int8)

    def by_hand(x: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype) * scale[:, None], linear.bias)

    same(by_hand, by_hand, [rand(i, 5, 4) for i in range(6)])

"""Gaussian processes with gpytorch, and equivariant networks with e3nn."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
import torch.nn.functional as F
from e3nn import o3
from e3nn.math import soft_one_hot_linspace
from e3nn.nn import BatchNorm, FullyConnectedNet, Gate
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.utils.quadrature import GaussHermiteQuadrature1D
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor, nn

import onelaunch as ol

from .harness import Run, inference, training


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any = None) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel() if kernel is None else kernel)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def curve(run: Run, points: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 1, points, device=run.device)
    return x, (6 * x).sin() + 0.1 * run.rand(0, points)


@training(refused={"cpu": "OL101", "cuda": "OL101"})
def an_exact_gp_fit_is_refused(run: Run) -> None:
    """The likelihood factorises a matrix, and asks on the host whether that went well."""
    x, y = curve(run)
    likelihood = GaussianLikelihood().to(run.device)
    model = ExactGP(x, y, likelihood).to(run.device).train()
    likelihood.train()
    mll = ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @run.graph
    def loss_of() -> Tensor:
        return -mll(model(x), y)

    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        run.see(loss)


@training()
def an_exact_gp_whose_likelihood_is_outside(run: Run) -> None:
    """The model compares its inputs around the launch, and its kernel is a matrix after it."""
    x, y = curve(run)
    likelihood = GaussianLikelihood().to(run.device)
    model = ExactGP(x, y, likelihood).to(run.device)
    fast = run.graph(model)
    mll = ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(9):
        optimizer.zero_grad()
        loss = -mll(fast(x), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


class Kernel(nn.Module):
    """The parameters of a kernel of gpytorch; its own call compares both arguments on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = ScaleKernel(RBFKernel())

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        base = self.kernel.base_kernel
        gaps = (a[:, None] / base.lengthscale - b[None] / base.lengthscale).square()
        return self.kernel.outputscale * (-0.5 * gaps).exp()


@training()
def an_exact_gp_around_a_graphed_kernel(run: Run) -> None:
    """The kernel matrix is graphed, its factorisation is not."""
    x, y = curve(run)
    kernel = Kernel().to(run.device)
    noise = nn.Parameter(torch.tensor(0.1, device=run.device))
    covariance = run.graph(kernel)
    optimizer = torch.optim.Adam([*kernel.parameters(), noise], lr=0.1)
    for _ in range(9):
        optimizer.zero_grad()
        full = covariance(x, x) + noise.square() * torch.eye(20, device=run.device)
        loss = -torch.distributions.MultivariateNormal(torch.zeros_like(y), full).log_prob(y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(kernel)


class ApproximateGP(gpytorch.models.ApproximateGP):
    def __init__(self, inducing: Tensor) -> None:
        distribution = CholeskyVariationalDistribution(inducing.shape[0])
        super().__init__(VariationalStrategy(self, inducing, distribution))
        self.mean_module, self.covar_module = ConstantMean(), ScaleKernel(RBFKernel())

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@training(refused={"cpu": "OL101", "cuda": "OL101"})
def a_variational_gp_is_refused(run: Run) -> None:
    x, y = curve(run, 32)
    model = ApproximateGP(torch.linspace(0, 1, 6)[:, None]).to(run.device)
    likelihood = GaussianLikelihood().to(run.device)
    mll = VariationalELBO(likelihood, model, num_data=32)
    weights = [*model.parameters(), *likelihood.parameters()]
    optimizer = ol.capturable(torch.optim.Adam(weights, lr=0.05))

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(9):
        chosen = run.ints(i, 32, 16)
        run.see(step(x[chosen], y[chosen]))
    run.see(model)


@training()
def deep_kernel_features_of_a_gp(run: Run) -> None:
    """The network in front of a Gaussian process is graphed, the process is not."""
    x, y = curve(run)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)).to(run.device)
    fast = run.graph(net)
    likelihood = GaussianLikelihood().to(run.device)
    model = ExactGP(net(x[:, None]).detach(), y, likelihood).to(run.device)
    mll = ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam([*net.parameters(), *model.parameters()], lr=0.02)
    model.train()
    likelihood.train()
    for _ in range(8):
        optimizer.zero_grad()
        features = fast(x[:, None])
        model.set_train_data(features, y, strict=False)
        loss = -mll(model(features), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(net, model)


@training()
def quadrature_of_a_likelihood(run: Run) -> None:
    net = nn.Linear(4, 2).to(run.device)
    quadrature = GaussHermiteQuadrature1D().to(run.device)

    @run.graph
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        mean, spread = net(x).unbind(-1)
        function = torch.distributions.Normal(mean, F.softplus(spread), validate_args=False)
        return -quadrature(lambda f: F.logsigmoid(f * (2 * y - 1)), function).mean()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(8):
        optimizer.zero_grad()
        loss = loss_of(run.rand(i, 12, 4), run.ints(i, 2, 12).float())
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(net)


@inference()
def predictions_of_a_fitted_gp_by_hand(run: Run) -> None:
    x, y = curve(run)
    kernel = Kernel().to(run.device).requires_grad_(False)
    noise = 0.01 * torch.eye(20, device=run.device)
    with torch.no_grad():
        root = torch.linalg.cholesky(kernel(x, x) + noise)
        weights = torch.cholesky_solve(y[:, None], root)

    @run.graph
    def predict(new: Tensor) -> tuple[Tensor, Tensor]:
        across = kernel(new, x)
        half = torch.linalg.solve_triangular(root, across.T, upper=False)
        return (across @ weights).squeeze(-1), kernel.kernel.outputscale - half.square().sum(0)

    with torch.no_grad():
        for i in range(8):
            run.see(predict(run.rand(i, 7).sigmoid()))


@inference(refused={"cpu": "OL101", "cuda": "OL101"})
def kernels_of_gpytorch_are_refused(run: Run) -> None:
    """They ask whether both arguments are equal."""
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3)) + ScaleKernel(RBFKernel())
    kernel = kernel.to(run.device).requires_grad_(False)
    fast = run.graph(lambda a, b: kernel(a, b).to_dense())
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.rand(i, 6, 3), run.rand(i + 20, 5, 3)))


# e3nn


@training()
def a_linear_layer_of_e3nn(run: Run) -> None:
    model = o3.Linear("4x0e + 2x1o", "3x0e + 1x1o").to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(8):
        optimizer.zero_grad()
        loss = fast(run.rand(i, 6, 10)).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def tensor_products_with_learned_weights(run: Run) -> None:
    model = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o")
    model = model.to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(8):
        optimizer.zero_grad()
        loss = fast(run.rand(i, 6, 5), run.rand(i + 20, 6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


class Convolution(nn.Module):
    """Messages along edges: a tensor product whose weights come from the edge's length."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.Irreps.spherical_harmonics(1)
        self.product = o3.FullyConnectedTensorProduct(
            "4x0e", self.harmonics, "4x0e + 2x1o", shared_weights=False
        )
        self.net = FullyConnectedNet([8, 16, self.product.weight_numel], torch.relu)
        self.out = o3.Linear("4x0e + 2x1o", "1x0e")

    def forward(self, x: Tensor, places: Tensor, source: Tensor, target: Tensor) -> Tensor:
        gap = places[target] - places[source]
        harmonics = o3.spherical_harmonics(self.harmonics, gap, True, "component")
        lengths = soft_one_hot_linspace(gap.norm(dim=1), 0.0, 4.0, 8, "smooth_finite", True)
        messages = self.product(x[source], harmonics, self.net(lengths))
        summed = torch.zeros(len(x), messages.shape[1], device=x.device)
        return self.out(summed.index_add(0, target, messages)).sum()


def atoms(run: Run, i: int) -> tuple[Tensor, ...]:
    return run.rand(i, 6, 4), run.rand(i + 20, 6, 3), run.ints(i, 6, 20), run.ints(i + 1, 6, 20)


@training()
def an_equivariant_convolution(run: Run) -> None:
    model = Convolution().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(8):
        optimizer.zero_grad()
        loss = (fast(*atoms(run, i)) - 1.0).square()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def forces_trained_in_a_whole_step(run: Run) -> None:
    model = Convolution().to(run.device)
    optimizer = ol.capturable(torch.optim.Adam(model.parameters(), lr=1e-2))

    @run.graph
    def step(x: Tensor, places: Tensor, source: Tensor, target: Tensor) -> Tensor:
        places = places.detach().requires_grad_()
        energy = model(x, places, source, target)
        (slope,) = torch.autograd.grad(energy, places, create_graph=True)
        loss = (energy - 1.0).square() + slope.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(9):
        run.see(step(*atoms(run, i)))
    run.see(model)


@training()
def gates_and_batch_norm_of_e3nn(run: Run) -> None:
    gate = Gate("4x0e", [torch.relu], "2x0e", [torch.sigmoid], "2x1o")
    model = nn.Sequential(
        o3.Linear("4x0e + 2x1o", gate.irreps_in), gate, BatchNorm(gate.irreps_out)
    ).to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(8):
        optimizer.zero_grad()
        loss = fast(run.rand(i, 6, 10)).square().sum(-1).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@inference()
def spherical_harmonics_up_to_three(run: Run) -> None:
    fast = run.graph(lambda v: o3.spherical_harmonics([0, 1, 2, 3], v, normalize=True))
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.rand(i, 9, 3)))


@inference()
def energies_and_forces_of_e3nn(run: Run) -> None:
    model = Convolution().to(run.device).requires_grad_(False)

    @run.graph
    def energy_and_forces(*args: Tensor) -> tuple[Tensor, Tensor]:
        x, places, source, target = args
        places = places.detach().requires_grad_()
        energy = model(x, places, source, target)
        return energy.detach(), -torch.autograd.grad(energy, places)[0]

    for i in range(8):
        run.see(energy_and_forces(*atoms(run, i)))


@inference()
def irreps_passed_as_an_argument(run: Run) -> None:
    """`Irreps` is a tuple whose `__len__` raises."""

    @run.graph
    def norms(irreps: o3.Irreps, x: Tensor) -> Tensor:
        parts = [
            x[:, s].unflatten(1, (mul, ir.dim))
            for (mul, ir), s in zip(irreps, irreps.slices(), strict=False)
        ]
        return torch.cat([p.norm(dim=-1) for p in parts], -1)

    irreps = o3.Irreps("4x0e + 2x1o")
    for i in range(8):
        run.see(norms(irreps, run.rand(i, 6, 10)))


@inference(on=("cpu",), refused={"cpu": "OL101"})
def wigner_matrices_are_refused(run: Run) -> None:
    """They are made on the host, and assert there that what they dropped was small."""

    @run.graph
    def rotate(x: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        return torch.einsum("bij,bj->bi", o3.wigner_D(1, alpha, beta, gamma), x)

    for i in range(8):
        run.see(rotate(run.rand(i, 5, 3), *(run.rand(i + k, 5) for k in range(1, 4))))

"""Known causes of refusals inside libraries: a function of a library, and the way to do without.

A refusal names the user's line, but the code to change is often an option of a class made
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PADDED = "pad, and mask the result"
_UNPACKED = f"not a PackedSequence, whose sizes the host reads: {PADDED}"
OWN_DROPOUT = "`dropout=0`, and nn.Dropout between single layers"
_UNVALIDATED = (
    "no validation of values: `validate_args=False` where the distribution is made, or once for "
    "all torch.distributions.Distribution.set_default_validate_args(False)"
)
UNNESTED = "nn.TransformerEncoder(..., enable_nested_tensor=False)"
_WISHART = (
    "a Wishart made before the call, for its `log_prob`: `prior = Wishart(df, scale_tril=L, "
    "validate_args=False)`; it draws as `root = L @ (torch.randn(p, p, device=L.device).tril(-1) + "
    "torch.distributions.Chi2(df - torch.arange(p, device=L.device), "
    "validate_args=False).rsample().sqrt().diag_embed())`, `root @ root.mT`, with p rows in L"
)
_FULL_RANK = (
    "MultivariateNormal(loc, scale_tril=torch.linalg.cholesky_ex(factor @ factor.mT + "
    "torch.diag_embed(diagonal)).L, validate_args=False)"
)
_TRIED = (
    "a draw before or after the call, as the host asks which proposals were taken: return the mean "
    "and the concentration, then `VonMises(mean, concentration).sample()`; its `log_prob` is "
    "captured, under `validate_args=False`"
)
_HOT = (
    "`index = torch.distributions.Categorical(logits=logits, validate_args=False).sample()`, then "
    "`(index[..., None] == torch.arange(n, device=index.device)).to(logits.dtype)`"
)
_DROPPED = (
    "these layers dropped no more, once and after `model.train()`: `for m in model.modules(): "
    "m.training &= not isinstance(m, peft.tuners.lycoris_utils.LycorisLayer)`; they train as "
    "before, where `module_dropout` is 0, for which they draw on the host as well"
)
_LOOPS = (
    "GCNConv(..., add_self_loops=False), or the like, with the loops in the edges before the call: "
    "`edges, _ = torch_geometric.utils.{name}(edges)`"
)
_CACHED = "; where the graph stays, GCNConv(..., cached=True)"
WEIGHTS_ALONE = (
    "int8 in the weights alone: by hand `F.linear(x, weight.to(x.dtype) * scale[:, None], bias)`; "
    "on a CPU also `torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})`"
)
_OUTSIDE = (
    "a Gaussian process after the launch, as it looks at matrices on the host: `fast = "
    "ol.graph(network)` for the network in front of it; of an ExactGP also `fast = "
    "ol.graph(model)`, `loss = -mll(fast(x), y)`"
)
_SOLVED = (
    "the function that the solver calls graphed, not the solver, which looks at times and errors "
    "on the host: `f = ol.graph(f)`, `odeint(f, y0, t, method=...)`; to train, `odeint_adjoint(f, "
    "y0, t, method=...)`, with the adjoint's gradients, or, where `odeint` calls it n times before "
    "a backward, `f = ol.graph(f, max_in_flight=n)`"
)
_DISTANCES = (
    "the kernel written out, of its own parameters, as of an RBFKernel `gaps = (a[:, None] - b) / "
    "kernel.lengthscale`, `(-0.5 * gaps.square().sum(-1)).exp()`; or the kernel after the launch, "
    "of features that `ol.graph(network)` gives"
)
_SPLIT = 'the rest of the model graphed around it: `ol.graph(model, on_refusal="split")`'
_SCHEDULED = (
    "the scheduler's step after the launch, as it looks at times on the host: `fast = "
    "ol.graph(unet)`, `x = scheduler.step(fast(x, t), t, x).prev_sample`"
)
_WRAPPED = "the module graphed before Fabric wraps it: `fabric.setup(ol.graph(model), optimizer)`"


class Cause(NamedTuple):
    """A function of a library with operations that a capture refuses."""

    file: str  # its file: the package's folder, and the path in it
    function: str | None  # its name; None for all functions of the file
    codes: frozenset[str]  # the codes of its refusals
    fix: str  # the code to write instead


_FIXES: dict[tuple[str, str | None, str], str] = {
    ("torch/distributions/multivariate_normal.py", "_precision_to_scale_tril", "OL101"): (
        "MultivariateNormal(mean, scale_tril=torch.linalg.cholesky_ex(torch.linalg.inv_ex("
        "precision).inverse).L, validate_args=False)"
    ),
    ("torch/distributions/multivariate_normal.py", "__init__", "OL101"): (
        "MultivariateNormal(mean, scale_tril=torch.linalg.cholesky_ex(covariance).L, "
        "validate_args=False)"
    ),
    # These look at values whatever `validate_args` is.
    ("torch/distributions/wishart.py", None, "OL101"): _WISHART,
    ("torch/distributions/lowrank_multivariate_normal.py", None, "OL101"): _FULL_RANK,
    ("torch/distributions/von_mises.py", "_rejection_sample", "OL101"): _TRIED,
    ("torch/distributions/one_hot_categorical.py", None, "OL101"): _HOT,
    ("torch/distributions/distribution.py", None, "OL101"): _UNVALIDATED,
    ("torch/distributions/constraints.py", None, "OL101"): _UNVALIDATED,
    ("torch/distributions/geometric.py", None, "OL101"): _UNVALIDATED,
    # It looks at probabilities whatever `validate_args` is.
    ("torch/distributions/continuous_bernoulli.py", "__init__", "OL101"): (
        "ContinuousBernoulli(logits=logits, validate_args=False)"
    ),
    ("torch/nn/functional.py", "gaussian_nll_loss", "OL101"): (
        "the loss without a check of the variance, which is to be 1e-6 or more: "
        "`(0.5 * (torch.log(var) + (input - target) ** 2 / var)).mean()`"
    ),
    ("torch/nn/functional.py", "ctc_loss", "OL102 OL103"): (
        "the loss after the launch, as it reads targets and lengths on the host: "
        "`F.ctc_loss(fast(x), targets, input_lengths, target_lengths)`"
    ),
    ("torch/nn/modules/batchnorm.py", None, "OL101"): (
        "a number, `momentum=0.1`: under `momentum=None` the host computes one at each call"
    ),
    ("torch/nn/modules/rnn.py", None, "OL101"): (
        f"{_UNPACKED}; and for layers on CUDA {OWN_DROPOUT}"
    ),
    ("torch/nn/modules/rnn.py", None, "OL104"): _UNPACKED,
    ("torch/nn/modules/transformer.py", "_detect_is_causal_mask", "OL101"): (
        "`is_causal=True` beside a mask that is causal, `is_causal=False` beside another: "
        "encoder(x, mask=mask, is_causal=True)"
    ),
    ("torch/nn/utils/clip_grad.py", None, "OL101"): (
        "torch.nn.utils.clip_grad_norm_(...) without `error_if_nonfinite=True`; look at the norm, "
        "which it returns, after the call"
    ),
    ("torch/optim/swa_utils.py", "update_parameters", "OL101 OL104"): (
        "averaged.update_parameters(model), after the graphed call: it counts on the host"
    ),
    ("torch_geometric/utils/loop.py", "add_remaining_self_loops", "OL101 OL102"): (
        _LOOPS.format(name="add_remaining_self_loops") + _CACHED
    ),
    ("torch_geometric/nn/conv/cheb_conv.py", None, "OL101 OL102"): _SPLIT,
    ("torch_geometric/utils/loop.py", "remove_self_loops", "OL101 OL102"): (
        _LOOPS.format(name="add_remaining_self_loops").replace("GCNConv", "GATConv")
    ),
    ("torch_geometric/utils/_scatter.py", "scatter", "OL101"): (
        "the size of the result: global_mean_pool(x, batch, size=n), scatter(x, index, dim_size=n)"
    ),
    ("torch_geometric/nn/aggr/base.py", "__call__", "OL101"): (
        "the size of the result: SumAggregation()(x, index, dim_size=n); of a model that does not "
        'take one, as SchNet, `ol.graph(model, on_refusal="split")`'
    ),
    ("torch_geometric/utils/_to_dense_adj.py", "to_dense_adj", "OL101"): (
        "torch.zeros(n, n, device=edges.device).index_put(tuple(edges), weights, accumulate=True), "
        "with a weight for each edge"
    ),
    ("peft/tuners/loha/layer.py", "forward", "OL101 OL104"): _DROPPED,
    ("peft/tuners/lokr/layer.py", "forward", "OL101 OL104"): _DROPPED,
    ("torch/ao/nn/quantized/modules/__init__.py", "forward", "OL101"): WEIGHTS_ALONE,
    ("torchmetrics/aggregation.py", None, "OL101"): (
        'no look for NaNs: MeanMetric(..., nan_strategy="disable")'
    ),
    ("torchmetrics/utilities/data.py", "_bincount", "OL102"): (
        "a metric that counts classes after the launch: `y = fast(x)`, `metric.update(y, target)`"
    ),
    **{
        (f"diffusers/schedulers/scheduling_{name}.py", "step", "OL101 OL102"): _SCHEDULED
        for name in (
            *("ddim", "ddpm", "euler_discrete", "lcm", "lms_discrete", "pndm"),
            "unipc_multistep",
        )
    },
    ("gpytorch/kernels/kernel.py", "covar_dist", "OL101"): _DISTANCES,
    ("gpytorch/models/exact_gp.py", "__call__", "OL101"): _OUTSIDE,
    ("gpytorch/variational/variational_strategy.py", "__call__", "OL101"): _OUTSIDE,
    ("linear_operator/utils/cholesky.py", None, "OL101"): _OUTSIDE,
    # All solvers run below these, and ask of the times first.
    ("torchdiffeq/_impl/odeint.py", None, "OL101"): _SOLVED,
    ("torchdiffeq/_impl/adjoint.py", None, "OL101"): _SOLVED,
    ("lightning_fabric/wrappers.py", "_register_backward_hook", "OL112"): _WRAPPED,
    ("lightning/fabric/wrappers.py", "_register_backward_hook", "OL112"): _WRAPPED,
}
"""(file, function, codes) -> the fix of a `Cause`."""
CAUSES = tuple(
    Cause(file, function, frozenset(codes.split()), fix)
    for (file, function, codes), fix in _FIXES.items()
)


def fix_within(code: str, calls: Iterable[tuple[str, str]]) -> str | None:
    """Return the way to do without a library's refused function, by the first matching cause of the
    table. `calls`: see `frames.origins.library_calls`."""
    running = set(calls)
    files = {file for file, _ in running}
    for cause in CAUSES:
        runs = cause.file in files if cause.function is None else cause[:2] in running
        if runs and code in cause.codes:
            return cause.fix
    return None

"""The operators of GPUs that the CPU lacks, or has in another form, for the emulated device.

Its memory is the CPU's, and so the CPU gets them: memory-efficient attention, the steps of LSTM and
GRU, `histc` of integers; and `ctc_loss` reads lengths of the host there, as on CUDA.

The seeds of attention lie where CUDA has them. Outside of a capture that is the host, where its
backward reads them; in a capture it is the device. A backward that finds a seed where it does not
look for it is an error here, and the end of the process there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator
from onelaunch.driver.attention_seeds import seeds_of

_library: torch.library.Library | None = None
_aten: Any = torch.ops.aten


def install_kernels() -> None:
    """Give torch the operators, for the process."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_scaled_dot_product_efficient_attention", _attention, "CPU")
    _library.impl("_scaled_dot_product_efficient_attention_backward", _attention_backward, "CPU")
    _library.impl("_thnn_fused_lstm_cell", _lstm, "CPU")
    _library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_backward, "CPU")
    _library.impl("_thnn_fused_gru_cell", _gru, "CPU")
    _library.impl("_thnn_fused_gru_cell_backward", _gru_backward, "CPU")
    _library.impl("ctc_loss.Tensor", _ctc_loss, "AutogradPrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel before
        _library.impl("histc", _histc, "CPU", allow_override=True)


def refuse_seeds(op: Operator, args: Sequence[Any], captured: bool, device_tensor: type) -> None:
    """Raise where an operator is given a seed that it cannot read."""
    dropout = next((a for a in args if isinstance(a, float)), 0.0)
    for place in seeds_of(op).arguments:
        if dropout and isinstance(args[place], device_tensor) is not captured:
            where = "on the host, in a capture" if captured else "on the device, outside of one"
            raise RuntimeError(f"segmentation fault: `{op.label}` reads a seed {where}")


def with_seeds_on_host(op: Operator, result: Any, host: Callable[[Tensor], Tensor]) -> Any:
    """Bring the seeds of a result to the host: one outside of a capture."""
    places = seeds_of(op).results
    if not places:
        return result
    return tuple(host(t).clone() if i in places else t for i, t in enumerate(result))


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        upper = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
        scores = scores.masked_fill(upper, -math.inf)
    return scores


def _laid_out(heads: Tensor) -> Tensor:
    """Lay out rows of heads, (batch, heads, length, width), as CUDA's kernels do and compiled code
    takes for granted: the heads of a word are adjacent."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _kept(like: Tensor, dropout: float, seed: Tensor) -> Tensor | float:
    """Draw the factors of the weights: 0 where they are dropped."""
    if not dropout:
        return 1.0
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.rand(like.shape, generator=generator, dtype=like.dtype, device="cpu")
    return (drawn >= dropout) / (1 - dropout)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = _weights(query, key, attn_bias, is_causal, scale or query.shape[-1] ** -0.5)
    seed = torch.zeros((), dtype=torch.long, device="cpu")
    if dropout_p:
        seed = torch.randint(1 << 62, (), device="cpu")
    weights = scores.softmax(-1) * _kept(scores, dropout_p, seed)
    return _laid_out(weights @ value), scores.logsumexp(-1), seed, torch.zeros_like(seed)


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    factor = scale or query.shape[-1] ** -0.5
    scores = _weights(query, key, attn_bias, is_causal, factor)
    weights, kept = scores.softmax(-1), _kept(scores, dropout_p, philox_seed)
    of_weights = (grad_out @ value.transpose(-2, -1)) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    return (
        _laid_out(of_scores @ key * factor),
        _laid_out(of_scores.transpose(-2, -1) @ query * factor),
        _laid_out((weights * kept).transpose(-2, -1) @ grad_out),
        of_scores if grad_input_mask[3] else None,
    )


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates


def _lstm_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_gates, _, grad_cx, *_ = _aten._thnn_differentiable_lstm_cell_backward(
        grad_hy, grad_cy, workspace, torch.zeros_like(workspace), None, None, cx, cy
    )
    return grad_gates, grad_cx, grad_gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ir, iz, given = _biased(input_gates, input_bias).chunk(3, 1)
    hr, hz, held = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    n = (given + (ir + hr).sigmoid() * held).tanh()
    return n + (iz + hz).sigmoid() * (hx - n), torch.cat([ir + hr, iz + hz, given, held, hx], 1)


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, given, held, hx = workspace.chunk(5, 1)
    inputs, hidden = torch.cat([r, z, given], 1), torch.cat([r * 0, z * 0, held], 1)
    of_input, of_hidden, of_hx, *_ = _aten._thnn_differentiable_gru_cell_backward(
        grad_hy, inputs, hidden, hx, None, None
    )
    of_biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, of_hx, of_biases[0], of_biases[1]


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *options: Any,
) -> Tensor:
    # For a subclass of Tensor, as the device's are, torch would compute with lengths of the host.
    lengths = input_lengths, target_lengths
    if any(t.device.type != "cpu" for t in lengths):
        return _aten.ctc_loss.Tensor.decompose(log_probs, targets, *lengths, *options)
    return _aten.ctc_loss.IntList(log_probs, targets, *(t.tolist() for t in lengths), *options)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    # CUDA counts integers too, as routers of experts rely on; a CPU's kernel takes floats alone.
    exact = x if x.is_floating_point() else x.double()
    counts = _aten.histc.out(exact, bins, min, max, out=exact.new_empty(bins))
    return counts.to(x.dtype)

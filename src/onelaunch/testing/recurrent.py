"""A step of an LSTM or GRU in one operator, as their layers take it on every device but the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def install_recurrent() -> None:
    """Give the CPU the operators, which torch has for GPUs alone: the device's memory is there."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_thnn_fused_lstm_cell", _lstm, "CPU")
    _library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_backward, "CPU")
    _library.impl("_thnn_fused_gru_cell", _gru, "CPU")
    _library.impl("_thnn_fused_gru_cell_backward", _gru_backward, "CPU")


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
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    of_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    shown = cy.tanh()
    of_cy = of_hy * o * (1 - shown * shown)
    of_cy = of_cy if grad_cy is None else of_cy + grad_cy
    parts = (
        of_cy * g * i * (1 - i),
        of_cy * cx * f * (1 - f),
        of_cy * i * (1 - g * g),
        of_hy * shown * o * (1 - o),
    )
    grad_gates = torch.cat(parts, 1)
    return grad_gates, of_cy * f, grad_gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ir, iz, given = _biased(input_gates, input_bias).chunk(3, 1)
    hr, hz, held = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (given + r * held).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, held], 1)


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, n, hx, held = workspace.chunk(5, 1)
    of_z = grad_hy * (hx - n) * z * (1 - z)
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_r = of_n * held * r * (1 - r)
    given = torch.cat([of_r, of_z, of_n], 1)
    hidden = torch.cat([of_r, of_z, of_n * r], 1)
    if not has_bias:
        return given, hidden, grad_hy * z, None, None
    return given, hidden, grad_hy * z, given.sum(0), hidden.sum(0)

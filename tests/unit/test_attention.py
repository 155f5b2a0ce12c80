"""Attention with a boolean mask by other kernels than cuDNN's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onelaunch.padding import attention


@pytest.mark.parametrize("chosen", [True, False])
def test_it_hides_by_minus_infinity(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    """On the CPU torch has no memory-efficient kernel, and the plain one is called."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.4
    mask[..., 0] = True
    choice: Any = torch._fused_sdp_choice
    monkeypatch.setattr(attention, "_CUDNN", choice(q, k, v, mask) if chosen else -1)
    made = attention._without_cudnn(q, k, v, mask)
    assert (made is not None) == chosen
    with attention.InfiniteMasks():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        plain = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert torch.equal(plain, F.scaled_dot_product_attention(q, k, v))
    assert made is None or torch.equal(made, found)


def test_only_boolean_masks_matter() -> None:
    q = torch.randn(1, 2, 3, 8)
    assert attention._without_cudnn(q, q, q) is None
    assert attention._without_cudnn(q, q, q, torch.zeros(3, 3)) is None

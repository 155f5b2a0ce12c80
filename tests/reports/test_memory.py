"""Memory, transforms, streams, and batches that are padded to a captured size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onelaunch as ol
from tests.device.drop_in import on_cuda

from .side_by_side import refused, right_or_refused, side_by_side

Rand = Callable[..., Tensor]


def test_transforms(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/67140

    The second transform of a size, with a cached plan, overwrites its argument or is wrong."""

    def program(graph: Any) -> Iterator[Any]:
        window = torch.hann_window(16, device=device)

        def spectrum(x: Tensor) -> Any:
            s = torch.stft(x, 16, 4, window=window, return_complex=True)
            return s.abs(), torch.fft.irfft(s * 2, dim=1), x

        fast = graph(spectrum)
        for i in range(6):
            x = rand(i, 2, 64)
            yield fast(x), x

    side_by_side(program, device, captures=1)


def test_an_inverse_transform_that_checks_its_window(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/119420

    `torch.stft` and back in a loop; the inverse asks the host whether its window covers all."""
    window = torch.hann_window(16, device=device)

    def refusing(graph: Any) -> Iterator[Any]:
        fast = graph(lambda s: torch.istft(s, 16, 4, window=window))  # here
        for i in range(6):
            yield fast(torch.stft(rand(i, 2, 64), 16, 4, window=window, return_complex=True))

    assert "F.fold" in refused(refusing, device, "OL101", "# here")

    def inverse(s: Tensor) -> Tensor:
        frames = torch.fft.irfft(s, 16, dim=-2) * window[:, None]
        squares = window.square()[None, :, None].expand_as(frames)
        size: Any = {"output_size": (1, 4 * s.shape[-1] + 12), "kernel_size": (1, 16)}
        size["stride"] = (1, 4)
        return (F.fold(frames, **size) / F.fold(squares, **size))[:, 0, 0, 8:-8]

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(inverse)
        for i in range(6):
            x = rand(i, 2, 64)
            y = fast(torch.stft(x, 16, 4, window=window, return_complex=True))
            torch.testing.assert_close(y, x)
            yield y

    side_by_side(program, device, captures=1)


@on_cuda
def test_work_that_is_not_joined(device: torch.device, rand: Rand) -> None:
    """https://github.com/deepseek-ai/DeepEP/issues/62

    "capturing stream has unjoined work", with no line."""

    def forward(x: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        return x * 2

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(forward)
        for i in range(5):
            yield fast(rand(i, 8))

    refused(program, device, "OL109", "")


BATCH = ol.Buckets(dim=0, sizes=(2, 4, 8))
SIZES = [3, 8, 5, 2, 1, 7, 4, 6, 8, 3, 1, 5, 2, 7]


def test_padding_writes_no_slot(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang/pull/1469

    Padded rows of a batch write to the cache, at the slot that stale metadata names."""

    def program(graph: Any) -> Iterator[Any]:
        cache = torch.zeros(20, 4, device=device)

        def write(x: Tensor, slots: Tensor) -> Tensor:
            cache[slots] = x
            return cache[slots] + 1

        fast = graph(write)
        for i, n in enumerate(SIZES):
            yield fast(rand(i, n, 4), torch.arange(n, device=device) + i), cache.clone()

    right_or_refused(program, device, "OL140", buckets=BATCH)


@pytest.mark.parametrize("norm", [F.instance_norm, F.layer_norm])
def test_images_of_several_sizes(device: torch.device, rand: Rand, norm: Any) -> None:
    """https://github.com/sgl-project/sglang/pull/19516

    Images of any width and height: padding them costs, or changes what is normalised over them."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            y = norm(x) if norm is F.instance_norm else norm(x, x.shape[-1:])
            return F.interpolate(y, scale_factor=2, mode="nearest")

        fast = graph(forward)
        for i, n in enumerate([6, 8, 5, 7, 8, 6, 5]):
            yield fast(rand(i, 1, 2, n, 8))

    right_or_refused(program, device, "OL140", buckets=ol.Buckets(dim=2, sizes=(8,)))

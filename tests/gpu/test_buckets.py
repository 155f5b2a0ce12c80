"""Buckets on CUDA: whole models, the kernel that copies rows, and what a call costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.padding.attention import InfiniteMasks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    return transformers.BertModel(config).eval().cuda()


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=3, n_head=4, n_positions=64, use_cache=False
    )
    return transformers.GPT2Model(config).eval().cuda()


SIZES = [(3, 11), (3, 11), (4, 16), (2, 9), (3, 16), (4, 10), (3, 11)]


def requests() -> Iterator[Tensor]:
    for batch, length in SIZES:
        yield torch.randint(200, (batch, length), device="cuda")


def masked(*sizes: tuple[int, ...]) -> ol.Buckets:
    """Buckets of batch and length, for a mask of 4 dimensions: of one of 2 transformers asks the
    host whether it masks anything."""
    dims, pad = {"attention_mask": (0, 3)}, {"attention_mask": (None, 0)}
    return ol.Buckets(dim=(0, 1), sizes=sizes, dims=dims, pad=pad)


def mask_of(ids: Tensor) -> Tensor:
    mask = torch.ones(len(ids), 1, 1, ids.shape[1], dtype=torch.bool, device="cuda")
    mask[0, ..., -2:] = False
    return mask


def test_bert() -> None:
    model = bert()
    fast = ol.graph(model, buckets=masked((1, 4), (8, 16)), warmup=1)
    for ids in requests():
        mask = mask_of(ids)
        got = fast(input_ids=ids, attention_mask=mask)
        expected = model(input_ids=ids, attention_mask=mask)
        _close(got.last_hidden_state, expected.last_hidden_state)
        _close(got.pooler_output, expected.pooler_output)
    assert len(fast.recordings) == 1
    assert set(fast.recordings[0].inputs.values()) == {"pad"}


def test_inductor_compiles_once_for_all_buckets() -> None:
    torch._dynamo.reset()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model = bert()
    buckets = masked((2, 3, 4), (8, 10, 12, 16))
    eager, fast = ol.graph(model, buckets=buckets), ol.graph(model, buckets=buckets, compile=True)
    for each in (eager, fast):
        ids = torch.randint(200, (4, 16), device="cuda")
        each.warm_up([((), {"input_ids": ids, "attention_mask": mask_of(ids)})])
        assert len(each.recordings) == 12
    assert not {r.nodes for r in fast.recordings} & {r.nodes for r in eager.recordings}
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled <= 4
    for ids in requests():
        mask = mask_of(ids)
        got = fast(input_ids=ids, attention_mask=mask)
        expected = model(input_ids=ids, attention_mask=mask)
        _close(got.last_hidden_state, expected.last_hidden_state)
    assert fast.stats().eager_calls == 0


def test_gpt2() -> None:
    model = gpt2()
    buckets = ol.Buckets(
        dim=(0, 1),
        sizes=((1, 4), (8, 16)),
        dims={"attention_mask": (0, (2, 3))},
        pad={"attention_mask": (None, 0)},
    )
    fast = ol.graph(model, buckets=buckets, warmup=1)
    for ids in requests():
        ones = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], device="cuda")
        causal = ones.bool().tril()
        got = fast(ids, attention_mask=causal).last_hidden_state
        _close(got, model(ids, attention_mask=causal).last_hidden_state)
    assert len(fast.recordings) == 1


def _close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.complex64])
@pytest.mark.parametrize("value", [None, 3])
@pytest.mark.parametrize("trailing", [(), (3,), (16,)])
def test_rows_of_every_alignment(
    dtype: torch.dtype, value: int | None, trailing: tuple[int, ...]
) -> None:
    pad = {} if value is None else {"x": (None, value)}
    seen = ol.graph(
        lambda x: (x * 1, x[:1, -1:] * 1),
        buckets=ol.Buckets((0, 1), ((5,), (9,)), pad=pad, independent=True, outputs={1: None}),
        warmup=1,
    )
    memory = torch.randint(100, (9 * 9 * 16 + 1,), device="cuda").to(dtype)
    for batch, length in [(2, 3), (2, 3), (5, 9), (1, 1), (4, 8), (3, 9), (5, 2)]:
        shape = (batch, length, *trailing)
        for start in (0, 1):  # as it is aligned for one element, or for many
            x = memory[start : start + torch.Size(shape).numel()].view(shape)
            rows, last = seen(x)
            assert torch.equal(rows, x)
            filled = value is not None and length < 9 and seen.recordings  # not in the warm-up
            corner = torch.full_like(x[:1, -1:], value or 0) if filled else x[:1, -1:]
            assert torch.equal(last, corner)
    assert set(seen.recordings[0].inputs.values()) == {"pad"}


def _host_us(call: Callable[[], object]) -> float:
    for _ in range(50):
        call()
    spans: list[float] = []
    for _ in range(15):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            call()
        spans.append((time.perf_counter() - started) / 200 * 1e6)
    return statistics.median(spans)


def test_one_padded_input_costs_at_most_5_us() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    exact = ol.graph(model, warmup=1)
    fast = ol.graph(model, buckets=ol.Buckets(0, (4, 8)), warmup=1)
    whole, part = torch.randn(8, 64, device="cuda"), torch.randn(6, 64, device="cuda")
    for _ in range(3):
        exact(whole)
        fast(part)
    assert _host_us(lambda: fast(part)) - _host_us(lambda: exact(whole)) <= 5


def test_three_padded_inputs_in_two_dimensions_cost_at_most_10_us() -> None:
    def f(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (x * 2 + y) * mask[..., None]

    exact = ol.graph(f, warmup=1)
    buckets = ol.Buckets((0, 1), ((2, 4), (8, 16)), pad={"mask": (None, 0)})
    fast = ol.graph(f, buckets=buckets, warmup=1)

    def arguments(batch: int, length: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, length, 32, device="cuda")
        return x, x * 2, torch.ones(batch, length, device="cuda")

    whole, part = arguments(4, 16), arguments(3, 11)
    for _ in range(3):
        exact(*whole)
        fast(*part)
    assert _host_us(lambda: fast(*part)) - _host_us(lambda: exact(*whole)) <= 10


def test_fifty_one_sizes_of_an_encoder() -> None:
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval().cuda()
    sizes = (1, 2, 4, *range(8, 385, 8))
    assert len(sizes) == 51
    fast = ol.graph(model, buckets=ol.Buckets(0, sizes))
    started = time.perf_counter()
    fast.warm_up([torch.randn(1, 16, 256, device="cuda")])
    seconds = time.perf_counter() - started
    print(f"{seconds:.2f} s, {fast.stats().capture_seconds:.2f} s of them in captures")
    x = torch.randn(77, 16, 256, device="cuda")
    _close(fast(x), model(x))
    assert seconds < 20


def attends(x: Tensor, mask: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    found = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, None, None])
    return found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("length", [7, 16, 33, 64])
@pytest.mark.parametrize("how", ["plain", "grad", "autocast", "grouped", "dropout", "scaled"])
def test_attention_without_cudnn_is_torchs(length: int, how: str) -> None:
    """Bit for bit that of torch with cuDNN's switched off, and its gradients."""
    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    q = torch.randn(2, 4, length, 64, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 2 if how == "grouped" else 4, length, 64, device="cuda", dtype=dtype)
    mask = torch.rand(2, 1, 1, length, device="cuda") > 0.2
    mask[..., 0] = True
    kwargs: dict[str, Any] = {"dropout_p": 0.5 if how == "dropout" else 0.0}
    kwargs |= {"enable_gqa": True} if how == "grouped" else {}
    kwargs |= {"scale": 0.3} if how == "scaled" else {}

    def results(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        inputs = [t.clone().requires_grad_(how == "grad") for t in (q, k, v)]
        with torch.set_grad_enabled(how == "grad"):
            with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
                found = call(*inputs, attn_mask=mask, **kwargs)
            if how == "grad":
                found.float().pow(2).sum().backward()
        return [found, *(t.grad for t in inputs if t.grad is not None)]

    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        expected = results(F.scaled_dot_product_attention)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with InfiniteMasks():
        found = results(F.scaled_dot_product_attention)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def test_a_larger_bucket_serves_attention_with_a_boolean_mask() -> None:
    """In the background, too, no number that hides padding has to be checked."""
    buckets = ol.Buckets(1, (16, 32, 64), pad={"mask": 0})
    fast: Any = ol.graph(attends, buckets=buckets, warmup=1, capture="background")

    def call(length: int) -> None:
        x = torch.randn(2, length, 256, device="cuda", dtype=torch.bfloat16)
        mask = torch.ones(2, length, dtype=torch.bool, device="cuda")
        mask[0, length // 2 + 1 :] = False
        got, expected = fast(x, mask), attends(x, mask)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)

    end = time.monotonic() + 20
    while not fast.stats().larger_calls and time.monotonic() < end:
        for length in (64, 50) if not fast.recordings else (64, 50, 20):
            call(length)
        time.sleep(0.01)
    assert fast.stats().larger_calls
    assert not any(e.captured.bucket.checked for e in fast._table.entries)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_boolean_mask_needs_no_check_of_values(enabled: bool) -> None:
    """cuDNN's attention would apply it by a finite number."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        buckets = ol.Buckets(1, (32, 64), pad={"mask": 0})
        fast: Any = ol.graph(attends, buckets=buckets, warmup=1)
        for length in (64, 60, 33, 50, 32, 20, 7, 1):
            x = torch.randn(2, length, 256, device="cuda", dtype=torch.bfloat16)
            mask = torch.ones(2, length, dtype=torch.bool, device="cuda")
            mask[0, length // 2 + 1 :] = False
            for _ in range(3):
                got, expected = fast(x, mask), attends(x, mask)
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        assert len(fast.recordings) == 2
        assert not any(e.captured.bucket.checked for e in fast._table.entries)
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)

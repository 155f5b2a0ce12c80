"""Padding that values do not show: of zeros, of ones, and of rows that are all alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch.errors import CaptureError
from onelaunch.sizes.buckets import Buckets
from onelaunch.sizes.dims import SizeLink
from tests.unit.padded import Program, proof

ALIKE = {
    "zeros": torch.zeros(8, 6),
    "ones": torch.ones(8, 6),
    "one row": torch.arange(6.0).repeat(8, 1),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def ones_beside(x: Tensor) -> Tensor:
    y = torch.ones(len(x), 2)
    y[:, 0] = x[:, 0]
    return x + y.sum(0)[1]


def writes(start: int | None, stop: int | None) -> Program:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        half = len(x) // 2
        y[None if start is None else half : None if stop is None else half] = 2.0
        return y

    return f


def writes_one(x: Tensor) -> Tensor:
    y = x.clone()
    y[len(x) // 2 - 1] = 1.0
    return y


def writes_the_last(x: Tensor) -> Tensor:
    y = x.clone()
    y[-1] = 2.0
    return y.exp().argmax(1)  # of equals: rounding changes it at any size


def writes_the_last_of_all(x: Tensor) -> Tensor:
    y = x.clone()
    y.unbind()[-1].fill_(2.0)
    return y.exp().argmax(1)


def puts_the_last(x: Tensor) -> Tensor:
    return x.select_scatter(x[-1] * 2, 0, -1).exp().argmax(1)


def draws_apart(x: Tensor) -> Tensor:
    torch.rand(len(x))
    return x + torch.rand(6)


def chooses(x: Tensor) -> Tensor:
    probability = x.softmax(0).sum(1).softmax(0)
    return x[:1] * torch.multinomial(probability, 1)


REFUSED: dict[str, Program] = {
    "mean of rows": lambda x: x.mean(0),
    "mean of zeros": lambda x: (x * 0).mean(0),
    "the largest of what is zeroed": lambda x: (x * torch.zeros(len(x), 1)).amax(0) + x,
    "the last row": lambda x: x[-1] * 1,
    "the last row written": writes_the_last,
    "the last of all rows written": writes_the_last_of_all,
    "the last row put": puts_the_last,
    "the last but one": lambda x: x[-2] * 1,
    "the last but three": lambda x: x[-4] * 1,
    "an index from the end": lambda x: x[torch.tensor([-2])] * 1,
    "a row of the middle": lambda x: x[len(x) // 2] * 1,
    "from the middle": lambda x: x[len(x) // 2 :][:1] * 1,
    "from the end": lambda x: x[max(0, len(x) - 7) :][0] * 1,
    "a half": lambda x: x.split(len(x) // 2)[1][0] * 1,
    "a row selected by number": lambda x: x.index_select(0, torch.tensor([len(x) // 2 - 1])),
    "a row picked by number": lambda x: x[torch.tensor([len(x) // 2 - 1])],
    "backwards, one row": lambda x: x.flip(0)[3] * 1,
    "rolled rows": lambda x: x.roll(4, 0)[0] * 1,
    "rolled back": lambda x: x.roll(-3, 0)[4] * 1,
    "rolled columns": lambda x: x.roll(len(x) // 2, 1),
    "behind the first copy": lambda x: torch.cat([x, x])[8] * 1,
    "a repeated row": lambda x: x.repeat(2, 1)[8] * 1,
    "an element of all": lambda x: x.t().reshape(-1)[8] * 1,
    "rows padded in front": lambda x: F.pad(x, (0, 0, len(x) // 2, 0))[4] * 1,
    "a part of the rows": lambda x: F.adaptive_avg_pool1d(x.t()[None], 2)[0, :, 0] * 1,
    "rows resampled": lambda x: F.interpolate(x.t()[None], size=4)[0, :, 1] * 1,
    "rows resampled to corners": lambda x: F.interpolate(
        x.t()[None], scale_factor=2.0, mode="linear", align_corners=True
    )[0, :, 3],
    "windows": lambda x: x.unfold(0, len(x) // 2, 1)[0] * 1,
    "strides": lambda x: x.as_strided((1, 6), (6, 1), 6 * (len(x) // 2)) * 1,
    "so many of the columns": lambda x: x.topk(len(x) // 2, 1)[0][:, 0] * 1,
    "a norm by number": lambda x: x.norm(len(x), 1),
    "a triangle": lambda x: x.tril(len(x) // 2),
    "a diagonal": lambda x: x.diagonal(len(x) // 2 - 3)[:1] * 1,
    "a constant": lambda x: x + torch.tensor([float(len(x))] * 12).sum() * 1e-9,
    "a filled tensor": lambda x: x.new_full((1,), len(x)) * 1e-9 + x,
    "a filled one": lambda x: torch.empty(1).fill_(len(x)) * 1e-9 + x,
    "ones beside": ones_beside,
    "writes the first half": writes(None, 0),
    "writes the second half": writes(0, None),
    "writes a row": writes_one,
    "puts a row": lambda x: torch.zeros(8, 6).index_put((torch.tensor(len(x) // 2),), x[0]),
    "draws for rows first": draws_apart,
    "draws one of the rows": chooses,
    "distances": lambda x: torch.cdist(x, x).sum(1),
    "index_add of rows": lambda x: torch.zeros(3, 6).index_add(0, torch.arange(len(x)) % 3, x),
    "smallest share": lambda x: x @ x.t().softmax(-1).amin(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("values", ALIKE)
@pytest.mark.parametrize("sizes", [(4, 8), (6, 8)])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_whatever_the_values(name: str, sizes: tuple[int, int], values: str) -> None:
    with pytest.raises(CaptureError) as caught:
        proof(REFUSED[name], ALIKE[values], buckets=Buckets(0, (*sizes[:1], 8)))
    assert caught.value.code == "OL140"


def guided(x: Tensor) -> Tensor:
    one, other = (torch.cat([x, x]) * 2).chunk(2)
    return one + 3 * (other - one)


def biased(x: Tensor) -> Tensor:
    """A bias in rows of eights, as kernels of attention want it, cut again."""
    n = x.shape[1]
    return x + F.pad(x[..., 0], (0, 8 - n % 8))[:, :n, None]


def decoded(x: Tensor) -> Tensor:
    new = torch.ones(len(x), 3, x.shape[2])
    return torch.cat([x, new], 1)[:, x.shape[1] :] * 2


PASS: dict[str, tuple[Program, Buckets]] = {
    "two copies, apart again": (guided, Buckets(0, (4, 8))),
    "a bias in eights": (biased, Buckets((0, 1), ((2, 6), (6, 12)))),
    "what was put behind": (decoded, Buckets(1, (4, 8))),
    "the last, put behind": (
        lambda x: torch.cat([x, torch.ones(len(x), 1, 4)], 1)[:, -1] * 2,
        Buckets(1, (4, 8)),
    ),
    "resampled twice as long": (
        lambda x: F.interpolate(x.mT, scale_factor=2, mode="nearest").mT.contiguous(),
        Buckets(1, (4, 8)),
    ),
    "a shift by one": (
        lambda x: torch.cat([torch.zeros(len(x), 1, 4), x[:, :-1]], 1),
        Buckets(1, (4, 8)),
    ),
    "written to longer memory": (
        lambda x: torch.zeros(len(x), 64, 4).index_copy(1, torch.arange(x.shape[1]), x)[:, :3] * 1,
        Buckets(1, (4, 8), pad={0: 0}),
    ),
}


@pytest.mark.parametrize("name", PASS)
def test_what_only_moves_passes(name: str) -> None:
    f, buckets = PASS[name]
    proof(f, torch.randn(6, 6, 4), buckets=buckets)


LENGTH = Buckets(1, (4, 8), pad={"mask": 0})
BOTH = Buckets((0, 1), ((4, 8), (4, 8)), pad={"mask": (None, 0)})


@pytest.mark.parametrize("buckets", [LENGTH, BOTH], ids=["length", "both"])
def test_a_zero_is_not_left_out_but_of_sums(buckets: Buckets) -> None:
    x, mask = torch.rand(6, 6, 4) + 1, torch.ones(6, 6)
    assert proof(lambda x, mask: (x * mask[..., None]).sum(1), x, mask, buckets=buckets)
    for f in (
        lambda x, mask: (x * mask[..., None]).amax(1),  # of what is positive now
        lambda x, mask: (x * 0 * mask[..., None]).mean(1),
        lambda x, mask: (x * 0 * mask[..., None]).std(1),
        lambda x, mask: (x[..., 0] + (1 - mask) * -1e9).softmax(1).amin(1),
    ):
        with pytest.raises(CaptureError, match="OL140"):
            proof(f, x, mask, buckets=buckets)


def test_what_is_low_now_may_be_multiplied_by_zero() -> None:
    def attend(x: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
        return ((x[..., 0] + (1 - mask) * -1e9 * gate).softmax(1)[..., None] * x).sum(1)

    x, mask = torch.randn(6, 6, 4), torch.ones(6, 6)
    with pytest.raises(CaptureError, match="softmax"):
        proof(attend, x, mask, torch.ones(1, 1), buckets=LENGTH)


def test_a_written_constant_is_no_longer_known() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        gate = torch.ones(len(x), 1)
        gate.mul_(y)
        return x + gate * x.mean(0)

    with pytest.raises(CaptureError, match="mean"):
        proof(f, torch.randn(6, 6), torch.zeros(6, 1))


def masked_encoder(x: Tensor, mask: Tensor) -> Tensor:
    return ENCODER(x, src_key_padding_mask=mask == 0)


def masked_attention(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ATTENTION(x, x, x, key_padding_mask=mask == 0)


def masked_across(x: Tensor, mask: Tensor) -> Tensor:
    return ATTENTION(x, x * 2, x * 3, key_padding_mask=mask == 0)[0]


def causal(x: Tensor, mask: Tensor) -> Tensor:
    pairs = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return ENCODER(x, mask=pairs, src_key_padding_mask=torch.log(mask), is_causal=True)


ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
)
ATTENTION = nn.MultiheadAttention(16, 2, batch_first=True)
for module in (ENCODER, ATTENTION):
    module.eval().requires_grad_(False)


@pytest.mark.parametrize("f", [masked_encoder, masked_attention, masked_across, causal])
def test_encoders_with_a_mask_of_keys(f: Program) -> None:
    x, mask = torch.randn(6, 6, 16), torch.ones(6, 6)
    mask[0, 3:] = 0
    for buckets in (Buckets(0, (4, 8)), LENGTH, BOTH):
        assert proof(f, x, mask, buckets=buckets).follows[0][0] == SizeLink(
            *(buckets.dim[0], 0, 1, 0)
        )
    if f is not causal:
        with pytest.raises(CaptureError, match=r"attention|encoder|softmax"):
            proof(f, x, mask, buckets=Buckets(1, (4, 8)))


def test_attention_of_which_another_kernel_serves_the_smallest_size() -> None:
    """On CUDA cuDNN's takes no length of 1, and a mask of booleans becomes other numbers for it."""

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        hides = torch.scalar_tensor(-math.inf if x.shape[1] == 1 else -65504.0)
        bias = torch.where(mask[:, None, :] > 0, 0.0, hides)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    def added(x: Tensor, mask: Tensor) -> Tensor:
        hides = torch.scalar_tensor(-math.inf if x.shape[1] == 1 else -65504.0)
        return torch.where(mask[..., None] > 0, 0.0, hides).exp() + x * hides

    x, mask = torch.randn(6, 6, 16), torch.ones(6, 6)
    mask[0, 3:] = 0
    first = Buckets((0, 1), ((8,), (8,)), pad={"mask": (None, 0)})
    assert proof(masked, x, mask, buckets=first).follows[0]
    with pytest.raises(CaptureError, match="other real rows"):
        proof(added, x, mask, buckets=first)


def test_rows_of_which_all_is_hidden() -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ x.mT + (1 - mask[:, None, :]) * torch.finfo(torch.float32).min
        return scores.softmax(-1) @ x

    buckets = Buckets(1, (8, 16), pad={"mask": -1})  # lower than what hides the real ones
    x, mask = torch.randn(2, 11, 4), torch.ones(2, 11)
    assert proof(attend, x, mask, buckets=buckets).follows == [(SizeLink(1, 0, 1, 0),)]
    hidden = torch.zeros(2, 11)
    padded = torch.cat([x, torch.randn(2, 5, 4)], 1), F.pad(hidden, (0, 5), value=-1)
    torch.testing.assert_close(attend(*padded)[:, :11], attend(x, hidden))


def test_a_loss_leaves_out_what_it_ignores() -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target)

    x, target = torch.randn(6, 5), torch.arange(6) % 5
    assert proof(loss, x, target, buckets=Buckets(0, (4, 8), pad={"target": -100})).follows == [()]
    with pytest.raises(CaptureError, match="nll_loss"):
        proof(loss, x, target)


def test_bags_of_embeddings() -> None:
    bag = nn.EmbeddingBag(10, 4)
    found = proof(bag, torch.randint(0, 10, (6, 5)))
    assert found.follows[0][0] == SizeLink(0, 0, 1, 0)

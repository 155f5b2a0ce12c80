"""Training programs with attention dropout, each to be run in a process of its own.

``python -m tests.gpu.attention_programs NAME [ARGUMENT...]`` ends with 0 where the graphed program
was equal to eager, values and the generator's position, and replays happened.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from tests.device.drop_in import assert_same, replays

SIZES = {"vocab_size": 100, "num_attention_heads": 4, "num_hidden_layers": 2}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64}


def model_of(name: str, dtype: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if name == "bert":
        made: Any = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **WIDE))
    elif name == "gpt2":
        config = hf.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        made = hf.GPT2LMHeadModel(config)
    else:
        config = hf.LlamaConfig(**SIZES, **WIDE, attention_dropout=0.1 if "dropout" in name else 0)
        made = hf.LlamaForCausalLM(config)
        if "checkpoint" in name:
            reentrant = "reentrant" in name
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return made.cuda().to(getattr(torch, dtype)).train()


def loss_of(name: str, model: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    labels = x[:, 0] % 2 if name == "bert" else x
    more = {} if name == "bert" else {"use_cache": False}
    return model(input_ids=x, attention_mask=mask, labels=labels, **more).loss


def both(
    make: Callable[[], nn.Module],
    program: Callable[[nn.Module, Callable[..., Any], int], Any],
    graphed: Callable[[nn.Module], Callable[..., Any]],
    calls: int = 7,
) -> Any:
    """Run a program with a model that is called as it is, and with one that is graphed."""
    first = make()
    second = copy.deepcopy(first)
    torch.rand(1, device="cuda")
    generator, seen, fast = torch.cuda.default_generators[0], list[Any](), None
    for model in (first, second):
        called: Callable[..., Any] = model if model is first else graphed(model)
        fast = called
        torch.manual_seed(3)
        for i in range(calls):
            result = program(model, called, i)
            values = [p.detach().clone() for p in model.parameters()]
            seen.append((result.detach().clone(), values, generator.get_offset()))
    for i, (got, expected) in enumerate(zip(seen[calls:], seen[:calls], strict=True)):
        assert_same(list(got[:2]), list(expected[:2]), f"call {i}")
        assert got[2] == expected[2], f"call {i}: the generator is at {got[2]}, not {expected[2]}"
    assert replays(fast) >= 3, replays(fast)
    return fast


def batch(i: int, mask: str) -> tuple[Tensor, Tensor | None]:
    x = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(i)).cuda()
    if mask == "none":
        return x, None
    given = torch.ones(2, 16, dtype=torch.long)
    given[:, 12 if mask == "padded" else 16 :] = 0
    return x, given.cuda()


def loop(name: str, dtype: str, mask: str) -> None:
    """An ordinary training loop with a graphed model."""
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def program(model: nn.Module, called: Callable[..., Any], i: int) -> Tensor:
        optimizer = optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), 0.1))
        optimizer.zero_grad()
        loss = loss_of(name, called, *batch(i, mask))
        loss.backward()
        optimizer.step()
        return loss

    both(lambda: model_of(name, dtype), program, lambda model: ol.graph(model, warmup=1))


def step(name: str, dtype: str, mask: str) -> None:
    """A whole step."""

    def stepper(model: nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def run(x: Tensor, given: Tensor | None) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(name, model, x, given)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return run

    eager: dict[int, Any] = {}

    def program(model: nn.Module, called: Callable[..., Any], i: int) -> Tensor:
        if called is model:
            called = eager.setdefault(id(model), stepper(model))
        return called(*batch(i, mask))

    both(lambda: model_of(name, dtype), program, lambda model: ol.graph(stepper(model), warmup=2))


def sdpa(backend: str, dtype: str, p: str) -> None:
    """`F.scaled_dot_product_attention` by one of its kernels, in a pair."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.reshape(2, 64, 2, 32).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, dropout_p=float(p))

    kernel = getattr(nn.attention.SDPBackend, backend)
    kind = getattr(torch, dtype)

    def program(model: nn.Module, called: Callable[..., Any], i: int) -> Tensor:
        model.zero_grad()
        x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(i)).cuda().to(kind)
        with nn.attention.sdpa_kernel(kernel):
            y = called(x)
            y.square().mean().backward(retain_graph=i % 3 == 1)
            if i % 3 == 1:
                y.sum().backward()
        with torch.no_grad():
            for q in model.parameters():
                assert q.grad is not None
                q.sub_(q.grad, alpha=0.1)
        return y

    def make() -> nn.Module:
        return Attention().cuda().to(kind)

    both(make, program, lambda model: ol.graph(model, warmup=1))


def places() -> None:
    """Where each operator has its seeds, outside of a capture and in one, and how far it moves the
    generator on: `onelaunch.driver.attention_seeds` relies on the first."""
    from onelaunch.driver.aten import operator
    from onelaunch.driver.attention_seeds import seeds_of

    aten = torch.ops.aten
    float32, half = torch.float32, torch.bfloat16
    torch.rand(1, device="cuda")
    generator = torch.cuda.default_generators[0]

    def heads(dtype: torch.dtype, transposed: bool = False) -> list[Tensor]:
        found = [torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype) for _ in range(3)]
        return [t.transpose(1, 2) for t in found] if transposed else found

    def calls(p: float) -> list[tuple[Any, Callable[[], Any]]]:
        efficient = aten._scaled_dot_product_efficient_attention.default
        inner = aten._efficient_attention_forward.default
        flash = aten._scaled_dot_product_flash_attention.default
        cudnn = aten._scaled_dot_product_cudnn_attention.default
        return [
            (efficient, lambda: efficient(*heads(float32), None, True, p)),
            (efficient, lambda: efficient(*heads(half), None, True, p)),
            (inner, lambda: inner(*heads(float32, True), None, None, None, 64, 64, p, 0, True)),
            (flash, lambda: flash(*heads(half), p, False, False)),
            (cudnn, lambda: cudnn(*heads(half), None, True, p, False, False)),
        ]

    for p in (0.0, 0.1):
        for func, call in calls(p):
            call()
            start = generator.get_offset()
            eager = call()
            moved = generator.get_offset() - start
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call()
            start = generator.get_offset()
            graph.replay()
            torch.cuda.synchronize()
            assert generator.get_offset() - start == moved, func
            for i, (a, b) in enumerate(zip(eager, captured, strict=True)):
                if isinstance(a, Tensor):
                    expected = "cpu" if i in seeds_of(operator(func)).results else a.device.type
                    print(p, func, i, a.device, b.device, moved)
                    assert a.device.type == expected, (func, i)
                    small = not a.numel()
                    assert small or i in seeds_of(operator(func)).results or b.device == a.device, (
                        func,
                        i,
                    )


def first() -> None:
    """The first attention of a process, by which torch chooses the order of its kernels."""
    q = torch.rand(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    fast = ol.graph(F.scaled_dot_product_attention, warmup=1)
    with torch.no_grad():
        got = [fast(q, q, q) for _ in range(4)][-1]
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q))
    assert replays(fast) == 3
    assert len(fast.recordings) == 1


def first_ahead() -> None:
    """The first attention of a process, in a `warm_up`."""
    fast = ol.graph(F.scaled_dot_product_attention, buckets=ol.Buckets(sizes=(2, 4)))
    q = torch.rand(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = fast.warm_up([(q, q, q)])
    assert len(found.captured) == 2, found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    globals()[sys.argv[1]](*sys.argv[2:])

"""Training with transformers, in loops of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import onelaunch as ol
from tests.device.architectures import causal

from .harness import Run, training
from .programs_transformers import DECODER, GPT2, TEXT, architecture, ids, made


def tokens(run: Run, seed: int, labels: int = 2) -> dict[str, Tensor]:
    return {"input_ids": ids(run, seed), "labels": run.ints(seed, labels, 2)}


def text(run: Run, seed: int) -> dict[str, Tensor]:
    """A batch for a causal language model, with a mask that is made already."""
    batch = ids(run, seed)
    return {"input_ids": batch, "labels": batch, "attention_mask": causal(2, 10).to(run.device)}


def decoder(run: Run, **config: Any) -> Any:
    return made(run, "Llama", "LlamaForCausalLM", **{**DECODER, "use_cache": False, **config})


def gpt2(run: Run, **config: Any) -> Any:
    return made(run, "GPT2", "GPT2LMHeadModel", **{**GPT2, "use_cache": False, **config})


def fit(run: Run, model: Any, fast: Any, batch: Any, steps: int = 8, lr: float = 1e-3) -> None:
    """The loop of the documentation: AdamW, a linear schedule, clipping."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, steps)
    model.train()
    for i in range(steps):
        loss = fast(**batch(run, i)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.see(loss)
    run.see(model)


@training()
def bert_classifier_with_its_default_dropout(run: Run) -> None:
    model = made(run, "Bert", "BertForSequenceClassification", **TEXT)
    fit(run, model, run.graph(model), tokens)


@training()
def gpt2_with_its_default_dropout(run: Run) -> None:
    model = gpt2(run)
    fit(run, model, run.graph(model), text)


@training()
def llama_from_scratch(run: Run) -> None:
    model = decoder(run)
    fit(run, model, run.graph(model), text)


@training(warns=("OL308",))
def llama_with_gradient_checkpointing(run: Run) -> None:
    model = decoder(run, attention_dropout=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fit(run, model, run.graph(model), text)


@training()
def t5_sequence_to_sequence(run: Run) -> None:
    model, _ = architecture(run, "t5")
    model.config.decoder_start_token_id = 0

    def batch(run: Run, i: int) -> dict[str, Tensor]:
        return {"input_ids": ids(run, i), "labels": ids(run, i + 30, 2, 5)}

    fit(run, model, run.graph(model), batch)


@training()
def vit_image_classifier(run: Run) -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
    sizes = {"intermediate_size": 48, "image_size": 16, "patch_size": 8}
    model = made(run, "ViT", "ViTForImageClassification", **config, **sizes)

    def batch(run: Run, i: int) -> dict[str, Tensor]:
        return {"pixel_values": run.rand(i, 4, 3, 16, 16), "labels": run.ints(i, 3, 4)}

    fit(run, model, run.graph(model), batch)


@training()
def a_masked_language_model(run: Run) -> None:
    model = made(run, "Bert", "BertForMaskedLM", **TEXT)

    def batch(run: Run, i: int) -> dict[str, Tensor]:
        clean, hidden = ids(run, i), run.rand(i, 2, 10) > 0.5
        masked = torch.where(hidden, torch.full_like(clean, 4), clean)
        return {"input_ids": masked, "labels": torch.where(hidden, clean, -100)}

    fit(run, model, run.graph(model), batch)


@training()
def bert_as_a_whole_step(run: Run) -> None:
    model = made(run, "Bert", "BertForSequenceClassification", **TEXT).train()
    optimizer = ol.capturable(torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 12)

    @run.graph
    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for i in range(9):
        run.see(step(**tokens(run, i)))
        schedule.step()
    run.see(model)


@training()
def llama_as_a_whole_step_in_bfloat16(run: Run) -> None:
    model = decoder(run).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    kind = run.device.type

    @run.graph
    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for i in range(9):
        run.see(step(text(run, i)))
    run.see(model)

"""Accelerate, and the Trainer of transformers, which is built on it."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import DataLoader

from .harness import Run, training
from .programs_finetuning import tokens
from .programs_training import labelled, mlp
from .programs_transformers import TEXT, ids, made


def trained(run: Run, model: Any, fast: Any, **options: Any) -> None:
    """`Trainer` over eight batches, two epochs."""
    examples = [{"input_ids": ids(run, i, 1)[0].cpu(), "labels": int(i % 2)} for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            num_train_epochs=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=run.device.type == "cpu",
            dataloader_pin_memory=False,
            seed=3,
            **options,
        )
        trainer = transformers.Trainer(
            model=fast,
            args=arguments,
            train_dataset=examples,
            data_collator=lambda rows: {
                "input_ids": torch.stack([row["input_ids"] for row in rows]),
                "labels": torch.tensor([row["labels"] for row in rows]),
            },
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        run.see(logged, trainer.state.global_step, model)
    forget_accelerate()


def forget_accelerate() -> None:
    """Accelerate keeps its state for the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@training()
def the_trainer_of_transformers(run: Run) -> None:
    model = made(run, "Bert", "BertForSequenceClassification", **TEXT)
    trained(run, model, run.graph(model))


@training()
def the_trainer_around_a_graphed_encoder(run: Run) -> None:
    model = made(run, "Bert", "BertForSequenceClassification", **TEXT)
    model.bert = run.graph(model.bert)
    trained(run, model, model)


@training()
def the_trainer_with_accumulation_and_bfloat16(run: Run) -> None:
    model = made(run, "Bert", "BertForSequenceClassification", **TEXT)
    trained(run, model, run.graph(model), gradient_accumulation_steps=2, bf16=True)


def accelerator(run: Run, **options: Any) -> Accelerator:
    forget_accelerate()
    return Accelerator(cpu=run.device.type == "cpu", **options)


def loader(run: Run, batches: int = 6) -> DataLoader[Any]:
    data = [labelled(run, i, 1) for i in range(8 * batches)]
    return DataLoader([(x[0].cpu(), y[0].cpu()) for x, y in data], batch_size=8)


@training()
def accelerate_prepares_a_graphed_model(run: Run) -> None:
    accelerate = accelerator(run)
    net = mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, data = accelerate.prepare(run.graph(net), optimizer, loader(run))
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerate.backward(loss)
            accelerate.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.see(loss)
    run.see(net)
    forget_accelerate()


@training()
def a_graph_of_what_accelerate_prepared(run: Run) -> None:
    accelerate = accelerator(run)
    net = mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, data, schedule = accelerate.prepare(net, optimizer, loader(run), schedule)
    fast = run.graph(model)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(fast(x), y)
            accelerate.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.see(loss, schedule.get_last_lr())
    run.see(net)
    forget_accelerate()


@training()
def accelerate_with_mixed_precision(run: Run) -> None:
    """`prepare` replaces the model's forward by one under autocast."""
    accelerate = accelerator(run, mixed_precision="bf16")
    net = mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, data = accelerate.prepare(run.graph(net), optimizer, loader(run))
    for _ in range(2):
        for x, y in data:
            with accelerate.autocast():
                logits = model(x)
                loss = F.cross_entropy(logits, y)
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.see(loss, logits)
    run.see(net, torch.is_autocast_enabled(run.device.type))
    forget_accelerate()


@training()
def accelerate_accumulates_around_a_graphed_model(run: Run) -> None:
    accelerate = accelerator(run, gradient_accumulation_steps=2)
    net = mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, data = accelerate.prepare(run.graph(net), optimizer, loader(run, 8))
    for _ in range(2):
        for x, y in data:
            with accelerate.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            run.see(loss, accelerate.sync_gradients)
    run.see(net)
    forget_accelerate()


@training(replays=8)
def accelerate_accumulates_in_a_graphed_step(run: Run) -> None:
    """Forward and backward of `accumulate()` are graphed, and the optimizer steps outside."""
    accelerate = accelerator(run, gradient_accumulation_steps=2)
    net = mlp(run)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    model, optimizer, data = accelerate.prepare(net, optimizer, loader(run, 8))

    @run.graph
    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerate.backward(loss)
        return loss.detach()

    for _ in range(3):
        for x, y in data:
            with accelerate.accumulate(model):
                run.see(gradients(x, y))
                optimizer.step()
                optimizer.zero_grad()
    run.see(net)
    forget_accelerate()


@training(recordings=1)
def accelerate_with_the_optimizer_in_the_step(run: Run) -> None:
    accelerate = accelerator(run)
    net = mlp(run)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer, data = accelerate.prepare(net, optimizer, loader(run, 8))

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerate.backward(loss)
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        for x, y in data:
            run.see(step(x, y))
    run.see(net)
    forget_accelerate()


@training()
def accelerate_fine_tunes_bert_and_evaluates(run: Run) -> None:
    accelerate = accelerator(run)
    bert = made(run, "Bert", "BertForSequenceClassification", **TEXT)
    optimizer = torch.optim.AdamW(bert.parameters(), lr=1e-3)
    model, optimizer = accelerate.prepare(run.graph(bert), optimizer)
    for i in range(6):
        bert.train()
        loss = model(**tokens(run, i)).loss
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        bert.eval()
        with torch.no_grad():
            scores = accelerate.gather_for_metrics(model(**tokens(run, 50 + i)).logits)
        run.see(math.exp(loss.item()), scores)
    run.see(bert)
    forget_accelerate()

"""Training with transformers, peft and accelerate."""

from __future__ import annotations

import copy
import math
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import IA3Config, LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import onelaunch as ol
from tests.device.architectures import causal

from .harness import Run, inference, training
from .programs_training import labelled, mlp
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


# peft


def lora(run: Run, model: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
    settings |= {"target_modules": ["q_proj", "v_proj"], "task_type": TaskType.CAUSAL_LM}
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{**settings, **options})).to(run.device)


@training()
def lora_on_llama(run: Run) -> None:
    model = lora(run, decoder(run))
    fit(run, model, run.graph(model), text, lr=1e-2)


@training()
def lora_with_the_base_model_graphed(run: Run) -> None:
    model = lora(run, decoder(run))
    fit(run, model, run.graph(model.base_model.model), text, lr=1e-2)


@training()
def dora_on_llama(run: Run) -> None:
    model = lora(run, decoder(run), use_dora=True, lora_dropout=0.0)
    fit(run, model, run.graph(model), text, lr=1e-2)


@training()
def lora_as_a_whole_step(run: Run) -> None:
    model = lora(run, decoder(run)).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = ol.capturable(torch.optim.AdamW(weights, lr=1e-2))

    @run.graph
    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(9):
        run.see(step(text(run, i)))
    run.see(model)


@training()
def ia3_on_llama(run: Run) -> None:
    config = IA3Config(
        task_type=TaskType.CAUSAL_LM,
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    )
    torch.manual_seed(1)
    model = get_peft_model(decoder(run), config).to(run.device)
    fit(run, model, run.graph(model), text, lr=1e-2)


@training()
def lora_classifier_with_a_trained_head(run: Run) -> None:
    base = made(run, "Bert", "BertForSequenceClassification", **TEXT)
    options = {"task_type": TaskType.SEQ_CLS, "target_modules": ["query", "value"]}
    model = lora(run, base, **options, modules_to_save=["classifier"])
    fit(run, model, run.graph(model), tokens, lr=1e-2)


@training(recordings=6)
def two_adapters_trained_in_turn(run: Run) -> None:
    model = lora(run, decoder(run), lora_dropout=0.0)
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.to(run.device)
    fast = run.graph(model)
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        fit(run, model, fast, text, steps=6, lr=1e-2)


def two_adapters(run: Run) -> Any:
    """A decoder with two adapters of other weights, in evaluation."""
    model = lora(run, decoder(run), init_lora_weights=False).eval()
    settings = copy.deepcopy(model.peft_config["default"])
    torch.manual_seed(2)
    model.add_adapter("other", settings)
    return model.to(run.device)


@inference(recordings=6)
def adapters_switched_between_calls(run: Run) -> None:
    model = two_adapters(run)
    fast = run.graph(model)
    mask = causal(2, 10).to(run.device)
    with torch.no_grad():
        for adapter in ("default", "other", "default", "other"):
            model.set_adapter(adapter)
            for i in range(5):
                run.see(fast(input_ids=ids(run, i), attention_mask=mask).logits)


@inference(recordings=8)
def adapters_combined_scaled_and_deleted(run: Run) -> None:
    model = two_adapters(run)
    fast = run.graph(model)
    mask = causal(2, 10).to(run.device)

    def look() -> None:
        for i in range(5):
            run.see(fast(input_ids=ids(run, i), attention_mask=mask).logits)

    with torch.no_grad():
        look()
        names = ["default", "other"]
        model.add_weighted_adapter(names, [0.5, 0.5], "mean", combination_type="linear")
        model.set_adapter("mean")
        look()
        for layer in model.modules():
            if hasattr(layer, "scale_layer"):
                layer.scale_layer(2.0)
        look()
        model.set_adapter("other")
        model.delete_adapter("mean")
        look()


@inference(recordings=6)
def adapters_merged_unmerged_and_disabled(run: Run) -> None:
    model = lora(run, decoder(run), init_lora_weights=False).eval()
    fast = run.graph(model)
    mask = causal(2, 10).to(run.device)

    def look() -> None:
        for i in range(5):
            run.see(fast(input_ids=ids(run, i), attention_mask=mask).logits)

    with torch.no_grad():
        look()
        model.merge_adapter()
        look()
        model.unmerge_adapter()
        look()
        with model.disable_adapter():
            look()


@inference()
def a_merged_and_unloaded_adapter(run: Run) -> None:
    model = lora(run, decoder(run), init_lora_weights=False).eval().merge_and_unload()
    fast = run.graph(model)
    mask = causal(2, 10).to(run.device)
    with torch.no_grad():
        for i in range(7):
            run.see(fast(input_ids=ids(run, i), attention_mask=mask).logits)


# accelerate


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

"""Adapters of peft: trained, switched, combined, merged."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import IA3Config, LoKrConfig, LoraConfig, TaskType, get_peft_model
from peft.tuners.lycoris_utils import LycorisLayer
from torch import Tensor

import onelaunch as ol
from tests.device.architectures import causal

from .harness import Run, inference, training
from .programs_finetuning import decoder, fit, text, tokens
from .programs_transformers import TEXT, ids, made


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


def lokr(run: Run) -> Any:
    torch.manual_seed(1)
    config = LoKrConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(decoder(run), config).to(run.device).train()


@training(refused={"cpu": "OL101", "cuda": "OL104"})
def lokr_that_may_drop_modules_is_refused(run: Run) -> None:
    """It draws on the host for each layer, even where none is dropped."""
    model = lokr(run)
    fit(run, model, run.graph(model), text, lr=1e-2)


@training()
def lokr_on_llama(run: Run) -> None:
    model = lokr(run)
    fast = run.graph(model)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for module in model.modules():
        module.training &= not isinstance(module, LycorisLayer)
    for i in range(8):
        optimizer.zero_grad()
        loss = fast(**text(run, i)).loss
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


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


def look(run: Run, fast: Any) -> None:
    mask = causal(2, 10).to(run.device)
    for i in range(5):
        run.see(fast(input_ids=ids(run, i), attention_mask=mask).logits)


@inference(recordings=6)
def adapters_switched_between_calls(run: Run) -> None:
    model = two_adapters(run)
    fast = run.graph(model)
    with torch.no_grad():
        for adapter in ("default", "other", "default", "other"):
            model.set_adapter(adapter)
            look(run, fast)


@inference(recordings=8)
def adapters_combined_scaled_and_deleted(run: Run) -> None:
    model = two_adapters(run)
    fast = run.graph(model)
    with torch.no_grad():
        look(run, fast)
        names = ["default", "other"]
        model.add_weighted_adapter(names, [0.5, 0.5], "mean", combination_type="linear")
        model.set_adapter("mean")
        look(run, fast)
        for layer in model.modules():
            if hasattr(layer, "scale_layer"):
                layer.scale_layer(2.0)
        look(run, fast)
        model.set_adapter("other")
        model.delete_adapter("mean")
        look(run, fast)


@inference(recordings=6)
def adapters_merged_unmerged_and_disabled(run: Run) -> None:
    model = lora(run, decoder(run), init_lora_weights=False).eval()
    fast = run.graph(model)
    with torch.no_grad():
        look(run, fast)
        model.merge_adapter()
        look(run, fast)
        model.unmerge_adapter()
        look(run, fast)
        with model.disable_adapter():
            look(run, fast)


@inference()
def a_merged_and_unloaded_adapter(run: Run) -> None:
    model = lora(run, decoder(run), init_lora_weights=False).eval().merge_and_unload()
    fast = run.graph(model)
    mask = causal(2, 10).to(run.device)
    with torch.no_grad():
        for i in range(7):
            run.see(fast(input_ids=ids(run, i), attention_mask=mask).logits)

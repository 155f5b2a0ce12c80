"""What is slow in inference: each rule fires on its example and is silent on what replaces it."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from examples.resnet import resnet50
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.diagnose import diagnose
from onelaunch.tools.doctor.run import watch
from onelaunch.tools.doctor.slow.listener import Slow
from onelaunch.tools.rules.rule import Rule
from onelaunch.tools.rules.slow import SLOW
from tests.footguns.slow_runs import IMAGES, codes, conv, program
from tests.footguns.slow_runs import settings as settings


@pytest.mark.parametrize("rule", SLOW, ids=lambda rule: rule.name)
def test_the_example_fires_and_what_replaces_it_is_silent(rule: Rule, tmp_path: Path) -> None:
    model, args = program(rule.example, tmp_path)
    for _ in range(3):  # OL612 times both ways, on a machine that may be busy
        found = [f for f in diagnose(model, args).findings if f.code == rule.code]
        if found:
            break
    assert len(found) == 1
    assert (found[0].name, found[0].severity) == (rule.name, "slow")
    assert found[0].found_by == ("run",)
    model, args = program(rule.instead, tmp_path)
    assert rule.code not in {f.code for f in diagnose(model, args).findings}


def test_codes_names_and_texts() -> None:
    assert [rule.code for rule in SLOW] == [f"OL{601 + i}" for i in range(14)]
    assert len({rule.name for rule in SLOW}) == len(SLOW)
    for rule in SLOW:
        assert all((rule.title, rule.what, rule.why, rule.problems, rule.fix)), rule.code


def test_a_resnet_gets_a_handful_of_findings_in_time() -> None:
    start = time.process_time()
    found = diagnose(resnet50().eval(), (torch.randn(1, 3, 224, 224),))
    assert time.process_time() - start < 20
    assert {f.code for f in found.findings} == {
        *("OL602", "OL603", "OL605", "OL606", "OL608", "OL614")
    }
    assert len(found.findings) == 6
    assert all(f.file == "examples/resnet.py" and f.line for f in found.findings)


def test_a_resnet_that_followed_the_advice() -> None:
    """Of the advice nothing is left but the one that only a graph can follow."""
    torch.backends.cudnn.benchmark = True
    model = fuse(resnet50().eval())
    model = model.to(torch.bfloat16, memory_format=torch.channels_last)
    x = torch.randn(1, 3, 64, 64, dtype=torch.bfloat16)
    assert codes(torch.inference_mode()(model), x, grad=True) == {"OL614"}


def test_nothing_of_the_run_is_kept_or_changed() -> None:
    made: list[weakref.ref[Tensor]] = []

    def model(x: Tensor) -> Tensor:
        between = F.relu(x)
        made.append(weakref.ref(between))
        return between + 1

    x = torch.randn(4)
    listener = Slow()
    state = torch.get_rng_state()
    watch(Workload(model, (x,)), [listener], backward=False)
    assert len(made) == 1
    assert made[0]() is None
    listener.findings()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_module_that_fails_and_is_caught() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    fails, net = Fails(), nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()

    def model(x: Tensor) -> Tensor:
        try:
            fails(x)
        except ValueError:
            return net(x)
        return x

    fails.eval()
    assert codes(model, torch.randn(2, 8), grad=True) == {"OL602"}


def test_lazy_parameters_and_results_of_any_kind() -> None:
    x = torch.randn(2, 3)
    assert codes(nn.LazyLinear(4).eval(), x) == set()
    assert codes(lambda x: (row for row in x), x) == set()
    assert codes(lambda x: {"x": [x.to_sparse()], "other": None}, x) == set()


def test_on_the_emulated_device() -> None:
    net = nn.Sequential(conv(), nn.BatchNorm2d(8)).eval().to("tape")
    assert codes(net, torch.randn(IMAGES, device="tape")) == {"OL607", "OL608"}


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "convnext", "llama"])
def test_real_models_get_no_false_alarm(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    ids, image = torch.randint(0, 100, (1, 16)), torch.randn(1, 3, 32, 32)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2, "vocab_size": 104}
    kinds: dict[str, tuple[Any, Any]] = {
        "bert": (transformers.BertConfig(**small, **layers), ids),
        "gpt2": (transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=104), ids),
        "vit": (
            transformers.ViTConfig(**small, num_hidden_layers=2, image_size=32, patch_size=8),
            image,
        ),
        "convnext": (transformers.ConvNextConfig(hidden_sizes=[8, 16, 32, 64]), image),
        "llama": (transformers.LlamaConfig(**small, **layers), ids),
    }
    config, x = kinds[name]
    model = transformers.AutoModel.from_config(config)
    quiet = {"OL614"} if name == "convnext" else set()
    assert codes(model.eval(), x) == quiet
    assert codes(model.eval(), x, grad=True) == {"OL602", *quiet}
    assert codes(model.train(), x, grad=True) == set()

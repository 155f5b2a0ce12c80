"""Attention dropout in training; each program in a process of its own, which it may end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
MODELS = [
    (n, d, m) for n in ("bert", "gpt2") for d in ("float32", "bfloat16") for m in ("none", "padded")
]
CHECKPOINTS = ["llama checkpoint", "llama checkpoint dropout"]


def run(*arguments: str, programs: str = "attention_programs") -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", f"tests.gpu.{programs}"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("how", ["loop", "step"])
@pytest.mark.parametrize(("name", "dtype", "mask"), MODELS)
def test_models(how: str, name: str, dtype: str, mask: str) -> None:
    run(how, name, dtype, mask)


@pytest.mark.parametrize("how", ["loop", "step"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(how: str, name: str, dtype: str) -> None:
    run(how, name, dtype, "none")


@pytest.mark.parametrize("p", ["0.0", "0.1"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("EFFICIENT_ATTENTION", "float32"),
        ("EFFICIENT_ATTENTION", "bfloat16"),
        ("FLASH_ATTENTION", "bfloat16"),
        ("CUDNN_ATTENTION", "bfloat16"),
        ("MATH", "float32"),
    ],
)
def test_kernels(backend: str, dtype: str, p: str) -> None:
    run("sdpa", backend, dtype, p)


@pytest.mark.parametrize("how", ["first", "first_ahead"])
def test_the_first_attention_of_a_process(how: str) -> None:
    run(how)


def test_where_operators_have_their_seeds() -> None:
    run("places")

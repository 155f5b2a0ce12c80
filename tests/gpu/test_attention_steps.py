"""Attention dropout by a kernel that is chosen by its name, beyond a plain pair; each program in a
process of its own, which it may end."""

from __future__ import annotations

import functools

import pytest

from . import test_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        ("kernel", "dtype"),
        [
            ("FLASH_ATTENTION", "bfloat16"),
            ("FLASH_ATTENTION", "float16"),
            ("EFFICIENT_ATTENTION", "float32"),
            ("CUDNN_ATTENTION", "bfloat16"),
            ("CUDNN_ATTENTION", "float16"),
        ],
    ),
]
run = functools.partial(test_attention.run, programs="attention_step_programs")
KINDS = pytest.mark.parametrize("kind", ["plain", "checkpoint"])


@KINDS
def test_pairs(kernel: str, dtype: str, kind: str) -> None:
    run("pair", kernel, dtype, kind)


@KINDS
def test_whole_steps(kernel: str, dtype: str, kind: str) -> None:
    run("step", kernel, dtype, kind)


@pytest.mark.parametrize("which", ["refused", "of_each_size", "independent"])
def test_buckets(kernel: str, dtype: str, which: str) -> None:
    run(f"buckets_{which}", kernel, dtype)

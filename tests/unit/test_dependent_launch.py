"""Kernels of Inductor's that start while the one before ends: where they do, and how they wait."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.utils import IndentedBuffer

from onelaunch.capture.compilation import inductor
from onelaunch.driver import dependent_launch

OPTION = "triton.enable_pdl"
config: Any = importlib.import_module("torch._inductor.config")
KERNEL: Any = importlib.import_module("torch._inductor.codegen.triton").TritonKernel
WAIT, LAUNCH = KERNEL.GDC_WAIT, KERNEL.GDC_LAUNCH


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return on(monkeypatch, (9, 0))


@pytest.fixture(autouse=True)
def unset() -> Iterator[None]:
    """The option as Inductor has it, whatever a test sets."""
    with config.patch({OPTION: False}):
        yield


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> pytest.MonkeyPatch:
    """A device of a capability."""
    monkeypatch.delenv("TORCHINDUCTOR_ENABLE_PDL", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    return monkeypatch


def compiled_with(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, bool, str]:
    """What reaches Inductor: its option, whether kernels wait first, and the tag in its cache."""
    seen: list[tuple[Any, bool, str]] = []
    own = KERNEL._filter_pdl

    def compile_fx(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        tag = torch.compiler.config.cache_key_tag
        with config.patch(config_patches):  # as the function itself does
            seen.append((config.triton.enable_pdl, KERNEL._filter_pdl is not own, tag))

    module = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(module, "compile_fx", compile_fx)
    inductor(None, options)(None, [])
    assert KERNEL._filter_pdl is own
    assert not torch.compiler.config.cache_key_tag
    return seen[0]


def test_it_is_off(hopper: pytest.MonkeyPatch) -> None:
    assert compiled_with(hopper) == (False, False, "")


@pytest.mark.parametrize("by_option", [False, True])
def test_kernels_wait_first_where_the_user_turns_it_on(
    hopper: pytest.MonkeyPatch, by_option: bool
) -> None:
    if not by_option:
        config.triton.enable_pdl = True
    option, first, tag = compiled_with(hopper, **({OPTION: True} if by_option else {}))
    assert (option, first) == (True, True)
    assert "waits first" in tag


def test_options_win(hopper: pytest.MonkeyPatch) -> None:
    config.triton.enable_pdl = True
    assert compiled_with(hopper, **{OPTION: False}) == (False, False, "")


def test_a_torch_without_the_filter(hopper: pytest.MonkeyPatch) -> None:
    config.triton.enable_pdl = True
    hopper.setattr(dependent_launch, "_kernel", lambda: SimpleNamespace)
    assert compiled_with(hopper) == (True, False, "")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("waits", [0, 1, 3])
def test_each_kernel_waits_before_all_else(
    hopper: pytest.MonkeyPatch, waits: int, on_device: bool
) -> None:
    names = {"GDC_WAIT": WAIT, "GDC_LAUNCH": LAUNCH}
    kernel = SimpleNamespace(**names, _enable_pdl_codegen=lambda: on_device)
    code = IndentedBuffer()
    code.writeline("x0 = tl.program_id(0)")
    with code.indent():
        for n in range(waits):
            code.writelines([f"tmp{n} = tl.load(in_ptr{n})", WAIT, LAUNCH])
    code.writeline("tl.store(out_ptr0, 0)")
    with dependent_launch.waiting_first({OPTION: True}):
        KERNEL._filter_pdl(kernel, code)
    lines = [line.strip() for line in code.getvalue().splitlines()]
    assert lines.count(LAUNCH) == min(waits, 1)
    if on_device:
        assert lines[0] == WAIT
        assert lines.count(WAIT) == 1
    else:
        assert lines.count(WAIT) == min(waits, 1)
        assert lines[0] != WAIT
    assert len([line for line in lines if line not in (WAIT, LAUNCH)]) == waits + 2

"""The table of all programs whose libraries are installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterable

from .harness import PROGRAMS, Program

FILES: dict[str, tuple[str, ...]] = {
    "programs_training": (),
    "programs_objectives": (),
    "programs_steps": (),
    "programs_policies": (),
    "programs_inference": (),
    "programs_serving": (),
    "programs_converted": (),
    "programs_solvers": (),
    "programs_torchdiffeq": ("torchdiffeq",),
    "programs_diffusion": ("diffusers",),
    "programs_transformers": ("transformers",),
    "programs_sentences": ("transformers", "sentence_transformers"),
    "programs_finetuning": ("transformers",),
    "programs_adapters": ("transformers", "peft"),
    "programs_accelerate": ("transformers", "accelerate"),
    "programs_lightning": ("pytorch_lightning",),
    "programs_graphs": ("torch_geometric",),
    "programs_tensordict": ("tensordict",),
    "programs_pieces": ("transformers", "torch_geometric"),
    "programs_science": ("gpytorch", "e3nn"),
    "programs_vision": ("timm", "torchvision"),
}
"""Each file of programs, and the packages that it imports beside torch."""
ON_GPUS_ALONE = ("programs_vision",)
"""torchvision has no build for a CPU's torch where there is only one package index."""


def missing(file: str) -> list[str]:
    """The packages of a file that are not installed."""
    needed = FILES.get(file, ())
    return [package for package in needed if importlib.util.find_spec(package) is None]


def programs(files: Iterable[str]) -> list[Program]:
    """Import files, as far as their packages are installed, and return their programs."""
    files = [file for file in files if not missing(file)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what packages warn of as they are imported is theirs
        for file in files:
            importlib.import_module(f"{__package__}.{file}")
    return [program for program in PROGRAMS.values() if program.file in files]

"""Programs as people write them, with the libraries that they use: eager's results, with replays
that happened, or the refusal that the program names.

Each file of programs runs in a process of its own, whose imports and whose death are its own. On a
GPU they run by `scripts/measure ecosystem`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ecosystem.processes import Chunk, run_files
from tests.ecosystem.programs import FILES, ON_GPUS_ALONE, missing

HERE = [file for file in FILES if file not in ON_GPUS_ALONE]
SLOW = {
    *("programs_pieces", "programs_adapters", "programs_finetuning", "programs_accelerate"),
    *("programs_graphs", "programs_diffusion", "programs_training", "programs_lightning"),
    *("programs_torchdiffeq", "programs_science", "programs_sentences", "programs_steps"),
    *("programs_serving", "programs_objectives"),
}
"""Files of 4 s and more: before each release, and on a GPU."""


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=pytest.mark.thorough) if f in SLOW else f for f in HERE],
)
def test_programs(file: str) -> None:
    assert not missing(file), "install the packages of `ecosystem` in pyproject.toml"
    reports = run_files([Chunk(file)], "cpu", 1)
    bad = [f"{name}: {r['unexpected']}" for name, r in reports.items() if r["unexpected"]]
    assert not bad, "\n\n".join(bad)


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_sixty_programs_of_each_kind(kind: str) -> None:
    folder = Path(__file__).parent
    written = "".join((folder / f"{file}.py").read_text() for file in HERE)
    assert len(re.findall(rf"^@{kind}\(", written, re.MULTILINE)) >= 60

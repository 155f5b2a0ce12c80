"""Training on two processes of one node: with gloo on any machine, with NCCL on two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SECONDS = 120  # a shut-down that hangs ends the test


def torchrun(way: str, *options: str, gpus: bool) -> list[dict[str, Any]]:
    """The report of each of two processes."""
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "tests/multi_gpu/train.py"), way, *options]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--out", folder]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(
    params=[
        pytest.param("gloo", marks=pytest.mark.thorough),  # see device/test_distributed_ranks.py
        pytest.param("nccl", marks=pytest.mark.multi_gpu),
    ]
)
def gpus(request: pytest.FixtureRequest) -> bool:
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs")
    return request.param == "nccl"


@pytest.mark.parametrize(
    "recording", [pytest.param("alive", marks=pytest.mark.thorough), "dropped"]
)
def test_a_whole_step_over_ddp(gpus: bool, recording: str) -> None:
    """Eleven warm-up calls, then one recording; every rank has the parameters of eager's run, and
    the process group ends whether the recording is alive or waits to be collected."""
    options = ["--keep"] if recording == "alive" else []
    for report in torchrun("ddp-step", *options, gpus=gpus):
        assert report["equal"], report
        assert report["replays"] == 50 - 11


def test_a_pair_inside_ddp(gpus: bool) -> None:
    for report in torchrun("ddp-pair", gpus=gpus):
        assert report["equal"], report
        assert report["replays"] >= 40


@pytest.mark.parametrize(
    ("way", "eager"),
    [
        ("fsdp-step", 3),
        pytest.param("fsdp-deep", 3, marks=pytest.mark.thorough),
        pytest.param("fsdp-accumulated", 3 + 5, marks=pytest.mark.thorough),
    ],
)
def test_a_whole_step_over_fsdp2(gpus: bool, way: str, eager: int) -> None:
    """Where a forward alone left the parameters whole, the next call is eager."""
    for report in torchrun(way, gpus=gpus):
        assert report["equal"], report
        assert report["replays"] == 50 - eager


@pytest.mark.thorough
def test_a_capture_that_breaks_off_leaves_fsdp2_as_it_was(gpus: bool) -> None:
    for report in torchrun("fsdp-broken-off", gpus=gpus):
        assert report["equal"], report
        assert report["replays"] == 0


@pytest.mark.thorough
def test_a_sharded_result_is_refused(gpus: bool) -> None:
    for report in torchrun("fsdp-result", gpus=gpus):
        assert report["refused"] == "OL108", report


@pytest.mark.parametrize(
    "way",
    [
        "pair-over-ddp",
        *(
            pytest.param(w, marks=pytest.mark.thorough)
            for w in ("function-over-ddp", "pair-over-fsdp")
        ),
    ],
)
def test_a_pair_around_a_wrapper_is_refused(way: str) -> None:
    for report in torchrun(way, gpus=False):
        assert report["refused"] == "OL130", report
        assert "fix:" in report["what"]


@pytest.mark.thorough
def test_resharding_after_forward_is_refused(gpus: bool) -> None:
    for report in torchrun("fsdp-reshard", gpus=gpus):
        assert report["refused"] == "OL130", report
        assert "resharding after forward" in report["what"]


@pytest.mark.thorough
def test_a_step_that_one_rank_cannot_record(gpus: bool) -> None:
    """Neither does the other: NCCL wants a collective to be captured by all of its ranks."""
    for report in torchrun("one-refuses", gpus=gpus):
        assert report["equal"], report
        assert report["replays"] == 0


@pytest.mark.thorough
def test_a_refusal_of_one_rank_is_raised_by_both(gpus: bool) -> None:
    first, second = torchrun("one-raises", gpus=gpus)
    assert second["refused"] == "OL101", second
    assert first["refused"] == "OL131", first
    assert "rank 1: [OL101]" in first["what"]


def test_results_that_are_there_once_waited_for() -> None:
    for report in torchrun("late-collectives", gpus=False):
        assert report["equal"], report
        assert report["replays"] >= 40


def test_a_collective_writes_its_argument(gpus: bool) -> None:
    """`all_reduce` of the caller's tensor, whose schema declares no write."""
    for report in torchrun("all-reduce", gpus=gpus):
        assert report["equal"], report
        assert report["replays"] >= 3

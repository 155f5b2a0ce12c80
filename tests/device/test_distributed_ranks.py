"""Processes of a group that differ: all of them record a call, or none, and nobody hangs.

Each situation is a program of tests/device/ranks.py, run by two processes with gloo. Two and three
processes with NCCL, or under torchrun, are in tests/multi_gpu.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .ranks import SITUATIONS

ROOT = Path(__file__).parents[2]
SECONDS = 100
OF_THREE = ("refused-eager", "other-size", "ahead-of-one", "of-two", "in-a-row", "alike")
OF_TWO = tuple(name for name in SITUATIONS if name not in ("of-two", "in-a-row"))
Reports = list[dict[str, Any]]


@functools.cache
def _run(*names: str, world: int) -> list[dict[str, Any]]:
    """The report of each process, on all situations. Gloo's processes do not always find each
    other on a machine that has much to do: then once more."""
    for _ in range(3):
        reports, errors = _reports(*names, world=world)
        if "connectFullMesh failed" not in errors:
            break
    assert not errors, errors[-4000:]
    return reports


def _reports(*names: str, world: int) -> tuple[list[dict[str, Any]], str]:
    """The report of each process, and the errors of those that failed. They end after SECONDS at
    the latest."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tests.device.ranks"]
        running = [
            subprocess.Popen(
                [*program, str(rank), str(world), folder, *names],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        failed = ""
        try:
            for process in running:
                _, errors = process.communicate(timeout=SECONDS)
                failed += errors.decode() if process.returncode else ""
        finally:
            for process in running:
                process.kill()
        files = [Path(folder) / f"{rank}.json" for rank in range(world)]
        return [] if failed else [json.loads(file.read_text()) for file in files], failed


def of_two(name: str) -> Reports:
    return [found[name] for found in _run(*OF_TWO, world=2)]


def of_three(name: str) -> Reports:
    return [found[name] for found in _run(*OF_THREE, world=3)]


def refused(reports: Reports, code: str, text: str = "") -> None:
    """None has a recording: the last process by its own refusal, the others by that one's."""
    *others, last = reports
    for found in reports:
        assert found["recordings"] == found["replays"] == 0, found
        assert len(found["warned"]) == 1, found
    assert code in last["warned"][0]
    rank = len(others)
    for found in others:
        assert f"[OL131] this signature runs eagerly: rank {rank}: [{code}]" in found["warned"][0]
        assert text in found["warned"][0]


@pytest.mark.parametrize("name", OF_TWO)
def test_nobody_hangs_and_results_are_eagers(name: str) -> None:
    for found in of_two(name):
        assert "hung" not in found, found
        assert found.get("right", True), found


@pytest.mark.parametrize(
    "name", ["alike", "in-the-background", "other-mode", "ahead-of-all", "ddp", "fsdp"]
)
def test_processes_that_do_the_same_record_the_same(name: str) -> None:
    first, second = of_two(name)
    assert first == second
    assert first["replays"] > 0
    assert first["warned"] == []


@pytest.mark.parametrize(
    "name",
    ["refused-eager", "refused-before", "refused-with-state", "ddp-refused", "fsdp-refused"],
)
def test_what_one_process_cannot_no_process_does(name: str) -> None:
    """And each says which process, and which line."""
    refused(of_two(name), "OL101", "ranks.py:")


def test_where_one_raises_all_raise() -> None:
    first, second = of_two("refused-raise")
    assert "[OL101]" in second["raised"]
    assert "[OL131] rank 1: [OL101]" in first["raised"]
    assert "y.sum().item()  # the line that cannot" in first["raised"]


def test_a_module_is_split_on_all_or_none() -> None:
    first, second = of_two("refused-split")
    for key in ("replays", "warmups", "eager", "recordings"):
        assert first[key] == second[key]
    assert first["replays"] > 0  # of the pieces
    assert "rank 1: [OL101]" in first["warned"][0]


def test_a_process_whose_work_moves() -> None:
    refused(of_two("unsettled"), "OL117")


def test_a_recording_that_one_drops_all_drop() -> None:
    """All of them have launched it for the call of its capture."""
    first, second = of_two("unsettled-once")
    assert first == second
    assert (first["captures"], first["recordings"], first["replays"]) == (2, 1, 6)


def test_a_pool_that_is_full_on_one() -> None:
    refused(of_two("full-pool"), "OL304")


def test_a_recording_with_collectives_is_not_evicted() -> None:
    """The others would not know of it: what wants its room runs eagerly."""
    for found in of_two("evicted"):
        assert found["evictions"] == 0
        assert found["replays"] == 13


def test_counts_of_warm_ups_that_differ() -> None:
    """Whoever is ready first runs the call itself, until all are."""
    first, second = of_two("counts-differ")
    assert first["eager"] == 1
    assert first["replays"] == second["replays"] == 8


@pytest.mark.parametrize("name", ["other-size", "guard-fails"])
def test_who_misses_alone_runs_eagerly_beside_replays(name: str) -> None:
    """Collectives come in the same order either way, so results stay right (with gloo)."""
    first, second = of_two(name)
    assert first["eager"] == 0
    assert first["replays"] == 13
    assert second["recordings"] == 1
    assert second["eager"] > 0
    assert "rank 0: it does not record this call" in second["warned"][0]


def test_a_capture_ahead_of_one_alone_is_refused() -> None:
    first, second = of_two("ahead-of-one")
    assert second["refused"] == "OL131"
    assert first["replays"] == second["replays"] == 6


def test_a_capture_ahead_that_one_refuses() -> None:
    first, second = of_two("ahead-refused")
    assert (first["refused"], second["refused"]) == ("OL131", "OL101")
    assert first["recordings"] == second["recordings"] == 0


def test_an_exception_of_the_callable_in_one_capture() -> None:
    """The others raise too, with its text and line, and the next call is captured."""
    first, second = of_two("raises")
    assert second["raised"] == "of the user's"
    assert "[OL131] rank 1: ValueError: of the user's" in first["raised"]
    assert 'raise ValueError("of the user\'s")' in first["raised"]
    assert first["recordings"] == second["recordings"] == 1


def test_options_of_ddp_that_are_refused_are_refused_on_all() -> None:
    first, second = of_two("ddp-unused")
    assert first == second
    assert "OL130" in first["warned"][0]


def test_a_callable_without_collectives_is_each_process_own_affair() -> None:
    first, second = of_two("local")
    assert (first["recordings"], second["recordings"]) == (0, 1)
    assert first["warned"] == second["warned"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_THREE)
def test_three_processes(name: str) -> None:
    for found in of_three(name):
        assert "hung" not in found, found
        assert found.get("right", True), found


@pytest.mark.thorough
def test_what_the_last_of_three_cannot() -> None:
    refused(of_three("refused-eager"), "OL101")


@pytest.mark.thorough
def test_processes_that_share_no_group_agree_through_those_between() -> None:
    refused(of_three("in-a-row"), "OL101")


@pytest.mark.thorough
def test_a_process_outside_of_the_group_is_not_asked() -> None:
    first, second, third = of_three("of-two")
    assert first["replays"] == second["replays"] == 3
    assert third["recordings"] == 0

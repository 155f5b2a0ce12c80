"""The harness finds what is wrong, whatever way a program goes wrong."""

from __future__ import annotations

from tests.ecosystem.processes import Chunk, run_files

FOUND = {
    "right": None,
    "refused_as_it_says": None,
    "wrong_at_the_end_alone": "wrong",
    "another_number": "1.0 is not 0.0",
    "another_random_state": "random state of torch",
    "without_replays": "0 replays",
    "dead": "died: exit code -11",
    "refused_by_another_code": "refused OL101, expected refused OL102",
    "an_error_of_its_own": "it was graphed",
    "too_many_recordings": "2 recordings",
    "warned": "warned: [OL102]",
}


def test_what_the_harness_finds() -> None:
    reports = run_files([Chunk("misbehaving")], "cpu", 1)
    assert set(reports) == set(FOUND)
    for name, text in FOUND.items():
        unexpected = reports[name]["unexpected"]
        assert unexpected is None if text is None else text in unexpected, (name, unexpected)
    assert reports["right"]["replays"] == 3
    assert reports["right"]["exact"] is True

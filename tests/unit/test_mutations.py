"""The faults of `tests/mutations.py` can still be put into the code."""

from __future__ import annotations

from tests.mutations import FAULTS, ROOT, SOURCE


def test_each_fault_has_its_place() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    gone = [f for f in FAULTS if (ROOT / SOURCE / f.file).read_text().count(f.right) != 1]
    assert not gone

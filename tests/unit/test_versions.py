"""What the tests gave on a release of torch, as data and as a table."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import render, versions

RUN = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one" />
<testcase classname="tests.unit.test_a" name="test_two"><failure message="no" /></testcase>
<testcase classname="tests.unit.test_a" name="test_gpu"><skipped message="no GPU" /></testcase>
<testcase classname="tests.device.test_b" name="test_one[cpu]"><error message="no" /></testcase>
<testcase classname="tests.gpu.test_c" name="test_one" />
</testsuite></testsuites>"""
AGAIN = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_two" />
</testsuite></testsuites>"""


def test_a_later_run_of_a_test_counts(tmp_path: Path) -> None:
    run, again = tmp_path / "run.xml", tmp_path / "again.xml"
    run.write_text(RUN)
    again.write_text(AGAIN)
    assert versions.counts([run])["unit"] == {"passed": 1, "failed": 1, "skipped": 1}
    found = versions.counts([run, again])
    assert found["unit"] == {"passed": 2, "failed": 0, "skipped": 1}
    assert found["device"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert found["compat"] == {"passed": 0, "failed": 0, "skipped": 0}


def test_other_releases_stay_and_the_table_shows_all(tmp_path: Path) -> None:
    run, out = tmp_path / "run.xml", tmp_path / "torch_versions.json"
    run.write_text(RUN)
    row = {"python": "3.11.7", "gpu": None, "suites": versions.counts([run])}
    out.write_text(json.dumps({"9.15.0": row, "1.9.0": row}))
    versions.record([run], out)
    assert list(json.loads(out.read_text())) == ["1.9.0", versions.release(), "9.15.0"]
    page = "<!-- begin:torch-versions -->\n<!-- end:torch-versions -->\n"
    text = render.render(page, tmp_path)
    assert "| 1.9.0, Python 3.11.7 | 1, 1 failed | 0 | 0, 1 failed | CPU |" in text
    assert render.render(text, tmp_path) == text

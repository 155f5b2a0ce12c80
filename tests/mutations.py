"""Forty faults put into the code by hand, one at a time, to see that the tests find them.

    python -m tests.mutations --out benchmarks/results/mutations.json -- -n 8 --dist worksteal
    python -m tests.mutations --out ... -- --thorough -n 8

Each fault is put into a copy of the repository, whose tests then run until the first fails. What
follows `--` goes to pytest. The results of `--thorough` stand beside those without it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/onelaunch")
LIMIT_SECONDS = 1800


class Fault(NamedTuple):
    """One fault: in a file, `right` becomes `wrong`; `right` occurs once there."""

    name: str
    file: str
    right: str
    wrong: str


def _without(name: str, file: str, line: str) -> Fault:
    return Fault(name, file, line, "pass")


PATH, CHECKS, LAUNCH = "replay/call_path.py", "replay/checks.py", "replay/launch.py"
FAULTS = (
    # What a call checks before it launches.
    _without("sizes, strides and dtypes", PATH, "check_tensors(source, expected)"),
    _without("values of host arguments", PATH, "check_values(source)"),
    _without("attributes of arguments", PATH, "check_marks(source)"),
    _without("gradients of arguments", PATH, "check_gradients(source)"),
    _without("the default device", PATH, "check_default_device(source, spec)"),
    _without("addresses and overlaps", PATH, "check_memory(source, expected)"),
    _without(
        "the state",
        PATH,
        "source.miss_if(f\"not {source.name('state', captured.guard.check)}()\")",
    ),
    _without(
        "one tensor given twice", CHECKS, 'source.miss_if(f"{inputs[i]} is not {inputs[other]}")'
    ),
    Fault("the least size of a bucket", CHECKS, "n{place} < {least} or n{place}", "n{place}"),
    Fault(
        "a forward in flight",
        "autograd/node.py",
        "return token if owners == _NOBODY else None",
        "return token",
    ),
    Fault("numbers by bits", "call/tree.py", "_bits(value) == self._key", "value == self.value"),
    Fault(
        "zeros of either sign",
        "call/tree.py",
        'return (kind, struct.pack("d", cast(float, value)))',
        "return (kind, value)",
    ),
    Fault("train and eval", "state/guard.py", "self._modes = list(modes)", "self._modes = []"),
    Fault(
        "hooks of leaves",
        "state/guard.py",
        "self._same_hooks = same_hooks(leaves) if leaves else None",
        "self._same_hooks = None",
    ),
    # What a guard is made of.
    Fault(
        "tensors that are read",
        "state/dependencies.py",
        "if kept or (has_strides(t) and by_address(slot, t)):",
        "if has_strides(t) and by_address(slot, t):",
    ),
    _without(
        "gradients", "state/dependencies.py", "guarded += _gradients(before, changes, guarded)"
    ),
    _without("orders of dicts", "state/dependencies.py", "guarded += orders(before, now)"),
    _without(
        "recordings whose parameters moved",
        "runtime/phase.py",
        "self._table.drop_stale(spec, status)",
    ),
    # What a replay does.
    Fault("draws on the host", PATH, "for draw in captured.draws:", "for draw in ():"),
    Fault(
        "versions of arguments",
        LAUNCH,
        "for name in [source.inputs[i] for i in captured.writes.bumped_inputs]:",
        "for name in list[str]():",
    ),
    Fault(
        "versions of state",
        LAUNCH,
        "written = [t for t in captured.writes.bumped if not t.is_inference()]",
        "written = list[Tensor]()",
    ),
    Fault(
        "views made without grad mode",
        LAUNCH,
        "if in_autograd and output.graded is not torch.is_grad_enabled():",
        "if False:",
    ),
    Fault("numbers that are followed", PATH, "if captured.followed:", "if False:"),
    Fault(
        "arguments that a backward writes",
        "autograd/overwritten.py",
        "t.copy_(static[tuple(map(slice, t.shape))])",
        "pass",
    ),
    Fault(
        "the order of hooks",
        "autograd/order.py",
        "for place in reversed(self._order):",
        "for place in self._order:",
    ),
    Fault(
        "saved tensors that a backward writes",
        "autograd/overwritten.py",
        "self.saved.update(self._storage_of(t) for t, _ in written)",
        "pass",
    ),
    # What is put back after a run that did not count.
    Fault(
        "rollback of slots",
        "state/rollback.py",
        "                slot.write(value)",
        "                pass",
    ),
    Fault(
        "rollback of containers",
        "state/rollback.py",
        "changed |= _restore(container, contents)",
        "pass",
    ),
    # What must be the same twice, or proven.
    Fault("two runs that differ", "watch/ledger.py", "if other != entry:", "if False:"),
    Fault(
        "state of another request",
        "runtime/requests.py",
        "made = [(e, new) for e, new in made if new.guard.moved_elsewhere() is None]",
        "pass",
    ),
    Fault(
        "comparisons with a number that is followed",
        "capture/followed.py",
        "more | _CHOOSING if use.chooses else more",
        "more",
    ),
    Fault(
        "softmax over padding",
        "padding/taint/rules/reduction.py",
        "return [found | taint(t)]",
        "return [taint(t)]",
    ),
    Fault(
        "operations run on NaN",
        "padding/taint/rules/call.py",
        "torch.where(taint(value), torch.nan, 0.0)",
        "torch.where(taint(value), 0.0, 0.0)",
    ),
    Fault("gradients over padding", "padding/proof.py", "self.check_gradients()", "pass"),
    # What is refused.
    Fault(
        "operators",
        "watch/admission.py",
        "            if refused is not None:",
        "            if False:",
    ),
    Fault("host tensors", "watch/admission.py", "if uses and (varying or t.dim()):", "if False:"),
    Fault(
        "tensors that are kept",
        "capture/checks.py",
        "if id(t) not in covered and lies_on(t, device) and observer.memory.is_own(t):",
        "if False:",
    ),
    Fault(
        "reads by the host",
        "driver/host_reads.py",
        "        if self._owns(t):\n            fix =",
        "        if False:\n            fix =",
    ),
    Fault(
        "draws from Python's generators",
        "driver/seeding.py",
        "moved = next(self._moved_by(reads), None)",
        "moved = None",
    ),
    Fault(
        "forwards that wait for their backward",
        "runtime/phase.py",
        "if waiting >= self._options.max_in_flight:",
        "if False:",
    ),
)


def put(fault: Fault, root: Path) -> None:
    """Put a fault into a copy of the repository."""
    file = root / SOURCE / fault.file
    text = file.read_text()
    assert text.count(fault.right) == 1, f"{fault.name}: {fault.file} has another form by now"
    file.write_text(text.replace(fault.right, fault.wrong))


def main() -> int:
    """Put each fault into a copy, run the tests there, and write which were found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    suite = "thorough" if "--thorough" in options.pytest else "everywhere"
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for fault in FAULTS:
        if options.only and fault.name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "__pycache__")
            shutil.copytree(ROOT, copy, ignore=ignored)
            put(fault, copy)
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
            began = time.monotonic()
            try:
                ran = subprocess.run(
                    [*command, *options.pytest],
                    cwd=copy,
                    text=True,
                    capture_output=True,
                    timeout=LIMIT_SECONDS,
                )
                by = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
            except subprocess.TimeoutExpired:
                by = ["no end"]
        row = {"found_by": by[:1], "seconds": round(time.monotonic() - began)}
        found.setdefault(fault.name, {})[suite] = row
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{fault.name}: {by[0] if by else 'NOT FOUND'}, {row['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

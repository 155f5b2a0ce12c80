"""The proof that a callable may run at a padded size, and the cuts of its results.

The callable runs at real sizes and at the bucket's, on state that is rolled back. Values are
compared with values at the real size, for random inputs and the caller's. Taint analysis finds real
rows that depend on padded rows where values do not show it. Shapes at two sizes show which
dimension of a result follows which bucketed dimension. A proof is of one bucket. The next takes
over only how results follow the sizes, if its own runs agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.call.tree import Flat
from onelaunch.driver.distance import close, is_inexact
from onelaunch.driver.rows import first_rows
from onelaunch.errors import CaptureError
from onelaunch.padding.compare import (
    Backprop,
    Form,
    Jitter,
    Known,
    ProvenBucket,
    is_degenerate,
    line,
    refuse_moved_view,
    same_layout,
    stored_otherwise,
)
from onelaunch.padding.dry_run import DryRun
from onelaunch.padding.named_rows import GROUPED, ends, fix_of_failure, spare
from onelaunch.padding.pad import (
    BucketedCall,
    Proof,
    check_outputs,
    cut_shape,
    dense_stride,
    resized,
)
from onelaunch.padding.samples import Samples, unknown
from onelaunch.padding.taint.align import DIVERGES, DRAWN, NUMBER, TaintCause
from onelaunch.padding.taint.hidden import Hiding
from onelaunch.padding.taint.mode import TaintMode
from onelaunch.padding.taint.shadow import storage_of
from onelaunch.padding.taint.trace import Trace, TracedStep, form, packet_of, shapes_of
from onelaunch.sizes.buckets import Buckets, Sizes, shown
from onelaunch.sizes.dims import SizeLink
from onelaunch.sizes.ragged import Ragged

_ROUNDED = 3  # runs with rounding errors that an integer has to survive
_REPEATED = "leave out pad={...} of that argument: padding repeats the last real row then"
_UNCOUNTED = (
    "write it outside of the callable, with the real rows: independent=True says that rows do not "
    "depend on each other, and what is kept counts padded ones too"
)
_BATCH_NORMS = frozenset(
    {
        *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        *("cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit_no_stats"),
    }
)
_EVAL = "call `.eval()`: in training, BatchNorm takes the statistics of all rows, padded ones too"
_FIX_STATISTICS = (
    "leave the buckets for this size out: the norm takes statistics of padded elements, too"
)
_UNDRAWN = "call `.eval()`, set dropout to 0, or say `independent=True`"
# At size 1 a transposed tensor is contiguous, and torch takes other operations.
_ALONE = "a bucket of its own for size 1, where torch may take other operations: sizes=(1, ...)"


class CallFails(CaptureError):
    """The refusal of a callable that fails in a run of a proof; `__cause__` says how."""


def _lacks_a_batch(error: Exception) -> bool:
    """Return whether a norm in training was given a single row."""
    norms = [getattr(F, name, None) for name in ("_verify_batch_size", "_verify_spatial_size")]
    codes = {getattr(norm, "__code__", None) for norm in norms}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


class _Pair(NamedTuple):
    """The arguments of a run at a real size, and of a run padded from there. `real`, `grown`: the
    arguments of either run."""

    sizes: Sizes
    samples: Samples
    real: Sequence[Tensor]
    grown: Sequence[Tensor]
    steps: Sequence[TracedStep]  # the operations of the run at the real size


@dataclass(slots=True)
class Proving:
    """The runs of one proof that padding to `bucket` changes no real row, and their findings.
    `call`: of any size of that bucket."""

    dry_run: DryRun
    buckets: Buckets
    call: BucketedCall
    bucket: Sizes
    known: Known = field(default_factory=Known)
    results: dict[Sizes, Flat] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    form: Form | None = None
    """Form of the run at the smallest size; None if the caller asserts independence."""
    degenerate: bool = False
    """True if the run at the smallest size may do less than runs at larger ones."""
    uniform: bool = False
    """True if the taint depends on the operations and their shapes alone."""
    shapes: dict[Sizes, tuple[int, ...]] = field(default_factory=dict)
    hiding: Hiding = field(default_factory=Hiding)
    constants: set[int] = field(default_factory=set)  # storages of masks that the callable keeps
    used: dict[bool, set[int]] = field(default_factory=lambda: {True: set(), False: set()})
    """The storages of state that runs have used, by whether they were padded."""
    lasting: str | None = None  # a word on lasting traces of a run; None if it leaves no trace
    on: str | None = None  # the cause in refusals; None for padding
    fix: str | None = None  # the fix in refusals, where an operation has none of its own

    def proven(self, gradients: bool = False) -> Proof:
        """Return the proof, of a callable with its backward, too, under `gradients`. Raises
        `CaptureError`: OL140, naming the operation, its line and the result."""
        proof = self.prove()
        if not self.used[False] <= self.used[True]:
            what = "a smaller size uses other tensors of the state than the bucket's size"
            raise CaptureError("OL140", what, fix="leave out the buckets that serve such sizes")
        if gradients:
            self.check_gradients()
        return proof

    def prove(self) -> Proof:
        """Find the cuts of the results, which padding does not change."""
        least = self.buckets.smallest(self.bucket)
        if least == self.bucket:  # no other size is served
            return Proof()
        least, most = ends(self.buckets, self.bucket)
        padded, larger = self._random_pair(least), None
        if self.buckets.independent:
            if most != least:
                self.results[most] = self.real(most, None)
        else:
            if not isinstance(self.buckets, Ragged):
                larger = None if self.form is None else self.known.get(self.form)
            if larger is not None and not larger.covers(self.bucket):
                larger = None
            if larger is not None and self.degenerate and not larger.on_lines(self.shapes):
                larger = None
            if larger is None:
                padded = self._pair(most)
        for sizes in self._corners(least):
            if sizes not in self.results:
                self.results[sizes] = self.real(sizes, None)
        proof = self._cuts(padded)
        if self.form is None:
            return proof
        if larger is None:
            self.known[self.form] = ProvenBucket(
                self.bucket, proof.follows, self.shapes, self.uniform and not self.written
            )
        elif larger.follows != proof.follows:
            return self._cuts(self._pair(most))  # unlike the larger bucket's
        return proof

    def _corners(self, least: Sizes) -> list[Sizes]:
        """Return sizes with one dimension of the bucket and the smallest of all others. They show
        which size a dimension follows."""
        mixed = [i for i, (n, b) in enumerate(zip(least, self.bucket, strict=True)) if n < b]
        ends = list(enumerate(zip(least, self.bucket, strict=True)))
        corners = [tuple(b if i == place else n for i, (n, b) in ends) for place in mixed]
        return corners if len(mixed) > 1 else []

    def inputs(self, sizes: Sizes) -> list[Tensor]:
        return self.call.each(
            lambda t, how: t.detach().clone() if how is None else resized(t, how, sizes)
        )

    def real(
        self,
        sizes: Sizes,
        mode: TorchDispatchMode | None,
        inputs: Sequence[Tensor] | None = None,
        padded: bool = False,
    ) -> Flat:
        """Run at these sizes, by default on the caller's rows."""
        try:
            given = self.inputs(sizes) if inputs is None else inputs
            result = self.dry_run.run(given, mode or Trace())
        except CaptureError:
            raise
        except Exception as error:
            at = f"padded to {shown(self.bucket)}" if padded else f"at size {shown(sizes)}"
            what = f"the callable fails {at}: {error}"
            lone = _lacks_a_batch(error)
            fix = self._of_norm() if lone else fix_of_failure(error)
            if self.dry_run.reached.walk().runs_backward():  # no run here has a graph
                what = "the callable runs its backward, which would take the padded rows too"
                fix = "graph the forward alone, and call `.backward()` outside of it"
            raise CallFails("OL140", what, fix=fix) from error
        self.used[padded or sizes == self.bucket] |= self.dry_run.used
        return result

    def _random_pair(self, sizes: Sizes) -> Flat:
        """Run `_pair` on random numbers, or on the caller's if it fails on random ones."""
        try:
            return self._pair(sizes, random=True)
        except CallFails:
            return self._pair(sizes)

    def _pair(self, sizes: Sizes, random: bool = False) -> Flat:
        """Run at `sizes`, and padded from there, and compare. Return the padded result."""
        samples, trace = Samples(self.call, self.bucket, random), Trace(made_up=random)
        inputs = samples.real(sizes)
        grown = samples.grown(inputs)  # before a run may write into them
        real, steps = self.real(sizes, trace, inputs), trace.steps
        pair = _Pair(sizes, samples, inputs, grown, steps)
        self.results[sizes] = real
        stored = self.dry_run.found
        if self.buckets.independent:
            taint = self._marked(pair)
            padded = self.real(sizes, taint, grown, padded=True)
            self._refuse_counting(taint)
            self.written |= {i for i in self.dry_run.written if self.call.padded[i] is not None}
            memory = set(map(self.dry_run.driver.storage, grown))
            for number, (big, small) in enumerate(zip(padded.tensors, real.tensors, strict=False)):
                viewed = self.dry_run.driver.storage(big) in memory
                if viewed and big.shape == small.shape and not any(big is t for t in grown):
                    refuse_moved_view(number, big, small)
            return padded
        taint, padded = self._as_larger(pair) or self._padded(pair)
        if self.form is None:
            self.form = self._form(pair)
            self.degenerate = self._is_degenerate(pair)
            followed = {} if taint is None else {self.bucket: shapes_of(taint.steps)}
            self.shapes = {sizes: shapes_of(steps), **followed}
            if taint is not None:
                self.uniform = not (self.degenerate or self.constants or self.lasting)
                self.uniform &= not taint.rests_on_values()
        unlike = stored_otherwise(stored, self.dry_run.found)
        if unlike is not None:
            what = f"`{unlike.name}` is given a value that changes with the size"
            raise CaptureError("OL140", what, fix="store it outside of the callable")
        if padded.tree != real.tree:
            what = "a result that is not a tensor changes with the size"
            raise CaptureError("OL140", what, fix="return tensors, or ask the tensor for its size")
        for number, (big, small) in enumerate(zip(padded.tensors, real.tensors, strict=True)):
            self._check_result(taint, number, big, small, pair)
        return padded

    def _form(self, pair: _Pair) -> Form:
        return form(pair.steps), self.call.padded

    def _is_degenerate(self, pair: _Pair) -> bool:
        ragged = isinstance(self.buckets, Ragged)  # whose rows are told apart at both ends
        return ragged or is_degenerate(pair.steps, pair.sizes, self.bucket)

    def _as_larger(self, pair: _Pair) -> tuple[None, Flat] | None:
        """Run padded, and return the result; None if taint has to be followed. A larger bucket's
        taint holds here if it is uniform, and operations and shapes are alike."""
        larger = self.known.get(self._form(pair)) if self.form is None else None
        if larger is None or not (larger.uniform and larger.covers(self.bucket)):
            return None
        if self._is_degenerate(pair):
            return None
        trace = Trace()
        padded = self.real(pair.sizes, trace, pair.grown, padded=True)
        shapes = {pair.sizes: shapes_of(pair.steps), self.bucket: shapes_of(trace.steps)}
        alike = form(trace.steps) == form(pair.steps) and larger.on_lines(shapes)
        return (None, padded) if alike else None

    def _padded(self, pair: _Pair) -> tuple[TaintMode | None, Flat]:
        """Run padded, and return the taint and the result. There is no taint if it was followed
        from the smallest size, with the same operations and none degenerate."""
        if self.form == self._form(pair) and not self.degenerate:
            return None, self.real(pair.sizes, None, pair.grown, padded=True)
        taint = self._marked(pair)
        padded = self.real(pair.sizes, taint, pair.grown, padded=True)
        self.check_run(taint, pair.grown, pair.sizes)
        self.hiding.join(taint.hiding)
        self.constants |= taint.constants
        self.lasting = self.lasting or self._left_by(taint)
        return taint, padded

    def _refuse_counting(self, taint: TaintMode) -> None:
        """Refuse writes that padding changes: they outlive the rows, however independent."""
        apart, kept = taint.finish(), taint.written()
        changed = taint.changed() if apart is not None else None
        if kept or changed is not None:
            found = taint.blame(kept[0]) if kept else changed
            assert found is not None
            raise self.refusal("a tensor that the callable keeps", found, fix=_UNCOUNTED)

    def _left_by(self, taint: TaintMode) -> str | None:
        """Return the traces of the last run that a second run would leave once more."""
        if self.dry_run.found:
            return f"changes `{self.dry_run.found[0].slot.name}`"
        if taint.random is not None:
            return "draws random numbers"
        written = taint.changed() is not None or self.dry_run.written
        return "writes into a tensor from before the call" if written else None

    def _marked(self, pair: _Pair) -> TaintMode:
        sizes = pair.sizes
        taint = TaintMode(self.dry_run.device, pair.steps, spare(self.buckets, sizes, self.bucket))
        for t, small, how in zip(pair.grown, pair.real, self.call.padded, strict=True):
            if how is None:
                taint.vary(t)
                continue
            outside = torch.ones(t.shape, dtype=torch.bool, device="cpu")
            first_rows(outside, small.shape).fill_(False)
            # A constant fill is padding, but its value is known.
            rows = None if how.rows is None else (sizes[how.rows], self.bucket[how.rows])
            taint.mark(t, outside, unknown(outside, small, how), rows)
        return taint

    def check_run(self, taint: TaintMode, grown: Sequence[Tensor], sizes: Sizes) -> None:
        apart = taint.finish()
        if apart is not None:
            raise self.refusal("the callable", apart, sizes=sizes)
        kept = taint.written()
        if kept:
            raise self.refusal("a tensor that the callable keeps", taint.blame(kept[0]))
        for index, (t, how) in enumerate(zip(grown, self.call.padded, strict=True)):
            if how is not None and taint.mutated(t):
                self.written.add(index)

    def _check_result(
        self, taint: TaintMode | None, number: int, big: Tensor, small: Tensor, pair: _Pair
    ) -> None:
        name, sizes = f"result {number}", pair.sizes
        if any(big is t for t in pair.grown):
            return
        if big.dim() != small.dim() or any(
            s > b for b, s in zip(big.shape, small.shape, strict=True)
        ):
            what = f"{name} is {list(small.shape)} at size {shown(sizes)} and {list(big.shape)}"
            raise CaptureError("OL140", f"{what} padded to {shown(self.bucket)}")
        real = first_rows(big, small.shape)
        if taint is not None:
            if taint.depends(big, tuple(map(slice, small.shape))):
                raise self.refusal(name, taint.blame(big), sizes=sizes)
            if not taint.made(big):
                refuse_moved_view(number, big, small)
        if close(real, small):
            return
        if not self._rounded(number, real, small, pair):
            found = None if taint is None else taint.blame(big)
            what = f"{name} has other real rows padded to {shown(self.bucket)}"
            what += f", last by `{found.name}`" if found else ""
            raise CaptureError("OL140", what, where=found and found.place)

    def _rounded(self, number: int, big: Tensor, small: Tensor, pair: _Pair) -> bool:
        """Return whether integers differ only where rounding changes them too, as an argmax of
        equals."""
        if is_inexact(small):
            return False
        differ = big != small
        for seed in range(_ROUNDED):
            given = pair.samples.real(pair.sizes)
            try:
                other = self.real(pair.sizes, Jitter(seed), given).tensors[number]
            except CaptureError:
                return False
            if other.shape != small.shape:
                return False
            differ = differ & (other == small)
        return not bool(differ.any())

    def check_gradients(self) -> None:
        """Refuse a backward whose gradients differ at the bucket's size. A constant fill without a
        derivative gives NaN, even times the 0 that padding sends back."""
        least = self.buckets.smallest(self.bucket)
        filled = any(
            how is not None and how.fill != (None,) * len(how.fill) for how in self.call.padded
        )
        if self.buckets.independent or least == self.bucket or not filled:
            return
        for positive in (False, True):
            samples = Samples(self.call, self.bucket, True, positive)
            run = Backprop(self.dry_run.fn)
            real = samples.real(least)
            grown = samples.grown(real)
            proving = replace(self, dry_run=replace(self.dry_run, fn=run))
            try:
                small = proving.real(least, Trace(True), self._leaves(real, run))
            except CallFails:
                return  # it does not take random numbers
            big = proving.real(least, None, self._leaves(grown, run), padded=True)
            for a, b in zip(big.tensors, small.tensors, strict=True):
                if not close(first_rows(a, b.shape), b):
                    what = f"a gradient of shape {list(b.shape)} depends on what fills the padding"
                    raise CaptureError("OL140", what, fix=_REPEATED)

    def _leaves(self, tensors: Sequence[Tensor], run: Backprop) -> Sequence[Tensor]:
        """Make the arguments require grad whose gradients the caller wants."""
        asked = zip(tensors, self.call.flat.tensors, strict=True)
        run.inputs = [made.requires_grad_() for made, given in asked if given.requires_grad]
        return tensors

    def _of_norm(self) -> str:
        """Return the fix for a norm that takes statistics of its argument. In eval mode, a norm
        takes those that it keeps, if it keeps any."""
        norms = [o for o in self.dry_run.reached.walk().owners if isinstance(o, _NormBase)]
        keeps = any(norm.training and norm.running_mean is not None for norm in norms)
        return _EVAL if keeps else _FIX_STATISTICS

    def refusal(
        self,
        what: str,
        found: TaintCause,
        on: str | None = None,
        sizes: Sizes = (),
        fix: str | None = None,
    ) -> CaptureError:
        reason = found.reason or "it brings rows together"
        on = on or self.on or f"padding to {shown(self.bucket)}"
        alone = any(n == 1 < b for n, b in zip(sizes, self.bucket, strict=False))
        at_one = _ALONE if alone and reason in (DIVERGES, NUMBER) else None
        if packet_of(found.name) in _BATCH_NORMS:
            fix = self._of_norm()
        grouped = GROUPED if isinstance(self.buckets, Ragged) and not found.reason else at_one
        fix = fix or self.fix or (_UNDRAWN if reason == DRAWN else grouped)
        return CaptureError(
            "OL140",
            f"{what} depends on {on}, by `{found.name}`: {reason}",
            where=found.place,
            fix=fix,
        )

    def _cuts(self, padded: Flat) -> Proof:
        """Return the dimensions of each result that follow a size, as all runs agree."""
        proof = Proof(tree=padded.tree, written=tuple(sorted(self.written)))
        proof.hiding, proof.lasting = self.hiding or None, self.lasting
        kept = self.dry_run.reached.walk().tensors() if self.constants else ()
        proof.masks = [t for _, t in kept if storage_of(t) in self.constants]
        check_outputs(self.buckets, padded.tensors)
        self.results[self.bucket] = padded
        for number, big in enumerate(padded.tensors):
            stated = self.buckets.outputs.get(number)
            shapes = {sizes: r.tensors[number].shape for sizes, r in self.results.items()}
            if stated is None:
                follows = self.found(number, shapes)
            else:
                follows = tuple(
                    SizeLink(dim, place, 1, big.shape[dim] - self.bucket[place])
                    for place, dim in enumerate(stated)
                    if dim is not None
                )
            proof.follows.append(follows)
            self._check_cut(number, follows)
        return proof

    def found(self, number: int, shapes: dict[Sizes, torch.Size]) -> tuple[SizeLink, ...]:
        whole = shapes[self.bucket]
        found: list[SizeLink] = []
        for dim, size in enumerate(whole):
            if all(shape[dim] == size for shape in shapes.values()):
                continue
            for place in range(len(self.bucket)):
                follow = line(dim, place, {s: shape[dim] for s, shape in shapes.items()})
                if follow is not None:
                    found.append(follow)
                    break
            else:
                what = f"dimension {dim} of result {number} follows the sizes in no simple way"
                raise CaptureError("OL140", what, fix="keep the bucketed dimensions apart")
        return tuple(found)

    def _check_cut(self, number: int, follows: tuple[SizeLink, ...]) -> None:
        """Refuse a result whose shape differs from the cut's, and a cut of a view or of shared
        memory. A cut result must be laid out as a new tensor."""
        for sizes, result in self.results.items():
            t = result.tensors[number]
            big = self.results[self.bucket].tensors[number]
            shape = cut_shape(big.shape, follows, sizes)
            if list(t.shape) != shape:
                what = f"result {number} is {list(t.shape)} at size {shown(sizes)}, not {shape}"
                fix = "state it: Buckets(..., outputs={...})"
                if number in self.buckets.outputs:
                    fix = f"leave {number} out of outputs={{...}}: it is found out"
                raise CaptureError("OL140", what, fix=fix)
            if not follows:
                continue
            if not same_layout(t, dense_stride(big, shape)):
                what = f"result {number} is a view with gaps, {list(t.stride())}"
                raise CaptureError("OL140", what, fix="return `.contiguous()`")
            others = [o for i, o in enumerate(result.tensors) if i != number]
            storage = storage_of(t)
            if any(storage_of(o) == storage for o in others if o is not t):
                what = f"result {number} shares memory with another result"
                raise CaptureError("OL140", what, fix="return a `.clone()`")

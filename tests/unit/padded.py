"""A proof for a program and a call, as `graph` would ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from onelaunch.call.tree import flatten_call
from onelaunch.driver.select import select
from onelaunch.padding.dry_run import DryRun
from onelaunch.padding.pad import Proof, bucketed_call, parameters
from onelaunch.padding.proof import Proving
from onelaunch.sizes.buckets import Buckets
from onelaunch.state.snapshot import ReachableState

ROWS = Buckets(0, (4, 8))
Program = Callable[..., Any]


def proof(f: Program, *args: Any, buckets: Buckets = ROWS) -> Proof:
    if isinstance(f, nn.Module):
        f.requires_grad_(False)
    flat = flatten_call(args, {})
    driver, device = select(flat.tensors)
    call = bucketed_call(buckets, flat, parameters(f))
    bucket = buckets.choose(call.sizes)
    assert bucket is not None
    dry_run = DryRun(driver, device, f, ReachableState([("f", f)]), flat.tree)
    return Proving(dry_run, buckets, call, bucket).proven()

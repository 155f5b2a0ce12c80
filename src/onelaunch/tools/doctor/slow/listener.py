"""The listener that writes down what a run shows of its speed, and asks the rules."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.call import tree
from onelaunch.finding import Finding
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.run import FunctionCall, Listener, RanOperation
from onelaunch.tools.doctor.slow import layers, modes, norms, settings
from onelaunch.tools.doctor.slow.calls import CONCERNS, for_training, norm
from onelaunch.tools.doctor.slow.flow import Flow
from onelaunch.tools.doctor.slow.machine import busy_us
from onelaunch.tools.doctor.slow.modules import Modules, requires_grad, training_only
from onelaunch.tools.doctor.slow.products import moved_by, product_of
from onelaunch.tools.doctor.slow.record import Record, Training
from onelaunch.tools.doctor.slow.separable import depthwise_separable
from onelaunch.tools.doctor.slow.trace import trace, trace_product
from onelaunch.tools.doctor.spot import Spot
from onelaunch.tools.profiler.counting import flops_of, plain

_RULES: tuple[Callable[[Record], list[Finding]], ...] = (
    modes.train_mode,
    modes.grad_mode,
    settings.float32,
    settings.tf32_off,
    settings.cudnn_benchmark_off,
    settings.contiguous_convolution,
    norms.bias_before_norm,
    norms.unfolded_batchnorm,
    norms.inference_statistics,
    layers.parallel_branches,
    layers.odd_channels,
    depthwise_separable,
    layers.thin_layers,
    layers.many_tiny_kernels,
)


class Slow(Listener):
    """The listener that finds what is slow in inference.

    Attributes:
        record: what the run showed.
    """

    concerns = CONCERNS

    def __init__(self) -> None:
        self._flow = Flow()

    @contextmanager
    def begin(self, workload: Workload, spot: Callable[[], Spot]) -> Generator[None]:
        self._spot = spot
        self.record = record = Record(workload.fn, workload.device)
        inputs = tree.flatten((workload.args, workload.kwargs)).tensors
        record.wanted = any(t.requires_grad for t in inputs)
        record.trainable = any(p.requires_grad for p in workload.parameters())
        self._modules = Modules(workload, self._called)
        for t, path in self._modules.owned():
            for part in plain(t):
                self._flow.of(part).owner = path
        with self._modules.followed():
            yield

    def operation(self, event: RanOperation) -> None:
        record, op, flow = self.record, event.op, self._flow
        record.backward |= torch._C._current_graph_task_id() != -1 or _writes_parameter(event)
        if record.backward:
            return
        sources = [flow.of(t) for t in plain((event.args, event.kwargs))]
        step = flow.step(op, event.args, event.kwargs, event.result)
        made = plain(event.result) or plain(op.written(event.args, event.kwargs))
        if step is None or op.idle or op.describes or not any(t.numel() for t in made):
            return
        spot, flops = event.spot(), flops_of(event.op, event.args, event.kwargs, event.result)
        if made[0].device.type == record.device.type:
            record.launches.add(spot, busy_us(flops or 0, moved_by(event), made[0].dtype))
        product = product_of(event, flops, spot, sources, step, self._modules.path)
        if product is not None:
            trace_product(record, product)
        else:
            trace(record, event, sources, step, spot)

    def function(self, event: FunctionCall) -> None:
        does = for_training(event)
        if does is not None:
            module = self._modules.current
            mode = module is not None and module.training
            self._note_training(does, self._modules.path, event.spot, mode)
        found = norm(event, self._flow, self._modules.path)
        if found is not None:
            self.record.norms.append(found)

    def end(self, result: Any) -> None:
        record, modules = self.record, self._modules
        record.graded = modules.graded or requires_grad(result)
        record.any_training, record.any_eval = modules.any_training, modules.any_eval
        for t in tree.flatten(result).tensors:
            for part in plain(t):
                self._flow.of(part).reads += 1

    def findings(self) -> list[Finding]:
        if self.record.trains:
            return []
        return [finding for rule in _RULES for finding in rule(self.record)]

    def _called(self, module: nn.Module) -> None:
        does = training_only(module)
        if does is not None:
            self._note_training(does, self._modules.path, self._spot, mode=True)

    def _note_training(self, does: str, path: str, spot: Callable[[], Spot], mode: bool) -> None:
        if (path, does) not in self.record.training:
            graded = torch.is_grad_enabled()
            noted = Training(path=path, spot=spot(), does=does, mode=mode, graded=graded)
            self.record.training[path, does] = noted


def _writes_parameter(event: RanOperation) -> bool:
    if not event.op.writes:
        return False
    written: list[Tensor] = event.op.written(event.args, event.kwargs)
    return any(isinstance(t, nn.Parameter) for t in written)

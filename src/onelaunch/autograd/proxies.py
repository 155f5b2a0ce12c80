"""Proxy leaves: stand-ins for the callable's tensors, where the captured autograd graph ends.

During the capture every tensor of the callable's state has a proxy: a leaf over the same memory
with its own version counter. So the captured graph ends at leaves that nothing else uses. It has no
AccumulateGrad node of a real parameter, which may live on another stream, and runs no hook of a
real parameter. The caller's own backward does both. An optimizer's step does not invalidate the
graph, which serves every replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from onelaunch.autograd.overwritten import set_versions
from onelaunch.driver.refusals import error_here
from onelaunch.driver.select import recordable
from onelaunch.errors import CaptureError
from onelaunch.source import line_of
from onelaunch.state.slots import Slot, gradient_of, is_leaf
from onelaunch.state.walk import StateWalk
from onelaunch.unwinding import FunctionMode
from onelaunch.watch.observer import Observer


class ProxyLeaves:
    """The proxy leaves of one capture; in the slots while the context is active. Tensors on other
    devices get none, nor do slots in `but`, inputs of the recording already."""

    def __init__(self, before: StateWalk, device: torch.device, but: Sequence[Slot]) -> None:
        inputs = {slot.id for slot in but}
        self._proxies: dict[int, Tensor] = {}
        self._real: dict[int, Tensor] = {}
        self._slots: list[tuple[Slot, object, object]] = []
        for slot, t in before.tensors():
            if slot.id in inputs or slot.key is gradient_of or t.device.type != device.type:
                continue
            if t.is_inference() or not recordable(t):
                continue
            if id(t) not in self._proxies:
                proxy = proxy_for(t)
                set_versions([(proxy, t._version)])  # code may ask for it
                proxy.__dict__ = t.__dict__  # what is stored there stays on the tensor
                self._proxies[id(t)] = proxy
                self._real[id(proxy)] = t
            if isinstance(slot.holder, tuple):
                self._replace_tuple(slot)
            else:
                self._slots.append((slot, t, self._proxies[id(t)]))
        self._replace_references(before)

    def _replace_references(self, before: StateWalk) -> None:
        """Replace weak references too. `nn.RNN` compares its parameters with weak references, and
        makes its list of weights anew where they differ."""
        for slot, value in before.slots.values():
            if isinstance(value, weakref.ReferenceType) and not isinstance(slot.holder, tuple):
                proxy = self._proxies.get(id(cast(Any, value)()))
                if proxy is not None:
                    self._slots.append((slot, value, weakref.ref(proxy)))

    def _replace_tuple(self, slot: Slot) -> None:
        """Replace the tuple that holds this slot by a tuple with the proxy."""
        leading, items = slot.via, cast(tuple[object, ...], slot.holder)
        if leading is None or leading.read() is not items or isinstance(leading.holder, tuple):
            return
        index = next((i for i, entry in enumerate(self._slots) if entry[1] is items), None)
        content = list(cast(Any, items if index is None else self._slots.pop(index)[2]))
        content[slot.key] = self._proxies[id(items[slot.key])]
        replaced = tuple(content) if type(items) is tuple else cast(Any, type(items))(*content)
        self._slots.append((leading, items, replaced))

    def __enter__(self) -> ProxyLeaves:
        for slot, _, proxy in self._slots:
            slot.write(proxy)
        return self

    def __exit__(self, *_: object) -> None:
        for slot, real, proxy in self._slots:
            if slot.read() is proxy:
                slot.write(real)

    def real(self, t: Tensor) -> Tensor:
        """Return the tensor behind a proxy, or `t` itself."""
        return self._real.get(id(t), t)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for proxy in self._proxies.values():
            yield proxy, self._real[id(proxy)]

    def replace_in(self, observer: Observer, storage_of: Callable[[Tensor], int]) -> None:
        """Replace proxies by their tensors in the observations."""
        for storage, tensors in observer.memory.external.items():
            observer.memory.external[storage] = [self.real(t) for t in tensors]
        behind = {storage_of(proxy): real for proxy, real in self.pairs()}
        for storage, t in observer.memory.written.items():
            real = self.real(t)
            # A view of a proxy counts its writes with the proxy, and not with the tensor behind.
            observer.memory.written[storage] = real if real is not t else behind.get(storage, t)

    def moved(self) -> Tensor | None:
        """Return a proxy with other memory or another layout after the run, or None. Its tensor has
        kept its own."""
        for proxy, real in self.pairs():
            if _layout(proxy) != _layout(real):
                return proxy
        return None

    def name(self, proxy: Tensor) -> str:
        real = self.real(proxy)
        return next((slot.name for slot, t, _ in self._slots if t is real), "a tensor")

    def accumulated(self) -> bool:
        """Return whether a backward ran inside and left gradients on proxies."""
        return any(
            proxy.is_leaf and proxy.grad is not (real.grad if is_leaf(real) else None)
            for proxy, real in self.pairs()
        )


def _layout(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def proxy_for(t: Tensor) -> Tensor:
    """Return a leaf over the memory of `t`, with its own version counter."""
    with torch.no_grad():
        alias = t.data
    if isinstance(t, nn.Parameter):
        alias = nn.Parameter(alias, t.requires_grad)
    elif t.requires_grad:
        alias.requires_grad_()
    if is_leaf(t) and t.grad_dtype != alias.grad_dtype:  # a gradient of float32 for bfloat16, say
        alias.grad_dtype = t.grad_dtype
    if is_leaf(t) and t.grad is not None:
        if t.grad.dtype != t.dtype and t.grad.dtype != t.grad_dtype:
            alias.grad_dtype = None
        alias.grad = t.grad
    for name, value in vars(t).items():  # marks that libraries leave on parameters
        setattr(alias, name, value)
    return alias


_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)


class NoHooks(FunctionMode):
    """A mode that refuses hooks on tensors of a captured graph: Python that no replay would run.
    `refused`: called with the refusal, which is raised by default."""

    def __init__(self, refused: Callable[[CaptureError], object] | None = None) -> None:
        super().__init__()
        self._refused = refused

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOOKS:
            what = f"`{func.__name__}` on a tensor of the captured forward"
            error = error_here("OL112", what)
            if self._refused is None:
                raise error
            self._refused(error)
        return func(*args, **(kwargs or {}))


def refuse_backward_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse backward hooks of submodules, by name: Python that every eager backward runs."""
    everywhere: Any = nn.modules.module
    hooks = everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks
    _refuse_first("every module has a backward hook", *hooks)
    for name, module in modules:
        what = f"`{name}` ({type(module).__name__}) has a backward hook"
        state = module.__dict__
        _refuse_first(what, state.get("_backward_hooks"), state.get("_backward_pre_hooks"))


def _refuse_first(what: str, *registered: dict[int, Any] | None) -> None:
    for hooks in registered:
        for hook in (hooks or {}).values():
            raise CaptureError("OL112", what, where=line_of(hook))

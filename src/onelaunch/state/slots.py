"""Slots: the places that hold the values a callable reads."""

from __future__ import annotations

import array as arrays
import contextvars
import functools
import operator
import os
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from onelaunch.errors import describe_type, text_of
from onelaunch.frames.peek import METHODS, attributes_of
from onelaunch.identity import id

Kind = Literal["item", "cell", "of", "contents"]
"""The kind of read of a slot: ``holder[key]``, ``holder.cell_contents`` or ``key(holder)``. The
latter is ``"contents"`` if the guard's C does not know the key, else ``"of"``."""


class Slot(NamedTuple):
    """A place that holds a value: a dict entry, a list item, or a closure cell."""

    kind: Kind
    holder: Any
    key: Any
    name: str
    owner: Any
    """The object whose attribute the slot is, or None."""
    via: Slot | None = None
    """The slot whose content is, or contains, the holder."""

    @property
    def id(self) -> tuple[int, object]:
        return (id(self.holder), self.key)

    @property
    def is_item(self) -> bool:
        """True for an item of a container, False for an attribute or a variable."""
        return self.kind == "item" and self.owner is None and self.name.endswith("]")

    @property
    def word(self) -> object:
        """The key of an item, or the name of an attribute or a variable, as code has it."""
        return self.key if self.is_item else self.name.partition(" of ")[0].rpartition(".")[2]

    def read(self) -> object:
        """Return the slot's content, or `MISSING`. Ignores a container class's overrides."""
        holder = self.holder
        kind: type = type(holder)
        if kind is dict and self.kind == "item":  # nearly all slots
            return holder.get(self.key, MISSING)
        try:
            if self.kind == "cell":
                return holder.cell_contents
            if self.kind in ("of", "contents"):
                return self.key(holder)
            if isinstance(holder, dict):
                return dict.get(cast(dict[Any, Any], holder), self.key, MISSING)
            if isinstance(holder, tuple):
                return tuple.__getitem__(cast(tuple[Any, ...], holder), self.key)
            return holder[self.key]
        except (AttributeError, LookupError, ValueError, TypeError):
            return MISSING

    @property
    def reader(self) -> Callable[[], object]:
        """A function like `read`, in 0.05 us for an entry of a dict."""
        if type(self.holder) is dict and self.kind == "item":
            return functools.partial(self.holder.get, self.key, MISSING)
        return self.read

    @property
    def writer(self) -> Callable[[object], None]:
        """A function like `write` for a number, in 0.05 us for an entry of a dict."""
        if type(self.holder) is dict and self.kind == "item" and not isinstance(self.owner, type):
            return functools.partial(self.holder.__setitem__, self.key)
        return self.write

    def shown(self, value: object) -> str:
        """Return the text of a value for a message: an array's numbers, not its bytes."""
        if self.kind == "contents" and isinstance(value, bytes):
            with suppress(TypeError, ValueError, NotImplementedError):  # `cast` knows plain numbers
                kind: Any = memoryview(self.holder).format
                value = memoryview(value).cast(kind).tolist()
        text = text_of(value)
        if isinstance(value, str | bytes):
            return text[:40]
        return text if len(text) <= 40 else describe_type(value)

    def write(self, value: object) -> None:
        """Store a value; `MISSING` empties the slot. Ignores a container class's overrides."""
        holder = self.holder
        if self.kind == "cell" and value is MISSING:
            del holder.cell_contents
        elif self.kind == "cell":
            holder.cell_contents = value
        elif self.kind in ("of", "contents") or isinstance(self.owner, type):
            self._assign(value)
        else:
            kind = builtin_kind(holder)
            if value is MISSING:
                if self.read() is not MISSING:
                    kind.__delitem__(holder, self.key)
            elif kind in (list, deque) and self.key == kind.__len__(holder):
                kind.append(holder, value)
            else:
                kind.__setitem__(holder, self.key, value)
            if holder is _ENVIRONMENT:
                new = cast(bytes, value)
                os.unsetenv(self.key) if value is MISSING else os.putenv(self.key, new)

    def _assign(self, value: object) -> None:
        """Store an attribute that is not in a writable dict: of a class, or in `__slots__`."""
        member = getattr(self.key, "__self__", None)
        if self.key in _ATTRIBUTES:
            value = None if value is MISSING else value  # of a leaf without a gradient
            object.__setattr__(self.holder, _ATTRIBUTES[self.key], value)
        elif self.key is requires_grad:
            if not self.holder.is_leaf:  # written in place
                self.holder.detach_()
            self.holder.requires_grad_(value)
        elif hasattr(self.key, "write"):
            self.key.write(self.holder, value)
        elif isinstance(self.holder, contextvars.ContextVar):
            if value is not MISSING:  # Python cannot empty it
                self.holder.set(value)
        elif isinstance(value, bytes):
            _restore_bytes(self.holder, value)
        elif isinstance(member, types.MemberDescriptorType):
            member.__delete__(self.holder) if value is MISSING else member.__set__(
                self.holder, value
            )
        elif isinstance(self.owner, type):
            name = self.key
            delattr(self.owner, name) if value is MISSING else setattr(self.owner, name, value)


new_slot: Callable[[tuple[Kind, Any, Any, str, Any, Slot | None]], Slot]
new_slot = cast(Any, functools.partial(tuple.__new__, Slot))
"""`Slot(*fields)` in half the time."""

_ENVIRONMENT: object = vars(os.environ)["_data"]
"""The dict that `os.environ` reads; C code and other processes have their own."""


class Unchanging(dict[str, Any]):
    """A dict that stays as it was made, so that no recording checks its items."""


_KINDS = (OrderedDict, dict, list, deque, set, bytearray, arrays.array)


def builtin_kind(container: object) -> Any:
    """Return the builtin class of a container: a user's class may override its methods."""
    own = type(container)
    if own is dict or own is list or own is OrderedDict:  # nearly all
        return own
    return next((kind for kind in _KINDS if isinstance(container, kind)), own)


def _restore_bytes(array: Any, content: bytes) -> None:
    """Restore the bytes of an array or `bytearray`, unless a held view fixes another size."""
    if isinstance(array, bytearray | arrays.array):
        former = content if isinstance(array, bytearray) else arrays.array(array.typecode, content)
        kind = builtin_kind(array)
        with suppress(BufferError):
            kind.__setitem__(array, slice(None), former)
        return
    view = memoryview(array)
    if view.nbytes != len(content) or view.readonly or "O" in view.format:
        return
    if view.c_contiguous:
        view.cast("B")[:] = content
    else:  # numpy's
        array[...] = type(array)(array.shape, array.dtype, content)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


function_of, arguments_of, keywords_of = map(operator.attrgetter, ("func", "args", "keywords"))
"""Readers of the parts of a `functools.partial`, which its `__setstate__` replaces."""
code_of = operator.attrgetter("__code__")
defaults_of = operator.attrgetter("__defaults__")
keyword_defaults_of = operator.attrgetter("__kwdefaults__")
"""Readers of the parts of a function, which can be replaced in place."""
factory_of = operator.attrgetter("default_factory")
requires_grad = operator.attrgetter("requires_grad")
order_of = operator.attrgetter("__mro__")
"""A reader of the tuple that Python makes anew when the bases of a class are replaced."""


def is_same_method(a: object, b: object) -> bool:
    """Return whether two methods bind the same function to the same object. Each access to a method
    makes a new object."""
    if not (isinstance(a, METHODS) and type(a) is type(b)):
        return False
    # Methods of C are equal if they are the same; methods of Python may run `__eq__` of the user's.
    same = cast(Any, a).__func__ is cast(Any, b).__func__ if type(a) is types.MethodType else a == b
    return same and cast(Any, a).__self__ is cast(Any, b).__self__


class _Description(NamedTuple):
    """A reader of all facts of the tensor in a slot, except its elements."""

    kind: Kind
    key: Any

    def __call__(self, holder: Any) -> object:
        return description(Slot(self.kind, holder, self.key, "", None).read())


def description(t: object) -> object:
    """Return a text with all facts of a tensor, except its elements; `MISSING` if it is lazy."""
    return text_of_facts(facts_of(t)) if isinstance(t, Tensor) else "no tensor"


Facts = tuple[type, torch.dtype, torch.device, bool, torch.Size, tuple[int, ...] | None]


def facts_of(t: Tensor) -> Facts | None:
    """Return the facts in the `description` of a tensor; None if it is lazy."""
    kind = type(t)
    if kind is not Tensor and kind is not Parameter and is_lazy(t):
        return None
    strides = t.stride() if t.layout is torch.strided and not t.is_nested else None
    shape = torch.Size() if t.is_nested else t.shape
    return kind, t.dtype, t.device, t.requires_grad, shape, strides


@functools.lru_cache(maxsize=4096)
def text_of_facts(facts: Facts | None) -> object:
    """Return the description of a tensor with these facts."""
    if facts is None:
        return MISSING
    *others, shape, strides = facts
    return f"{' '.join(map(str, others))} {tuple(shape)} {strides}"


def description_slot(slot: Slot) -> Slot:
    """Return a slot whose content describes the tensor in a slot, whichever tensor it is."""
    name = f"what tensor `{slot.name}` is"
    return Slot("contents", slot.holder, _Description(slot.kind, slot.key), name, None)


def description_id(key: tuple[int, object], kind: Kind) -> tuple[int, object]:
    """Return the id of the slot of a description, from the id and the kind of the tensor's."""
    return key[0], _Description(kind, key[1])


def class_of(value: object) -> tuple[Slot, object]:
    """Return the slot of an object's class, and the class."""
    kind = type(value)
    name = f"the class of a `{kind.__qualname__}`"
    return new_slot(("of", value, type, name, value, None)), kind


def bases_of(kind: type) -> tuple[Slot, object]:
    """Return the slot of a class's bases, and its method resolution order."""
    return Slot("of", kind, order_of, f"the bases of `{kind.__qualname__}`", None), kind.__mro__


class InnerTensor(NamedTuple):
    """A reader of an inner tensor of a compound tensor."""

    name: str

    def __call__(self, t: Any) -> object:
        return getattr(t, self.name)


class ThreadAttribute(NamedTuple):
    """A reader of an attribute that a thread-local object has in the thread that asks."""

    name: str

    def __call__(self, local: threading.local) -> object:
        return vars(local)[self.name]

    def write(self, local: threading.local, value: object) -> None:
        if value is MISSING:
            vars(local).pop(self.name, None)
        else:
            vars(local)[self.name] = value


def names_in_thread(local: threading.local) -> str:
    """Return the names of the attributes that a thread-local object has in this thread."""
    return str(list(vars(local)))


def thread_in(module: types.ModuleType) -> object:
    """Return the thread that runs, as the module `threading` knows it."""
    return module.current_thread()


def is_leaf(t: Tensor) -> bool:
    """Return whether a tensor is a leaf. Autograd raises for a chunk after a write to its base."""
    try:
        return t.is_leaf
    except RuntimeError:
        return False


def node_of(t: Tensor) -> object:
    """Return the node that made a tensor, or None; None for a view that autograd refuses, too."""
    try:
        return t.grad_fn
    except RuntimeError:
        return None


def gradient_of(t: Tensor) -> Tensor:
    """Return a leaf's gradient. Raises where there is none: the slot is empty."""
    if not is_leaf(t) or t.grad is None:
        raise LookupError
    return t.grad


_ATTRIBUTES: dict[object, str] = {
    gradient_of: "grad",
    code_of: "__code__",
    defaults_of: "__defaults__",
    keyword_defaults_of: "__kwdefaults__",
    factory_of: "default_factory",
    attributes_of: "__dict__",
    type: "__class__",
}
"""Readers of attributes that Python code may set."""


def is_attribute(reader: object) -> bool:
    """Return whether a reader reads an attribute that Python code may set."""
    return reader in _ATTRIBUTES


def has_gradient(t: Tensor) -> bool:
    return read_gradient(t) is not None


_base: Any = torch._C.TensorBase
read_gradient: Callable[[Tensor], Tensor | None] = _base.grad.__get__
"""`leaf.grad` without its Python wrapper: 0.05 us."""


def same_gradients(gradients: Sequence[tuple[Any, Tensor | None]]) -> Callable[[], bool]:
    """Return a check that each leaf's `.grad` is the expected object or None: 0.05 us for each."""
    leaves = [leaf for leaf, _ in gradients]
    expected = [gradient for _, gradient in gradients]
    return lambda: all(map(operator.is_, map(read_gradient, leaves), expected))

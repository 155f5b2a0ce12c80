"""The emulated device's driver: the tape, over memory that is a device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from onelaunch.driver.protocol import DevicePool, Rewind
from onelaunch.driver.select import register
from onelaunch.driver.tape.driver import TapeDriver
from onelaunch.driver.tape.rewind import TapeRewind
from onelaunch.testing.device import TapeTensor, register_device
from onelaunch.testing.dynamo import trace_with_dynamo
from onelaunch.testing.memory import EmulatedPool
from onelaunch.testing.storage import NAME, apart, tensor_over

T = TypeVar("T")


def install() -> None:
    """Add the emulated device ``"tape"`` to torch and to onelaunch, for the rest of the process.

    Call it before the first backward of the process, since autograd counts the devices only once,
    and not beside a GPU: torch takes the emulated device for its accelerator from then on. It takes
    over torch's PrivateUse1 backend. Starts no CUDA; a second call does nothing.

    Example:
        >>> import torch, onelaunch.testing
        >>> onelaunch.testing.install()
        >>> torch.ones(2, device="tape") * 2
        tensor([2., 2.], device='tape:0')
    """
    register_device()
    trace_with_dynamo()
    register(NAME, EmulatedDriver)


class EmulatedDriver(TapeDriver):
    """A driver that records and replays on the emulated device; see `Driver` for each method."""

    tensor_class: type[Tensor] = TapeTensor
    compiler: Literal["inductor", "aten"] | None = "aten"

    def over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> Tensor:
        """Make a tensor over a storage of the device, or of the host."""
        if storage.device.type != NAME:
            return super().over(storage, dtype, size, stride, offset)
        return tensor_over(TapeTensor, storage, dtype, size, stride, offset)

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def new_pool(self, device: torch.device, beside: DevicePool | None = None) -> EmulatedPool:
        return EmulatedPool()

    def foresee(
        self, run: Callable[[], T], device: torch.device, staged: Sequence[int]
    ) -> tuple[T, int]:
        with apart() as arena:
            buffers = [arena.allocate(nbytes) for nbytes in staged]
            result = run()
            del buffers
        nbytes = arena.reserved_bytes
        arena.trim()
        return result, nbytes

    def rewind(self, device: torch.device, after: Rewind | None = None) -> TapeRewind:
        return TapeRewind([torch, getattr(torch, NAME)], after)

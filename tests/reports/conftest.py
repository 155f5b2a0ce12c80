"""The devices of the contract, for programs that others had trouble with."""

from tests.device.conftest import device, fresh, rand, settled

__all__ = ["device", "fresh", "rand", "settled"]

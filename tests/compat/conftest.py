"""The devices of the contract, for interfaces that promise the same."""

from tests.device.conftest import device, rand

__all__ = ["device", "rand"]

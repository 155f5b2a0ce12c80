"""Streams for recordings that a backward follows."""

from __future__ import annotations

import torch

from onelaunch.driver.protocol import Driver

_spares: dict[tuple[str, torch.device], list[object]] = {}


def spare_streams(driver: Driver, device: torch.device) -> list[object]:
    """Streams of recordings that are gone: the device would keep each for ever."""
    return _spares.setdefault((driver.name, device), [])


def take_stream(driver: Driver, device: torch.device) -> object:
    """A stream that nobody else works on. To give it back, append it to `spare_streams`."""
    spare = spare_streams(driver, device)
    return spare.pop() if spare else driver.new_stream(device)

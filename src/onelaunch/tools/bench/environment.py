"""The machine of a measurement: hardware, driver and versions, to stamp results with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

Environment = dict[str, str | None]


def environment() -> Environment:
    """List the hardware, versions and settings behind a figure. Starts CUDA if there is a GPU."""
    gpu = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if gpu else None
    return {
        "onelaunch": version("onelaunch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "gpu": gpu_text() if gpu else None,
        "driver": driver_version() if gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
        "cuda-bindings": version("cuda-bindings"),
        "triton": version("triton"),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn TF32": _flag(torch.backends.cudnn.allow_tf32) if gpu else None,
        "cudnn benchmark": _flag(torch.backends.cudnn.benchmark) if gpu else None,
    }


def machine_of(found: Mapping[str, str | None]) -> str:
    """Name the machine of an environment, and the release of torch."""
    where = found.get("gpu") or found.get("cpu") or "this machine"
    return f"{where}, torch {found.get('torch')}"


def known(found: Mapping[str, str | None]) -> tuple[tuple[str, str], ...]:
    """Return the known parts of an environment."""
    return tuple((name, value) for name, value in found.items() if value is not None)


def version(package: str) -> str | None:
    """Look up the installed version of a distribution; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_text() -> str:
    """Name the current GPU, with its compute capability and memory."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name} (sm {capability}, {properties.total_memory / 2**30:.0f} GiB)"


def driver_version() -> str | None:
    """Read the kernel driver's version from nvidia-smi or the kernel module."""
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.splitlines()[0].strip()
    module = Path("/sys/module/nvidia/version")
    return module.read_text().strip() if module.exists() else None


def _flag(on: bool) -> str:
    return "on" if on else "off"


def _cpu() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

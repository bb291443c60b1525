"""What of a machine decides which way of compiling is the fastest on it."""

from __future__ import annotations

import importlib.metadata
import platform
from contextlib import suppress

import torch


def machine_of(device: torch.device) -> dict[str, str]:
    """Return what of this machine decides how fast compiled code is, and what compiles it."""
    machine = {
        "device": _processor(),
        "torch": f"{torch.__version__} {str(torch.version.git_version)[:12]}",
        "triton": _version_of("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "python": platform.python_version(),
        "precision": _precision(device),
    }
    if device.type == "cpu":
        machine["capability"] = torch.backends.cpu.get_cpu_capability()
        machine["threads"] = str(torch.get_num_threads())
    elif device.type == "cuda":
        machine["device"] = torch.cuda.get_device_name(device)
        machine["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    else:
        machine["device"] = device.type
    return machine


def _precision(device: torch.device) -> str:
    """Return the number formats in force, in which another way may be the fastest and right."""
    products = "mixed settings"
    with suppress(RuntimeError):  # torch's old and new switches were used side by side
        products = torch.get_float32_matmul_precision()
    kind = device.type
    autocast = f"{torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else "none"
    exact = torch.are_deterministic_algorithms_enabled()
    return f"autocast {autocast}, matmul {products}, deterministic {exact}"


def _version_of(*distributions: str) -> str:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

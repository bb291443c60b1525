"""What of a machine decides which way of compiling is the fastest on it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

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


def settings_hash() -> str:
    """Return a hash of the compiler's settings, as far as they are part of its own keys."""
    found: dict[str, Any] = {}
    for name in ("torch._inductor", "torch._functorch"):
        config = importlib.import_module(f"{name}.config")
        try:
            settings = config.save_config_portable(ignore_private_configs=False)
        except (AttributeError, TypeError):
            continue  # this torch has another form of it; its own keys have the settings anyway
        short = name.removeprefix("torch._")
        found.update({f"{short}.{k}": _lasting(v) for k, v in settings.items()})
    text = json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _lasting(value: Any) -> Any:
    """Return a setting in a form that is the same in every process."""
    if isinstance(value, Mapping):
        return sorted((str(k), _lasting(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_lasting(v), sort_keys=True) for v in value)
    if isinstance(value, list | tuple):
        return [_lasting(v) for v in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"

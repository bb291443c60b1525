"""Which device a step runs on, and what that device can do.

Hardware is probed here and nowhere else, at construction, never at import.
"""

from __future__ import annotations

import torch
from torch import nn

from torchfast._core.arguments import suggestion
from torchfast._core.errors import UnsupportedDeviceError

_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")

# Dense bf16 and fp16 matrix peak in FLOP/s, from the vendors' data sheets (SXM parts, without
# sparsity). The name is matched as a substring of torch.cuda.get_device_name().
_PEAK_16BIT_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("L40S", 362e12),
    ("A100", 312e12),
    ("A10G", 70e12),
)


def is_capturing() -> bool:
    """Whether what runs now on the current stream is captured into a graph, and not computed."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # torch was built without CUDA
        return False


def drain(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for; nothing on the CPU."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def resolve_device(device: object, model: nn.Module) -> torch.device:
    """Return the device to train on, with its index; ``None`` means where the parameters are.

    Raises:
        TypeError: ``device`` is neither None, a string, an int nor a ``torch.device``.
        ValueError: No such device type, or no device of that index; or no parameter to ask.
        UnsupportedDeviceError: The type exists but this machine or torch build has none.
    """
    if device is None:
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError(
                f"model has no parameters ({type(model).__name__}), so there is nothing to train; "
                "pass a model with at least one nn.Parameter"
            )
        return first.device
    return check_device(device, data=False)


def check_device(device: object, *, data: bool = True) -> torch.device:
    """Return ``device``, with its index, if this machine has it.

    With ``data`` it is where batches go, and may be the meta device, on which nothing can train.

    Raises:
        TypeError: Neither a string, an int nor a ``torch.device``.
        ValueError: No such device type, or no device of that index.
        UnsupportedDeviceError: The type exists but this machine or torch build has none.
    """
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(
            "device must be a string such as 'cuda:0', an int or a torch.device, "
            f"got {device!r} ({type(device).__name__})"
        )
    parsed = _parse(device)
    if data:
        return parsed if parsed.type == "meta" else _existing(parsed, "")
    return _existing(parsed, ", or leave device out to train where the model's parameters are")


def _parse(device: str | int | torch.device) -> torch.device:
    if isinstance(device, str):
        kind = device.partition(":")[0]
        if kind == "gpu":
            raise ValueError(f"device={device!r} is not a device type; did you mean 'cuda'?")
        if kind not in _DEVICE_TYPES:
            raise ValueError(
                f"device={device!r} is not a device; accepted types are {list(_DEVICE_TYPES)}"
                f"{suggestion(kind, _DEVICE_TYPES)}"
            )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a device; write it as 'cpu', 'cuda' or 'cuda:0'"
        ) from error


def _existing(device: torch.device, otherwise: str) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    backend = getattr(torch, device.type, None)
    if backend is None or not backend.is_available():
        raise UnsupportedDeviceError(
            f"device={str(device)!r} was asked for, but this machine or torch build "
            f"({torch.__version__}) has no {device.type}; use device='cpu'{otherwise}"
        )
    count = backend.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(
            f"device={str(device)!r} does not exist; this machine has "
            f"{[f'{device.type}:{i}' for i in range(count)]}"
        )
    index = backend.current_device() if device.index is None else device.index
    return torch.device(device.type, index)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products run on units of their own rather than being emulated."""
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_amx_tile_supported())
    return device.type == "xpu"


def has_tf32(device: torch.device) -> bool:
    """Whether fp32 matrix products can run on the tf32 units."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def float8_obstacle(device: torch.device) -> str | None:
    """Return why a device cannot multiply in float8, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"this step runs on {device.type if device.type != 'cuda' else 'ROCm'}"
    found = torch.cuda.get_device_capability(device)
    if found >= (8, 9):
        return None
    return f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}"


def peak_flops(device: torch.device) -> float | None:
    """Return the data sheet's dense 16-bit FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_16BIT_FLOPS if part in name), None)


def memory_peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that tensors held at once on ``device``; None where unknown."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

"""What a device reaches when nothing holds it back, measured on the spot.

The figures of a data sheet hold for a device at full clock in a cool room. What a kernel can be
compared with is what this device does now: a product of large square matrices in each type, and a
copy within its memory. Each is run a few times, and the best run counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, final

import torch

from torchfast._core.errors import UnsupportedDeviceError
from torchfast._core.fp32_switches import fp32_precision

_SIZE: Final = 8192
_COPY_BYTES: Final = 1 << 30
_RUNS: Final = 5
_FLOAT8: Final = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
# From this compute capability on a device has float8.
_FLOAT8_CAPABILITY: Final = (8, 9)
# The matrices and the copy must fit beside the model that is being trained.
_MOST_OF_FREE: Final = 0.25


@final
@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The most that a device did.

    Attributes:
        device: Its name.
        flops: Floating-point operations a second, by type of the inputs: ``"float32"``,
            ``"tf32"``, ``"bfloat16"``, ``"float16"``, and where the device has float8
            ``"float8_e4m3fn"`` and ``"float8_e5m2"``, which is multiplied by the former.
        bytes_a_second: Bytes read and written a second by a copy within the device.
    """

    device: str
    flops: dict[str, float]
    bytes_a_second: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def measure_ceilings(device: torch.device | str | int | None = None) -> Ceilings:
    """Measure what a CUDA device reaches; takes about a second.

    Args:
        device: A CUDA device, the current one by default.

    Raises:
        UnsupportedDeviceError: It is not a CUDA device, or there is none.

    Synchronizes: Yes, at each measurement.
    """
    if not torch.cuda.is_available():
        raise UnsupportedDeviceError(
            "ceilings are measured on a CUDA device, and this machine or torch build has none"
        )
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda":
        raise UnsupportedDeviceError(f"ceilings are measured on a CUDA device, got {str(where)!r}")
    free, _ = torch.cuda.mem_get_info(where)
    room = int(free * _MOST_OF_FREE)
    size = _SIZE
    while 3 * 4 * size * size > room and size > 512:
        size //= 2
    flops: dict[str, float] = {}
    with torch.cuda.device(where):
        for name, dtype, allowed in (
            ("float32", torch.float32, "ieee"),
            ("tf32", torch.float32, "tf32"),
            ("bfloat16", torch.bfloat16, "ieee"),
            ("float16", torch.float16, "ieee"),
        ):
            with fp32_precision(allowed, "cuda"):
                one = torch.randn(size, size, device=where, dtype=dtype)
                product = partial(torch.mm, one, one, out=torch.empty_like(one))
                flops[name] = 2.0 * size**3 / _best_s(product)
                del one, product
        if torch.cuda.get_device_capability(where) >= _FLOAT8_CAPABILITY:
            for name, dtype in _FLOAT8.items():
                flops[name] = 2.0 * size**3 / _best_s(float8_product(size, dtype, where))
        num = max(1 << 20, min(_COPY_BYTES, room // 2))
        source = torch.empty(num, dtype=torch.uint8, device=where)
        target = torch.empty_like(source)
        seconds = _best_s(lambda: target.copy_(source))
    return Ceilings(
        device=torch.cuda.get_device_name(where), flops=flops, bytes_a_second=2.0 * num / seconds
    )


def float8_product(size: int, dtype: torch.dtype, where: torch.device) -> Callable[[], Any]:
    """Return what multiplies square matrices, one of a float8 type by one of ``float8_e4m3fn``.

    The second is stored by columns and the sums are kept short, as a device is fastest.
    """
    one = torch.randn(size, size, device=where).to(dtype)
    other = torch.randn(size, size, device=where).to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device=where)
    return partial(
        torch._scaled_mm, one, other, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _best_s(work: Callable[[], Any]) -> float:
    work()  # libraries choose their kernel at the first call
    times: list[float] = []
    for _ in range(_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return max(min(times), 1e-9)

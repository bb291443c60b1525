"""What a progress line shows of a record, and how it writes the numbers."""

import math
from collections.abc import Mapping
from typing import Final, SupportsFloat

_SHOWN: Final = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "items_per_s",
    "step_ms",
    "memory_bytes",
    "eta_s",
)
# A narrow line loses whole fields, in this order: half a number would be a wrong number.
_FIRST_TO_GO: Final = (
    "grad_norm",
    "memory_bytes",
    "step_ms",
    "lr",
    "items_per_s",
    "eta_s",
    "loss",
)


def fields_of(record: Mapping[str, object], total_steps: int | None, unit: str) -> dict[str, str]:
    """Return what is shown of a record, in the order in which it is shown."""
    fields: dict[str, str] = {}
    for name in _SHOWN:
        value = record.get(name)
        if name == "step_ms" and value is not None:
            if not isinstance(value, Mapping):
                raise TypeError(f"record['step_ms']={value!r}: expected a mapping with 'p50'")
            value = value.get("p50")
        if name == "lr" and isinstance(value, list | tuple):
            if rates := [_number(name, rate) for rate in value]:
                lowest, highest = _rate(min(rates)), _rate(max(rates))
                fields[name] = f"lr {lowest}" + f"..{highest}" * (highest != lowest)
        elif value is not None:
            fields[name] = _field(name, _number(name, value), total_steps, unit)
    return fields


def joined(fields: Mapping[str, str], width: int | None = None) -> str:
    """Join fields into a line of at most `width` characters, if that is given."""
    left = dict(fields)
    line = "  ".join(left.values())
    if width is None:
        return line
    for name in _FIRST_TO_GO:
        if len(line) > width and name in left and len(left) > 1:
            del left[name]
            line = "  ".join(left.values())
    return line[: max(width, 0)]


def _number(name: str, value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"record[{name!r}]={value!r}: expected a number or None")
    return float(value)


def _field(name: str, value: float, total_steps: int | None, unit: str) -> str:
    match name:
        case "step":
            return f"step {value:.0f}" + (f"/{total_steps}" if total_steps is not None else "")
        case "loss":
            return f"loss {_significant(value, 4)}"
        case "lr":
            return f"lr {_rate(value)}"
        case "grad_norm":
            return f"grad {_significant(value, 3)}"
        case "items_per_s":
            return f"{_scaled(value, ('', 'k', 'M', 'G', 'T'))} {unit}/s"
        case "step_ms":
            return f"{_short(value)} ms"
        case "memory_bytes":
            return _scaled(value, (" B", " kB", " MB", " GB", " TB"))
        case _:
            return f"eta {_clock(value)}"


def _significant(value: float, digits: int) -> str:
    """Keep trailing zeros, so that the line does not jump: ``2.300``."""
    return f"{value:#.{digits}g}".rstrip(".")


def _rate(value: float) -> str:
    mantissa, e, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}" if e else mantissa


def _short(value: float) -> str:
    if abs(value) < 0.995:
        return f"{value:.2g}"
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def _scaled(value: float, suffixes: tuple[str, ...]) -> str:
    # 999.5 and not 1000: what would round to 1000 belongs to the next unit.
    index = 0
    while math.isfinite(value) and abs(value) >= 999.5 and index < len(suffixes) - 1:
        value /= 1000
        index += 1
    return f"{_short(value)}{suffixes[index]}"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    minutes, second = divmod(max(round(seconds), 0), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"

"""What an entry of the compile cache belongs to: the work that was compiled, and the machine.

The key decides which file is opened, not what is used from it: torch looks up each graph by a hash
of its own (the graph, the settings, its sources), and what does not fit is not found. So too broad
a key costs a load that is of no use, too narrow a key a compile; a wrong result comes of neither.

The facts stand in the file's header in plain text. The name of the file has two hashes: of the
facts of the work, and of those of the machine. So of an entry that is not for this machine it can
be told what differs.

Of the settings, those of inductor and of functorch count that are part of torch's own keys. What
Dynamo does is not in this cache, and its ``config.get_hash()`` is another in every process, since
it prints sets.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn

from torchfast._core.fingerprint import batch_signature, model_fingerprint
from torchfast.compiler.machine import settings_hash

_FORMAT: Final = "1"
_TRITON: Final = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


@final
@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """What an entry belongs to.

    Attributes:
        work: What is compiled, as facts in plain text.
        machine: What it is compiled on and with, as facts in plain text.
    """

    work: Mapping[str, str]
    machine: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of the file: the hash of the work, then that of the machine."""
        return f"entry-{_hash(self.work)}-{_hash(self.machine)}.cache"

    @property
    def work_prefix(self) -> str:
        """How the names of all entries of this work begin, on whatever machine."""
        return f"entry-{_hash(self.work)}-"


def store_key(
    model: nn.Module,
    *,
    batch: object = None,
    options: object = None,
    plan: object = None,
    device: torch.device | None = None,
) -> StoreKey:
    """Return the key of a model on this machine.

    To be asked once, before the model is compiled, and used for loading and for saving: compiling
    may change what a module looks like.

    Args:
        model: The model; the values of its weights do not matter.
        batch: A batch such as it will be given; left out, one entry serves all batches of the
            model, and grows with the shapes.
        options: How it is compiled: a dataclass, a mapping or plain values.
        plan: What else is done to it, likewise.
        device: Where it runs; where its parameters are by default. Its index counts, since
            compiled code names the device: ranks that each see one GPU share entries.

    Raises:
        TypeError: ``model`` is no module, or the options hold what has no lasting text, such as a
            lambda.

    Synchronizes: Never.

    Example:
        >>> key = store_key(nn.Linear(2, 3), batch=torch.zeros(4, 2), options={"mode": "default"})
        >>> key.work["batch"], key.work["options"]
        ('float32[4, 2] cpu', '{"mode": "default"}')
        >>> key.name == store_key(nn.Linear(2, 3)).name
        False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__})")
    work = {
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model": model_fingerprint(model),
        "batch": "any" if batch is None else batch_signature(batch),
        "options": _canonical("options", options),
        "plan": _canonical("plan", plan),
    }
    if device is None:
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
    return StoreKey(work=work, machine=machine_facts(device))


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return what compiled code depends on beside the model: versions, device, settings."""
    facts = {
        "format": _FORMAT,
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version),
        "triton": _triton_version(),
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "settings": settings_hash(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device_name"] = str(properties.name)
        facts["device_capability"] = str(
            getattr(properties, "gcnArchName", "")
            if torch.version.hip
            else f"{properties.major}.{properties.minor}"
        )
    else:
        # Code for a CPU is built for this very one.
        facts["device_name"], facts["device_capability"] = _cpu()
    return facts


def _hash(facts: Mapping[str, str]) -> str:
    text = json.dumps(dict(facts), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _triton_version() -> str:
    # The package's own version is not asked: importing it may look for a driver.
    from importlib.metadata import PackageNotFoundError, version

    for name in _TRITON:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "none"


def _cpu() -> tuple[str, str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return platform.processor() or "unknown", "unknown"
    first: dict[str, str] = {}
    for name, _, value in lines:
        first.setdefault(name.strip(), value.strip())
    flags = first.get("flags", first.get("Features", ""))
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]
    return first.get("model name", platform.machine()), digest


def _canonical(name: str, value: object) -> str:
    """Return options as JSON whose text does not depend on order or process."""

    def other(found: Any) -> Any:
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
            return {type(found).__name__: fields}
        if isinstance(found, Mapping):
            return {str(key): item for key, item in found.items()}
        if isinstance(found, set | frozenset):
            return sorted(map(str, found))
        if isinstance(found, torch.dtype | torch.device | torch.Size):
            return str(found)
        if isinstance(found, os.PathLike):
            return os.fsdecode(os.fspath(found))
        if isinstance(found, functools.partial):
            return [found.func, found.args, found.keywords]
        text = getattr(found, "__qualname__", "<")
        if "<" not in text:
            return f"{found.__module__}.{text}"
        raise TypeError(
            f"{name} holds {found!r} ({type(found).__name__}), which has no text that lasts beyond "
            "this process; give plain values, or functions that have a name"
        )

    return json.dumps(value, default=other, sort_keys=True)

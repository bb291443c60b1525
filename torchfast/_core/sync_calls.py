"""The calls of torch that make the host wait for the device, and when they do.

Each is told by its arguments, before it runs: ``x[mask]`` waits and ``x[0]`` does not, a copy from
pinned memory with ``non_blocking=True`` does not and one from any other memory does. Where the
arguments leave it open, the answer is `PERHAPS`, and torch's own check says what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# How sure it is that a call waits; 0 is a call that does not.
NO, PERHAPS, SURE = 0, 1, 2
# A call that reads numbers on the CPU, to check them, and none on CUDA.
UNHEARD = -1

Arguments = tuple[Any, ...]
Options = Mapping[str, Any]
Judge = Callable[[Arguments, Options, frozenset[str]], int]

_MASKS = (torch.bool, torch.uint8)
_ON_DEVICE = "keep it a tensor and read it after the step, at a log step at most"
_REMEDIES = {
    "item": _ON_DEVICE,
    "float": _ON_DEVICE,
    "int": _ON_DEVICE,
    "index": "keep sizes and positions as Python ints, or index with a tensor of one dimension",
    "bool": "choose with torch.where, or test what the host knows (shapes, step counts)",
    "print": "print after the step, or every so many steps",
    "cpu": "keep it on the device, or copy it into pinned memory with non_blocking=True and read "
    "it some steps later",
    "numpy": "use the torch function of the same name, on the device",
    "tolist": _ON_DEVICE,
    "nonzero": "keep the size fixed: torch.where with three arguments, or a product with the mask",
    "boolean mask": "keep the size fixed: torch.where, a multiplication by the mask, masked_fill, "
    "a loss's ignore_index",
    "unique": "compute it in the loader, where the numbers are on the host",
    "bincount": "torch.zeros(n).scatter_add_ with a fixed n, or compute it in the loader",
    "compare": "compare on the device (a == b).all() and read it after the step",
    "repeat_interleave": "give output_size=",
    "pageable copy": "pin the memory (DataLoader(pin_memory=True), Trainer.prefetch) and copy with "
    "non_blocking=True",
    "blocking copy": "copy with non_blocking=True, and read what arrives on the host only after an "
    "event",
    "save": "save every so many steps, from a copy on the host (AsyncCheckpointer)",
    "linalg": "use the form without a check where there is one (torch.linalg.inv_ex, cholesky_ex, "
    "solve_ex)",
    "synchronize": "take it out; torch orders what runs on one stream, and "
    "stream.wait_stream orders two",
    "stream wait": "let the other stream wait: stream.wait_stream(...)",
    "event wait": "let a stream wait: stream.wait_event(event)",
    "other": "keep the values on the device, and make constants on it once",
}


class SyncCall(NamedTuple):
    """A call that may wait.

    Attributes:
        owner: The class or module that it is an attribute of.
        name: Its name there.
        kind: What a report calls it.
        judge: Says from the arguments whether it waits.
        is_in_graphs: Compiled code is full of it, in its form that does not wait, and would be
            compiled again where it is replaced. On CUDA torch's own check finds it.
        reads_itself: It is a method that waits for its own tensor, if that is on the device.
    """

    owner: Any
    name: str
    kind: str
    judge: Judge
    is_in_graphs: bool = False
    reads_itself: bool = False


def remedy_for(kind: str) -> str:
    """Return what to do instead."""
    return _REMEDIES[kind]


def sync_calls() -> list[SyncCall]:
    """Return the calls that this torch has and that can be listened to."""
    calls = [
        SyncCall(Tensor, name, kind, _first, reads_itself=True) for name, kind in _READS.items()
    ]
    calls += [
        SyncCall(owner, name, kind, _first)
        for name, kind in _SIZES.items()
        for owner in (Tensor, torch)
    ]
    calls += [SyncCall(torch.linalg, name, "linalg", _checked) for name in _CHECKED]
    calls += [
        SyncCall(torch, "where", "nonzero", _where, is_in_graphs=True),
        SyncCall(Tensor, "__getitem__", "boolean mask", _read_by_index),
        SyncCall(Tensor, "__setitem__", "boolean mask", _write_by_index),
        SyncCall(Tensor, "repeat_interleave", "repeat_interleave", _repeats),
        SyncCall(torch, "repeat_interleave", "repeat_interleave", _repeats),
        SyncCall(Tensor, "to", "blocking copy", _moves),
        SyncCall(Tensor, "cuda", "blocking copy", _moves_to_device),
        SyncCall(Tensor, "copy_", "blocking copy", _copies),
        SyncCall(Tensor, "type", "blocking copy", _becomes),
        SyncCall(Tensor, "new_tensor", "pageable copy", _makes_like),
        SyncCall(torch, "tensor", "pageable copy", _makes),
        SyncCall(torch, "as_tensor", "pageable copy", _makes),
        SyncCall(torch, "asarray", "pageable copy", _makes),
        SyncCall(torch, "save", "save", _saves),
        SyncCall(torch.cuda, "synchronize", "synchronize", _always),
        SyncCall(torch.accelerator, "synchronize", "synchronize", _always),
        SyncCall(torch.cuda.Stream, "synchronize", "stream wait", _always),
        SyncCall(torch.cuda.Event, "synchronize", "event wait", _always),
    ]
    calls += [
        SyncCall(owner, name, "other", _on_host, is_in_graphs=True)
        for name in _CHECKED_ON_HOST
        for owner in (Tensor, torch)
    ]
    return [call for call in calls if hasattr(call.owner, call.name)]


_READS = {
    "item": "item",
    "__float__": "float",
    "__int__": "int",
    "__index__": "index",
    "__bool__": "bool",
    "__repr__": "print",
    "__format__": "print",
    "cpu": "cpu",
    "numpy": "numpy",
    "tolist": "tolist",
}
# The size of the result, or the answer itself, depends on the numbers.
_SIZES = {
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "boolean mask",
    "unique": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "compare",
    "allclose": "compare",
    "is_nonzero": "compare",
}
# No operator beneath them can be told by what it is for; sync_net has the others.
_CHECKED_ON_HOST = ("quantile", "nanquantile", "tensor_split")
_CHECKED = ("inv", "cholesky", "solve", "eigh", "eigvalsh", "svd", "lstsq")


def _always(_args: Arguments, _options: Options, _types: frozenset[str]) -> int:
    return SURE


def _first(args: Arguments, options: Options, types: frozenset[str]) -> int:
    tensor = args[0] if args else options.get("input")
    return SURE if is_on(tensor, types) else NO


def _on_host(args: Arguments, options: Options, types: frozenset[str]) -> int:
    return UNHEARD if types == {"cpu"} and _first(args, options, types) else NO


def _checked(args: Arguments, options: Options, types: frozenset[str]) -> int:
    if not _first(args, options, types) and not is_on(options.get("A"), types):
        return NO
    return SURE if "cpu" in types else PERHAPS  # the check runs where the library needs it


def _where(args: Arguments, options: Options, types: frozenset[str]) -> int:
    if len(args) + len(options) != 1:
        return NO
    return SURE if is_on(args[0] if args else options.get("condition"), types) else NO


def _repeats(args: Arguments, options: Options, types: frozenset[str]) -> int:
    if options.get("output_size") is not None:
        return NO
    repeats = options.get("repeats", args[1] if len(args) > 1 else None)
    if len(args) == 1 and not options:
        repeats = args[0]  # torch.repeat_interleave(repeats)
    return SURE if is_on(repeats, types) else NO


def _read_by_index(args: Arguments, _options: Options, types: frozenset[str]) -> int:
    index = args[1] if len(args) > 1 else None
    if type(index) is int:
        return NO  # the most common one first
    found = _index(index, types)
    return found if found and is_on(args[0], types) else NO


def _write_by_index(args: Arguments, _options: Options, types: frozenset[str]) -> int:
    found = _index(args[1], types) if len(args) > 2 else NO
    if not found or not is_on(args[0], types):
        return NO
    value = args[2]
    if not isinstance(value, Tensor) or value.numel() == 1:
        return PERHAPS  # one value for all that the mask selects is a masked_fill, without a wait
    return found


def _index(index: Any, types: frozenset[str]) -> int:
    """Judge what stands between the brackets."""
    if index is None or index is Ellipsis or type(index) is int:
        return NO  # the most common ones first, for this runs at each index
    if type(index) is slice:
        for end in (index.start, index.stop, index.step):
            if end is not None and type(end) is not int and is_on(end, types):
                return SURE
        return NO
    if isinstance(index, Tensor):
        if index.dtype in _MASKS:
            return SURE
        # A single whole number is read, so that it may select.
        return SURE if not index.dim() and is_on(index, types) else NO
    if isinstance(index, tuple):
        found = NO
        for part in index:
            found = max(found, _index(part, types))
        return found
    return PERHAPS if isinstance(index, list) else NO


def _moves(args: Arguments, options: Options, types: frozenset[str]) -> int:
    if len(args) == 2 and not options:
        target = args[1]
        # To where it is: clipping asks that of each gradient.
        if type(target) is torch.dtype or (
            type(target) is torch.device and args[0].device == target
        ):
            return NO
    if "cuda" not in types or not args:
        return NO
    target = options.get("device", options.get("other", args[1] if len(args) > 1 else None))
    if target is None or isinstance(target, torch.dtype):
        return NO
    if isinstance(target, Tensor):
        target = target.device
    kind = target.type if isinstance(target, torch.device) else str(target).partition(":")[0]
    return _transfer(args[0], "cuda" if kind.isdigit() else kind, _non_blocking(args[2:], options))


def _moves_to_device(args: Arguments, options: Options, types: frozenset[str]) -> int:
    if "cuda" not in types or not args:
        return NO
    return _transfer(args[0], "cuda", _non_blocking(args[1:], options))


def _copies(args: Arguments, options: Options, types: frozenset[str]) -> int:
    source = args[1] if len(args) > 1 else options.get("src")
    if "cuda" not in types or not isinstance(source, Tensor):
        return NO
    target = args[0]
    if source.is_cuda and not target.is_cuda and target.is_pinned():
        return NO if _non_blocking(args[2:], options) else SURE
    # Into memory that is not pinned, non_blocking or not, the host waits.
    return _transfer(
        source, target.device.type, not source.is_cuda and _non_blocking(args[2:], options)
    )


def _becomes(args: Arguments, options: Options, types: frozenset[str]) -> int:
    """Judge ``x.type("torch.FloatTensor")``, which names a device along with a dtype."""
    target = options.get("dtype", args[1] if len(args) > 1 else None)
    if target is None or isinstance(target, torch.dtype) or not is_on(args[0], types):
        # From the host to the device it may be.
        if "cuda" not in types or not _names_cuda(target) or args[0].device.type != "cpu":
            return NO
        return _transfer(args[0], "cuda", _non_blocking(args[2:], options))
    if _names_cuda(target) or _non_blocking(args[2:], options):
        return NO
    return SURE


def _names_cuda(target: Any) -> bool:
    return "cuda." in str(target)


def _makes(args: Arguments, options: Options, types: frozenset[str]) -> int:
    """Judge ``torch.tensor(values, device="cuda")``: values of the host, from pageable memory."""
    if "cuda" not in types or not args:
        return NO
    device = options.get("device")
    if isinstance(args[0], Tensor) and (args[0].is_cuda or is_traced(args[0])):
        return NO
    target = torch.get_default_device() if device is None else device
    # torch's own check says whether it has waited: an empty one has not.
    return NO if str(target).startswith(("cpu", "meta")) else PERHAPS


def _makes_like(args: Arguments, options: Options, types: frozenset[str]) -> int:
    if options.get("device") is not None or (len(args) > 1 and isinstance(args[1], Tensor)):
        return _makes(args[1:], options, types)
    if not _first(args, options, types):
        return NO
    return SURE if "cpu" in types else PERHAPS


def _saves(args: Arguments, options: Options, types: frozenset[str]) -> int:
    values = [args[0] if args else options.get("obj")]
    while values:
        value = values.pop()
        if is_on(value, types):
            return SURE
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, nn.Module):
            values += [*value.parameters(), *value.buffers()]
    return NO


def _transfer(source: Tensor, target: str, non_blocking: bool) -> int:
    if is_traced(source):
        return NO  # to ask it whether it is pinned would become a part of the graph
    if target == "cpu" and source.is_cuda:
        return NO if non_blocking else SURE  # torch pins what it makes for a non-blocking copy
    if target == "cuda" and source.device.type == "cpu":
        return NO if non_blocking and source.is_pinned() else SURE
    return NO


def kind_of_copy(call: SyncCall, args: Arguments) -> str:
    """Return the kind of a call; of a copy to the device, whether its source was pageable."""
    if call.kind != "blocking copy":
        return call.kind
    if call.name == "type" and not any(map(_names_cuda, args[1:])):
        return "cpu"
    source = args[1] if call.name == "copy_" and len(args) > 1 else args[0]
    if isinstance(source, Tensor) and source.device.type == "cpu" and not source.is_pinned():
        return "pageable copy"
    return call.kind


def _non_blocking(positional: Arguments, options: Options) -> bool:
    first = next((value for value in positional if isinstance(value, bool)), False)
    return bool(options.get("non_blocking", first))


def is_on(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value is a tensor with numbers on one of these types of device."""
    return isinstance(value, Tensor) and value.device.type in types and not is_traced(value)


def is_traced(tensor: Tensor) -> bool:
    """Whether it is one of those by which the compiler follows the code; it has no values."""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")

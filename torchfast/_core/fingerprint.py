"""What a model and a batch look like to a compiler, as text that is the same in every process.

What is compiled or measured for a model holds for others that only differ in the values of their
weights, and for nothing else. So the fingerprint of a model covers what its code can branch on:

- the classes of its modules, in their places, with the code of their methods;
- shapes, strides, dtypes and device types of parameters and buffers, which of them are one object,
  and which take gradients;
- train or eval, and plain attributes: numbers, strings, dtypes, functions with their code, defaults
  and closures, containers of them, and the fields of configuration objects; of attributes whose
  names begin with an underscore plain values alone; not ``name_or_path``, which tells where weights
  came from.

Not seen: functions that a method calls, global variables, hooks, and what only native code knows.
Values of tensors are not read. No ``id()`` and no ``hash()`` goes into it, both of which are others
in the next process. An attribute or a value of a closure that changes while the model trains, such
as a counter of calls, changes the fingerprint: take it at construction.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchfast._core.proxies import is_dead

DEPTH = 4
LONGEST = 256  # of longer containers only the kind and the length are told
# The file that a model of transformers was loaded from: another one after each checkpoint.
_FROM_WHERE = frozenset(("name_or_path", "_name_or_path"))
# What torch itself keeps in each.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_TOLD_OF_CLOSURES = (
    *(*_PLAIN, torch.device, enum.Enum, type, Tensor),
    *(list, tuple, dict, set, frozenset, types.FunctionType, types.MethodType, functools.partial),
)


def model_fingerprint(module: nn.Module, *, code: bool = True) -> str:
    """Return the SHA-256, in hex, of what a model looks like to a compiler.

    Args:
        module: The model, as it is now.
        code: Also the code of the methods of its classes, torch's own left out. It is that of
            this version of Python.

    Synchronizes: Never.

    Example:
        >>> from torch import nn
        >>> model_fingerprint(nn.Linear(2, 3)) == model_fingerprint(nn.Linear(2, 3))
        True
        >>> model_fingerprint(nn.Linear(2, 3)) == model_fingerprint(nn.Linear(2, 4))
        False
    """
    return digest(model_lines(module, code=code))


def optimizer_fingerprint(optimizer: Optimizer) -> str:
    """Return the SHA-256, in hex, of what an optimizer's update looks like to a compiler.

    It covers its class with the code of its methods, the options of its groups, and what their
    parameters look like and which of them have a gradient. Of learning rates, which schedules
    change, only the type is told.

    Synchronizes: Never.
    """
    return digest(_lines_of_optimizer(optimizer))


def batch_signature(batch: object) -> str:
    """Return the structure of a nested batch with dtypes, shapes and device types, readable.

    Of what is no tensor only the type is told; batches differ in their values.

    Example:
        >>> import torch
        >>> batch_signature({"x": torch.zeros(2, 3), "y": [torch.ones(2).long(), 7]})
        "{'x': float32[2, 3] cpu, 'y': [int64[2] cpu, int]}"
    """
    return _signature(batch, DEPTH * 4)


def digest(lines: Iterable[str]) -> str:
    """Return the SHA-256, in hex, of lines."""
    found = hashlib.sha256()
    for line in lines:
        # The length in front: no text can pass for the end of one line and the start of another.
        data = line.encode("utf-8", "backslashreplace")
        found.update(b"%d:" % len(data) + data)
    return found.hexdigest()


def _lines_of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    yield f"optimizer {_name(type(optimizer))}"
    for base in type(optimizer).__mro__:
        yield from _code_of_class(base)
    for group in optimizer.param_groups:
        yield f"group {len(group['params'])}"
        for name, value in sorted(group.items()):
            if name in ("lr", "initial_lr"):
                yield f"rate {name} {_name(type(value))}"
            elif name not in ("params", "param_names"):
                yield f"option {name} {described(value, DEPTH)}"
        for parameter in group["params"]:
            yield f"parameter {_tensor(parameter)} with gradient {_tensor(parameter.grad)}"


# -- Models ----------------------------------------------------------------------------------------


def model_lines(root: nn.Module, *, code: bool) -> Iterator[str]:
    """Yield what `model_fingerprint` covers."""
    modules: dict[int, int] = {}
    tensors: dict[int, int] = {}
    classes: dict[type, None] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        known = modules.setdefault(id(module), len(modules))
        yield f"module {path} {known} {_name(type(module))}"
        if known != len(modules) - 1:
            continue  # the same object again, told already
        classes.setdefault(type(module))
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                known = -1 if tensor is None else tensors.setdefault(id(tensor), len(tensors))
                yield f"{kind} {name} {known} {_tensor(tensor)}"
        for name, value in sorted(vars(module).items()):
            if _is_told(name) and (not name.startswith("_") or _is_private_and_plain(name, value)):
                yield f"attribute {name} {described(value, DEPTH)}"
    if code:
        for base in dict.fromkeys(base for c in classes for base in c.__mro__):
            yield from _code_of_class(base)


def described(value: Any, depth: int = DEPTH) -> str:
    """Return a plain value as text; of others the class and the plain fields."""
    if is_dead(value):
        return _name(type(value))
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.device):
        return f"device {value.type}"  # which of several alike is no property of the model
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return f"numpy {value.dtype} {value.shape}"
    if isinstance(value, nn.Module):
        return _name(type(value))
    if isinstance(value, type):
        return f"class {_name(value)}"
    if depth == 0:
        return _name(type(value))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial {[described(part, depth - 1) for part in parts]}"
    if callable(value) and hasattr(value, "__qualname__"):
        name = f"function {getattr(value, '__module__', None)}:{value.__qualname__}"
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType):
            return name
        return f"{name} {digest([_function_text(function, depth - 1)])}"
    return f"{_name(type(value))} {_fields(value, depth - 1)}"


def _fields(value: Any, depth: int) -> str:
    if isinstance(value, Mapping):
        if len(value) > LONGEST:
            return f"of {len(value)}"
        return str([(described(k, depth), described(v, depth)) for k, v in value.items()])
    if isinstance(value, set | frozenset):
        return str(sorted(described(v, depth) for v in value) if len(value) <= LONGEST else "")
    if isinstance(value, list | tuple):
        if len(value) > LONGEST:
            return f"of {len(value)}"
        return str([described(v, depth) for v in value])
    fields = sorted(getattr(value, "__dict__", {}).items())
    return str([(name, described(v, depth)) for name, v in fields if _is_told(name)])


def _is_told(name: str) -> bool:
    """Whether a field is a property of the model, and the same in the next process."""
    # A private one may hold a ``hash()``, as transformers' GenerationConfig does.
    return name not in _FROM_WHERE and not (name.startswith("_") and "hash" in name)


def _is_private_and_plain(name: str, value: Any) -> bool:
    return name not in _OF_ALL_MODULES and not is_dead(value) and isinstance(value, _PLAIN)


def _code_of_class(kind: type) -> Iterator[str]:
    if kind is object or kind.__module__.partition(".")[0] in ("torch", "typing", "abc"):
        return  # the version of torch tells theirs
    for name, member in sorted(vars(kind).items()):
        for function in _functions(member):
            yield f"code {_name(kind)}.{name} {_function_text(function, DEPTH - 1)}"


def _functions(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, property):
        members: list[Any] = [member.fget, member.fset]
    else:
        members = [getattr(member, "__func__", member)]
    for function in members:
        while function is not None:
            if isinstance(function, types.FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)


def _function_text(function: types.FunctionType, depth: int) -> str:
    """Return what a function does, with the values that it was made with."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_made_with(cell.cell_contents, depth))
        except ValueError:
            cells.append("empty")
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    told = [_made_with(default, depth) for default in defaults]
    return f"{code_text(function.__code__)} {told} {cells}"


def _made_with(value: Any, depth: int) -> str:
    """Return a value of a closure or a default: any object may stand there, as a logger does."""
    if is_dead(value):
        return _name(type(value))
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, _TOLD_OF_CLOSURES) or dataclasses.is_dataclass(value):
        return described(value, min(depth, 2))
    return _name(type(value))


def code_text(code: types.CodeType) -> str:
    """Return what a function does, without its lines."""
    constants = [
        code_text(c) if isinstance(c, types.CodeType) else described(c, DEPTH)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


# -- Tensors and batches ---------------------------------------------------------------------------


def _tensor(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    if is_lazy(tensor):
        return f"uninitialized {tensor.dtype}"
    grad = "grad" if tensor.requires_grad else "no grad"
    return f"{_name(type(tensor))} {_shape(tensor)} {_strides(tensor)} {grad}"


def _shape(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{[int(size) for size in tensor.shape]} {tensor.device.type}"


def _strides(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return str(tensor.layout)
    return str(tuple(tensor.stride()))


def _signature(value: Any, depth: int) -> str:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if value.is_nested:
            return f"nested {value.dtype} of {value.size(0)} {value.device.type}"
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        if not layout and not value.is_contiguous():
            layout = f" strides {value.stride()}"
        grad = " grad" if value.requires_grad else ""
        return f"{_shape(value)}{layout}{grad}"
    if depth == 0:
        return kind
    if isinstance(value, Mapping):
        items = ", ".join(f"{k!r}: {_signature(v, depth - 1)}" for k, v in value.items())
        return f"{'' if type(value) is dict else kind}{{{items}}}"
    if isinstance(value, list | tuple) or kind == "MicroBatches":
        items = ", ".join(_signature(v, depth - 1) for v in value)
        if type(value) is list:
            return f"[{items}]"
        return f"{'' if type(value) is tuple else kind}({items})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        items = ", ".join(f"{n}={_signature(getattr(value, n), depth - 1)}" for n in names)
        return f"{kind}({items})"
    tensors = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, Tensor)}
    items = ", ".join(f"{n}={_signature(v, depth - 1)}" for n, v in tensors.items())
    return f"{kind}({items})" if tensors else kind


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"

"""Whose a block of memory is: which tensors live on a device, by category and name.

Parameters, gradients, optimizer state, buffers and the batch are known by name. Of what else lives,
Python tells shapes and the operation that made it, as far as a tensor object exists; what only the
autograd graph holds it does not tell. Nothing is computed, and nothing is kept: an owner is an
address and words.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from torchfast._core.batches import tensors
from torchfast._core.storages import plain_parts

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers"
BATCH = "the batch"


@final
@dataclass(frozen=True)
class Owner:
    """A storage that lives, and what it is.

    Attributes:
        address: Where it begins.
        num_bytes: Its size.
        category: Such as ``"parameters"``; empty where only Python knows of it.
        name: Such as ``"encoder.0.weight"``, or the operation that made it.
        form: Shape and dtype, in words, and whether that is a part of the storage.
        view_bytes: What a tensor of that shape takes.
    """

    address: int
    num_bytes: int
    category: str
    name: str
    form: str
    view_bytes: int = 0


def known_owners(
    model: nn.Module,
    optimizer: Optimizer,
    batch: object,
    others: Mapping[str, Iterable[Tensor]],
    device: torch.device,
) -> list[Owner]:
    """Return the storages whose purpose is known, each once.

    Args:
        model: Its parameters, their gradients, its buffers.
        optimizer: Its state.
        batch: What the step was given.
        others: More tensors by category.
        device: Those elsewhere are left out.
    """
    found: dict[int, Owner] = {}
    for category, name, tensor in _known(model, optimizer, batch, others):
        for owner in _owners(category, name, tensor, device):
            first = found.setdefault(owner.address, owner)
            if first.category == owner.category and first.view_bytes < owner.view_bytes:
                found[owner.address] = owner
    return list(found.values())


def living_owners(device: torch.device) -> list[Owner]:
    """Return the storages that some tensor object of Python stands for, the largest view of each.

    Looks at every object that the garbage collector tracks: some hundred milliseconds.
    """
    found: dict[int, Owner] = {}
    for value in gc.get_objects():
        # Not isinstance: an object that claims to be something else may run code of its own.
        if not issubclass(type(value), Tensor):
            continue
        with suppress(Exception):
            operation = value.grad_fn.name() if value.grad_fn is not None else ""
            for owner in _owners("", operation, value, device):
                if found.setdefault(owner.address, owner).view_bytes < owner.view_bytes:
                    found[owner.address] = owner
    return list(found.values())


def _known(
    model: nn.Module,
    optimizer: Optimizer,
    batch: object,
    others: Mapping[str, Iterable[Tensor]],
) -> Iterator[tuple[str, str, Tensor]]:
    names = {id(p): name for name, p in model.named_parameters()}
    parameters: dict[int, Tensor] = {id(p): p for p in model.parameters()}
    for group in optimizer.param_groups:
        parameters.update((id(p), p) for p in group["params"])
    for key, parameter in parameters.items():
        name = names.get(key, "a parameter of the optimizer's alone")
        yield PARAMETERS, name, parameter
        if parameter.grad is not None:
            yield GRADIENTS, name, parameter.grad
    for parameter, table in optimizer.state.items():
        name = names.get(id(parameter), "?")
        for key, value in (table if isinstance(table, Mapping) else {}).items():
            for tensor in tensors(value):
                yield OPTIMIZER, f"{name}: {key}", tensor
    for name, buffer in model.named_buffers():
        yield BUFFERS, name, buffer
    for index, tensor in enumerate(tensors(batch)):
        yield BATCH, f"tensor {index}", tensor
    for category, held in others.items():
        for index, tensor in enumerate(held):
            yield category, f"tensor {index}", tensor


def _owners(category: str, name: str, tensor: Tensor, device: torch.device) -> Iterator[Owner]:
    for plain in plain_parts(tensor):
        # A fake tensor, as a compiler's, has no memory, though it says where it would be.
        if plain.device != device or isinstance(plain, FakeTensor):
            continue
        with suppress(RuntimeError, NotImplementedError):  # those freed by hand
            storage = plain.untyped_storage()
            if storage.nbytes():
                dtype = str(plain.dtype).removeprefix("torch.")
                form, num_bytes = f"{tuple(plain.shape)} {dtype}", storage.nbytes()
                if plain.nbytes < num_bytes:
                    form += ", a part of it"
                address = storage.data_ptr()
                yield Owner(address, num_bytes, category, name, form, plain.nbytes)

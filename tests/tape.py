"""Graph semantics on the CPU: a backend that records operations and runs them again.

What a CUDA graph does, and where it bites, holds for the tape as well:

- a capture computes nothing: what it wrote to memory that was there before is undone;
- a replay runs the recorded operations on the recorded memory; no Python of the step runs;
- numbers that the host knew are frozen; reading a value from a tensor during capture raises;
- intermediate results and outputs stand at fixed addresses, written over by the next replay;
- the default generator, and those that were named, go on at each replay; one that was not named
  draws the same numbers again.

On the CPU the host has no need to wait, so reading a value is what stands for a host sync.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
# What their schemas do not tell: they write to the running statistics.
SILENT_WRITES = {aten.native_batch_norm.default: (3, 4)}
NOT_PERMITTED = "operation not permitted when stream is capturing"


class TapeGraph:
    def __init__(self, tape):
        self.tape = tape

    def replay(self):
        self.tape.replay()

    def reset(self):
        self.tape = None


class Tape(TorchDispatchMode):
    """Records what runs under it."""

    def __init__(self, generators):
        super().__init__()
        self.calls = []
        self.named = {id(g) for g in generators}
        self.kept = []  # nothing that was computed may have its memory given to another
        self.made = set()
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS or is_read_by_mask(func, args):
            raise RuntimeError(NOT_PERMITTED)
        written = written_to(func, args, kwargs)
        for tensor in written:
            self.save(tensor)
        generator = kwargs.get("generator")
        unnamed = generator is not None and id(generator) not in self.named
        state = generator.get_state() if unnamed else None
        result = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        self.kept.append((args, kwargs, outputs))
        inputs = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        fresh = [t for t in outputs if t.untyped_storage().data_ptr() not in inputs]
        self.made.update(t.untyped_storage().data_ptr() for t in fresh)
        if written or fresh:  # a view needs no work again
            self.calls.append((func, args, kwargs, result, fresh, generator, state))
        return result

    def save(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
            self.before[storage.data_ptr()] = storage, storage.clone()

    def undo(self):
        for storage, content in self.before.values():
            storage.copy_(content)
        self.before = {}

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, _, fresh, generator, state in self.calls:
                if state is not None:
                    now = generator.get_state()
                    generator.set_state(state)
                result = func(*args, **kwargs)
                if state is not None:
                    generator.set_state(now)
                if fresh:
                    known = {id(t) for t in fresh}
                    pairs = zip(tree_flatten(_)[0], tree_flatten(result)[0], strict=True)
                    for old, new in pairs:
                        if id(old) in known:
                            old.copy_(new)


class TapeBackend:
    """Stands in for CUDA's."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.num_captures = 0
        self.on_side_stream = 0

    @contextmanager
    def side_stream(self):
        self.on_side_stream += 1
        try:
            yield
        finally:
            self.on_side_stream -= 1

    def capture(self, body, generators):
        tape = Tape(generators)
        state = torch.get_rng_state()
        own = [(g, g.get_state()) for g in generators]
        gc.collect()
        try:
            with self.side_stream(), tape:
                result = body()
        finally:
            tape.undo()
            torch.set_rng_state(state)
            for generator, before in own:
                generator.set_state(before)
        self.num_captures += 1
        return TapeGraph(tape), result

    def pool_bytes(self):
        return 0


def tensors_of(value):
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def is_read_by_mask(func, args):
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def written_to(func, args, kwargs):
    """Return the tensors that an operation writes to, by its schema."""
    found = tensors_of([args[place] for place in SILENT_WRITES.get(func, ())])
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.kwarg_only or position >= len(args):
            value = kwargs.get(argument.name)
        else:
            value = args[position]
        found += tensors_of(value)
    return found

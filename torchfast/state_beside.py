"""What training changes and no model has: what the loss function keeps, and generators.

A head or a criterion in the closure of a loss function has buffers that it counts in; an encoder
that follows the model is moved on by hand; a mask is drawn from a generator in an attribute. A run
that is taken up again needs all of it, though it stands in no ``state_dict()``. What is constant (a
frozen teacher, the weights of classes) belongs to the program: it is not saved, so that a program
that was changed keeps what it has now. Whether it is constant is told by sums of its bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchfast._core.beside import (
    Kept,
    generators_of,
    modules_beside,
    tensors_beside,
    unread_of,
)
from torchfast._core.building import optimized
from torchfast._core.errors import StateMismatchError
from torchfast._core.generators import packed, seed_generator, set_states, state_of
from torchfast._core.local import local
from torchfast._core.storages import extent, is_expanded
from torchfast.checkpoint.sharded import part_of
from torchfast.ema import WeightAverage

if TYPE_CHECKING:
    from torchfast._core.generators import Generator

BESIDE: Final = "beside"
_HELD: Final = "held"  # within "rng", of which each rank has its own
_WORDS: Final = 1 << 22  # that are added up at a time
_MOST_BYTES: Final = 1 << 30  # of a tensor in a closure; larger ones are data

_TRAINING: Final[WeakSet[Optimizer]] = WeakSet()  # of all trainers

_Sums = tuple[torch.dtype, torch.Size, int, int]


@final
class StateBeside:
    """The tensors that a loss function keeps and training changes, and the generators of both.

    Args:
        model: What is trained.
        optimizer: Whose parameters are saved as they are, not here.
        loss_fn: As the user gave it.
        average: Of the weights, which are saved with it.

    Synchronizes: At construction, where the loss function keeps tensors on a device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        average: WeightAverage,
    ) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._average = average
        _TRAINING.add(optimizer)
        self._changed: set[str] = set()
        tensors = _tensors_of(self._kept())
        self._before = _sums(tensors)
        # What is another object later may be anybody's, such as a batch: it is not written to.
        self._first = {name: ref(tensor) for name, tensor in tensors.items()}

    def modules(self) -> list[nn.Module]:
        """Return the modules that the loss function uses and the model does not have."""
        return [*modules_beside(self._model, self._loss_fn).values()]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the loss function reads and keeps in no module."""
        unread = unread_of(self._loss_fn)
        found = tensors_beside(self._loss_fn).items()
        return [kept.value for name, kept in found if name.partition(".")[0] not in unread]

    def save(self) -> dict[str, Tensor]:
        """Return what has changed since this was made, by where it was found. Synchronizes: Yes.

        On several ranks it is this rank's, and a checkpoint of all has that of the first.
        """
        tensors = _tensors_of(self._kept())
        now = _sums({name: t for name, t in tensors.items() if name not in self._changed})
        # What was not there, or has another form each time, is a result and not a state.
        self._changed |= {
            name
            for name, sums in now.items()
            if (before := self._before.get(name)) != sums and before and before[:2] == sums[:2]
        }
        return {name: tensor.detach() for name, tensor in tensors.items() if name in self._changed}

    def generators_of(self, model: nn.Module) -> list[Generator]:
        """Return the generators of the model, of another one, and of the loss function."""
        models = dict.fromkeys((self._model, model))  # mostly one
        every = (generators_of(each, self._loss_fn).values() for each in models)
        return [*dict.fromkeys(generator for found in every for generator in found)]

    def generators(self) -> dict[str, dict[str, Tensor]]:
        """Return what goes into the state of random generators; empty without any."""
        found = generators_of(self._model, self._loss_fn)
        states = {name: state_of(generator) for name, generator in found.items()}
        return {_HELD: packed(states)} if states else {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless what was saved is what `save` returns.

        Raises:
            StateMismatchError: It is no mapping.
        """
        given = state.get(BESIDE, {})
        if not isinstance(given, Mapping):
            raise StateMismatchError(
                f"state's {BESIDE!r} must be a mapping, got {type(given).__name__}; load what "
                "state_dict() returned"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what `save` and `generators` returned; what is here and not there stays."""
        kept, given = self._kept(), state.get(BESIDE, {})
        tensors = _tensors_of(kept)
        fitting = {
            name: value
            for name, value in given.items()
            if name in tensors and value.shape == tensors[name].shape
        }
        apart, left = _not_one_any_more(fitting, tensors), set()
        with torch.no_grad():
            for name, value in fitting.items():
                tensor, whole = tensors[name], part_of(value, tensors[name])
                is_first = name in self._first and self._first[name]() is tensor
                is_own = is_first or isinstance(tensor, nn.Parameter)
                if is_own and name not in apart and not is_expanded(local(tensor)):
                    tensor.copy_(whole)
                    continue
                made = tensor.detach().clone(memory_format=torch.contiguous_format).copy_(whole)
                if not kept[name].replace(made):
                    left.add(name)
        fitting = {name: value for name, value in fitting.items() if name not in left}
        self._changed |= fitting.keys()
        generators = generators_of(self._model, self._loss_fn)
        states = state["rng"].get(_HELD, {})
        set_states(generators, states)
        gone = [*sorted(given.keys() - fitting.keys()), *sorted(states.keys() - generators.keys())]
        new = sorted(generators.keys() - states.keys())
        if gone or new:
            warnings.warn(
                "the loss function or the model keeps other things beside the parameters than the "
                f"one that was saved: not there any more, or of another shape {gone}, and without "
                f"a saved state {new}, which go on from where they are; build both as they were",
                stacklevel=4,
            )

    def draw_apart(self, seed: int) -> None:
        """Let each generator draw other numbers than the one whose state it was given."""
        for number, generator in enumerate(generators_of(self._model, self._loss_fn).values()):
            seed_generator(generator, seed + number)

    def _kept(self) -> dict[str, Kept]:
        """Return what may change, by where it was found."""
        models = filter(None, (self._model, self._average.current()))
        saved = [t for m in models for t in (*m.parameters(), *m.buffers())]
        saved += optimized(self._optimizer)
        mine = set(map(id, saved))
        trained = {id(p) for o in _TRAINING if o is not self._optimizer for p in optimized(o)}
        found: dict[str, Kept] = {}
        modules = modules_beside(self._model, self._loss_fn)
        # Where another optimizer trains a part, that is saved with it. What follows the model by
        # hand has no gradients, though nobody may have said that it needs none. One that is trained
        # may have none either, between two steps: so trainers know of each other.
        others = {
            _part(name)
            for name, module in modules.items()
            if any(
                p.requires_grad and id(p) not in mine and (p.grad is not None or id(p) in trained)
                for p in module.parameters(recurse=False)
            )
        }
        for name, module in modules.items():
            if _part(name) not in others:
                found |= {f"{name}.{key}": kept for key, kept in _persistent(module)}
        beside = tensors_beside(self._loss_fn)
        found |= {name: kept for name, kept in beside.items() if _is_given(kept.value)}
        # What is in the memory of a parameter goes with that: what has come to lie there since may
        # be another value (``spectral_norm`` begins with the weight itself).
        spans = _spans(saved)
        return {
            name: kept
            for name, kept in found.items()
            if id(kept.value) not in mine and _is_plain(kept.value)
            if not _is_within(kept.value, spans)
        }


def _tensors_of(kept: Mapping[str, Kept]) -> dict[str, Tensor]:
    return {name: each.value for name, each in kept.items()}


def _part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be added up and written: nothing lazy, wrapped, packed or frozen."""
    if is_lazy(tensor) or type(own := local(tensor)) not in (Tensor, nn.Parameter):
        return False
    is_dense = own.layout is torch.strided and not (own.is_nested or own.is_quantized)
    return is_dense and not (own.is_meta or own.is_inference())


def _is_given(tensor: Tensor) -> bool:
    """Whether a tensor that nobody calls a parameter or a buffer may be state."""
    is_made = not tensor.is_leaf or tensor.requires_grad
    return not is_made and _is_plain(tensor) and tensor.nbytes <= _MOST_BYTES


def _persistent(module: nn.Module) -> Iterator[tuple[str, Kept]]:
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield name, Kept(tensor, _its(tensor, table), name)


def _its(tensor: Tensor, table: Any) -> Any:
    """Return where another may be put: not in the place of a parameter, which others hold."""
    return None if isinstance(tensor, nn.Parameter) or not isinstance(table, dict) else table


def _spans(tensors: Iterable[Tensor]) -> dict[int, list[tuple[int, int]]]:
    """Return where tensors lie, by their storages."""
    found: dict[int, list[tuple[int, int]]] = {}
    for tensor in filter(_is_plain, tensors):
        storage, start, end = _span(tensor)
        found.setdefault(storage, []).append((start, end))
    return found


def _span(tensor: Tensor) -> tuple[int, int, int]:
    own = local(tensor)
    storage, start = own.untyped_storage().data_ptr(), int(own.storage_offset()) * own.itemsize
    size = extent(own.shape, own.stride()) * own.itemsize if storage else 0  # shards may have none
    return storage, start, start + size


def _is_within(tensor: Tensor, spans: Mapping[int, list[tuple[int, int]]]) -> bool:
    storage, start, end = _span(tensor)
    return any(start < other and begin < end for begin, other in spans.get(storage, ()))


def _not_one_any_more(given: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return what lies where others do, and had another value: ``self.h = self.c = zeros``."""
    first: dict[object, str] = {}
    apart: set[str] = set()
    for name, value in given.items():
        own = local(tensors[name])
        if not own.numel():
            continue
        known = first.setdefault((own.data_ptr(), own.shape, own.stride(), own.dtype), name)
        if known != name and not torch.equal(local(given[known]), local(value)):
            apart |= {known, name}
    return apart


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, _Sums]:
    """Return of each tensor its form and two sums of its bits, of which a change changes one.

    Torch's count of writes knows neither what is written to ``.data`` nor what replays write.
    """
    added = {name: _added(local(tensor).detach()) for name, tensor in tensors.items()}
    on_host: dict[str, list[int]] = {}
    for device in {pair.device for pair in added.values()}:  # one wait each
        names = [name for name, pair in added.items() if pair.device == device]
        both = torch.stack([added[name] for name in names]).tolist()
        on_host |= dict(zip(names, both, strict=True))
    return {
        name: (tensor.dtype, tensor.shape, *on_host[name])  # type: ignore[misc]
        for name, tensor in tensors.items()
    }


def _added(tensor: Tensor) -> Tensor:
    words = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = words.resolve_neg().contiguous().flatten().view(torch.uint8)
    whole = words.numel() // 8 * 8
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in (*words[:whole].view(torch.int64).split(_WORDS), words[whole:].long()):
        sums += torch.stack([part.sum(), (part * part).sum()])
    return sums

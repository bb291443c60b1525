"""Which layers give the logits of a vocabulary: they decide the loss, and 8 bits are few for that.

Surely those that share their weight with a table that is looked up, and those that the model itself
names, as models of transformers do. Of others there is the shape only, and that is a guess.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Final

from torch import nn

SURE: Final = "it gives the logits of the vocabulary"
GUESSED: Final = (
    "it may give the logits of the vocabulary, as the last layer of an embedding's shape; "
    "vocabulary=True converts it"
)
_TABLES: Final = (nn.Embedding, nn.EmbeddingBag)
_LOOK_UPS: Final = frozenset(("embedding", "embedding_bag", "index_select"))


def logits_layers(model: nn.Module, linears: Sequence[nn.Linear]) -> dict[nn.Linear, str]:
    """Return the layers that give logits over what an embedding looks up, and what tells so.

    A guess goes by the shape, which layers of a block may have too: of as many tables of a shape as
    many layers count, the last ones, for heads stand at the end. A table of positions can have the
    shape of a block's layers: 1024 positions of 1024 features. So a table of which there is a
    larger one counts only where no more layers are like it.
    """
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, _TABLES)}
    looked_up = {id(p) for m in model.modules() if _looks_up(m) for p in _own_weights(m)}
    sure = {m for m in linears if id(m.weight) in looked_up} | _named_outputs(model, linears)
    settled = {tuple(m.weight.shape) for m in sure}
    largest: dict[int, int] = {}
    for weight in tables.values():
        rows, features = weight.shape
        largest[features] = max(rows, largest.get(features, 0))
    guessed: set[nn.Linear] = set()
    for shape, count in Counter(tuple(weight.shape) for weight in tables.values()).items():
        alike = [m for m in linears if tuple(m.weight.shape) == shape]
        is_likely = len(alike) <= count or largest[shape[1]] == shape[0]
        if is_likely and shape not in settled:
            guessed.update(alike[-count:])
    return {m: SURE if m in sure else GUESSED for m in (*sure, *guessed)}


def _looks_up(module: nn.Module) -> bool:
    """Whether a module uses its parameters as tables, by its class or by what its methods call.

    A table need not be an ``nn.Embedding``: ``F.embedding`` takes a parameter of any module. But
    most that share a weight with a layer multiply by it, as adapters and tied decoders do.
    """
    if isinstance(module, _TABLES):
        return True
    if isinstance(module, nn.Linear):
        return False
    kinds = type(module).__mro__
    own = kinds[: kinds.index(nn.Module)]
    methods = (value for kind in own for value in vars(kind).values())
    return any(
        not _LOOK_UPS.isdisjoint(method.__code__.co_names)
        for method in methods
        if isinstance(method, FunctionType)
    )


def _own_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None)


def _named_outputs(model: nn.Module, linears: Sequence[nn.Linear]) -> set[nn.Linear]:
    """Return the layers that models within this one say they give their logits by."""
    found: set[nn.Module] = set()
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask) or not _takes_nothing(ask):
            continue
        try:
            output = ask()
        except (AttributeError, NotImplementedError):  # one that has no such layer
            continue
        if isinstance(output, nn.Module):
            found.update(output.modules())
    return {m for m in linears if m in found}


def _takes_nothing(method: object) -> bool:
    """Whether it can be called without arguments; others ask something else by this name."""
    try:
        inspect.signature(method).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True

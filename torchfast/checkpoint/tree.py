"""Nested state as JSON and tensors, and back, with every type as it was.

`flatten` takes state apart into a tree that JSON can hold and the tensors by name. What JSON has a
form for stands in the tree as it is, so that the file reads like the state; the rest is an object
with the key ``"$"`` that names its kind::

    {
        "step": 7,
        "betas": {"$": "tuple", "items": [0.9, 0.95]},
        "exp_avg": {"$": "tensor", "key": "optimizer/state/0/exp_avg"},
    }

Only the kinds listed here exist. There is no way to name a class or a function, so reading a tree
builds values and runs nothing: this is the difference to pickle. A value of another type raises
``TypeError`` with its place, before anything is written.

Tensors that share memory are stored once and share it again: equal views as one tensor, views that
overlap as the stretch of memory that they lie in. Strides are kept where a tensor fills its memory
(channels_last); a view with gaps is stored without them. Everything comes back on the CPU.

Where several ranks save, the tree of rank 0 is that of the state. The tree of another holds only
the parts of the state that each rank has for itself, and its tensors have keys of its own; of
tensors that are sharded every rank has the same keys.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from torchfast.checkpoint.sharded import is_sharded, problem_of
from torchfast.checkpoint.sharing import TAG, Leaf, dtype_name, store

Node = Any  # what json.dumps takes
# json.dumps recurses; far below its limit, and far above any real state.
_MOST_LEVELS: Final = 100
_MOST_PLAIN_INT: Final = 1 << 63  # above, json would meet Python's limit on digits
_REMEDY: Final = (
    "a checkpoint holds tensors, numpy arrays, numbers, texts, bytes, None and dicts, lists, "
    "tuples and sets of them"
)


@final
@dataclass(frozen=True)
class Whose:
    """Which rank saves a state, and what of it is its own.

    Attributes:
        rank: Its number.
        num_ranks: How many save.
        own: Keys of the state whose values each rank keeps for itself.
    """

    rank: int = 0
    num_ranks: int = 1
    own: Collection[str] = ()

    def keeps(self, leaf: Leaf) -> bool:
        """Whether this rank has to store a tensor, or a part of it."""
        return self.rank == 0 or leaf.part in self.own or is_sharded(leaf.tensor)


ALONE: Final = Whose()


@final
@dataclass
class _Walk:
    whose: Whose = ALONE
    leaves: list[Leaf] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    parents: set[int] = field(default_factory=set)


def flatten(state: Mapping[str, Any], whose: Whose = ALONE) -> tuple[Node, dict[str, Tensor]]:
    """Return the tree of ``state`` and its tensors by key.

    The tree holds no part of the state that can change; the tensors are views of the live ones.

    Args:
        state: What to save.
        whose: Which rank this is. Of a rank other than 0, only what is its own, and its parts of
            what is sharded.

    Raises:
        TypeError: ``state`` is no mapping, or holds something that has no form here.
        ValueError: It contains itself.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping such as trainer.state_dict(), got {type(state).__name__}"
        )
    walk = _Walk(whose)
    root = state if type(state) in (dict, OrderedDict) else dict(state)
    tree = _encode(root, (), walk)
    if whose.rank > 0:
        tree = {key: node for key, node in _pairs(tree) if key in whose.own}
    return tree, store([leaf for leaf in walk.leaves if whose.keeps(leaf)])


def sharded_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the sharded tensors of a state by the keys that they have in a checkpoint."""
    walk = _Walk(Whose(num_ranks=2))
    _encode(dict(state), (), walk)
    return {leaf.key: leaf.tensor for leaf in walk.leaves if is_sharded(leaf.tensor)}


def with_parts_of(tree: Node, own: Node) -> Node:
    """Return the tree of a state with another rank's own parts in their places."""
    if TAG not in tree:
        return {**tree, **own}
    pairs = [
        [key, own.get(key, node) if isinstance(key, str) else node] for key, node in _pairs(tree)
    ]
    return {**tree, "items": pairs}


def _pairs(tree: Node) -> list[tuple[Any, Node]]:
    return [tuple(pair) for pair in tree["items"]] if TAG in tree else list(tree.items())


def unflatten(tree: Node, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state of which ``tree`` and ``tensors`` were made.

    Raises:
        Exception: The tree is none; of various types, for `parse_json` to explain.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    kind = tree[TAG]
    if kind == "tensor":
        return tensors[tree["key"]]
    if kind == "view":
        return _view(tensors[tree["key"]], tree)
    if kind == "array":
        return _array(tensors[tree["key"]], tree)
    if kind in _CONTAINERS:
        return _container(kind, tree, tensors)
    return _DECODERS[kind](tree["value"])


def stored_tensors(tree: Node) -> dict[str, list[int] | None]:
    """Return the keys of the tensors that a tree needs, each with its strides if it has any."""
    found: dict[str, list[int] | None] = {}
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(reversed(node))
        elif isinstance(node, dict):
            if node.get(TAG) in ("tensor", "view", "array"):
                found[node["key"]] = node.get("strides") if node[TAG] == "tensor" else None
            pending.extend(reversed(node.values()))
    return found


# -- Encoding --------------------------------------------------------------------------------------


def _encode(value: Any, path: tuple[Any, ...], walk: _Walk) -> Node:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return (
            value if _is_text(value) else _tagged("str", value.encode("utf-8", _SURROGATES).hex())
        )
    if kind is int:
        return value if abs(value) < _MOST_PLAIN_INT else _tagged("int", hex(value))
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", struct.pack(">d", value).hex())
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, walk)
    if isinstance(value, np.ndarray):
        return _encode_array(value, path, walk)
    if kind in _ENCODERS:
        name, encode = _ENCODERS[kind]
        return _tagged(name, encode(value))
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return _tagged("number", [value.dtype.str, value.tobytes().hex()])
    if kind not in _KINDS:
        raise TypeError(f"{_place(path)} is a {_type_name(kind)}; {_advice(value)}")
    if id(value) in walk.parents or len(path) > _MOST_LEVELS:
        raise ValueError(
            f"{_place(path[:8])} contains itself or is nested more than {_MOST_LEVELS} deep; "
            "a checkpoint holds trees"
        )
    walk.parents.add(id(value))
    try:
        return _encode_container(value, path, walk)
    finally:
        walk.parents.discard(id(value))


def _encode_container(value: Any, path: tuple[Any, ...], walk: _Walk) -> Node:
    kind = _KINDS[type(value)]
    if kind in ("dict", "ordered_dict", "counter"):
        pairs = [
            (_encode_key(key, path), _encode(item, (*path, key), walk))
            for key, item in value.items()
        ]
        if kind == "dict" and all(type(key) is str for key, _ in pairs) and TAG not in value:
            return dict(pairs)
        node = _tagged(kind, [list(pair) for pair in pairs], name="items")
        versions = getattr(value, "_metadata", None)
        if kind == "ordered_dict" and versions is not None:
            # The versions of its modules, which load_state_dict() asks for.
            node["metadata"] = _encode(versions, (*path, "_metadata"), walk)
        return node
    items = [_encode(item, (*path, index), walk) for index, item in enumerate(value)]
    if kind == "list":
        return items
    node = _tagged(kind, items, name="items")
    if kind == "deque":
        node["maxlen"] = value.maxlen
    return node


def _encode_key(key: Any, path: tuple[Any, ...]) -> Node:
    if type(key) in (str, int, float, bool, type(None)):
        return _encode(key, path, _Walk())
    if type(key) is tuple:
        return _tagged("tuple", [_encode_key(part, path) for part in key], name="items")
    raise TypeError(
        f"{_place(path)} has the key {key!r} ({type(key).__name__}); keys in a checkpoint are str, "
        "int, float, bool, None or tuples of them"
    )


def _encode_tensor(value: Tensor, path: tuple[Any, ...], walk: _Walk) -> Node:
    ranks = walk.whose.num_ranks
    problem = problem_of(value, ranks) if is_sharded(value) else _unstorable(value)
    if problem is not None:
        raise TypeError(f"{_place(path)} is {problem}")
    plain = value.detach()
    if not is_sharded(value):
        plain = plain.resolve_conj().resolve_neg()
    return _leaf(plain, {TAG: "tensor"}, path, walk)


def _unstorable(value: Tensor) -> str | None:
    """Say what kind of tensor it is, and what to do, where its bytes are not all of it."""
    if type(value) not in (Tensor, nn.Parameter):
        return (
            f"a {_type_name(type(value))}, a tensor with parts of its own; store its plain tensors "
            "(a sharded one: full_tensor(); a quantized one: its values and scales)"
        )
    if value.is_quantized:
        return "a quantized tensor; store int_repr(), q_scale() and q_zero_point()"
    if value.is_nested:
        return "a nested tensor; store values() and offsets()"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}; store to_dense(), or its indices and values"
    if value.is_meta:
        return "a tensor on the meta device, which has no values; materialise it"
    return None


def _encode_array(value: np.ndarray[Any, Any], path: tuple[Any, ...], walk: _Walk) -> Node:
    if type(value) is not np.ndarray or value.dtype.hasobject or value.dtype.names is not None:
        raise TypeError(
            f"{_place(path)} is a {type(value).__name__} of dtype {value.dtype}; {_REMEDY}"
        )
    # A copy: the tensor is made of memory that nothing else can change.
    raw = np.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=np.uint8)
    node = {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape)}
    return _leaf(torch.from_numpy(raw)[: value.nbytes], node, path, walk)


def _leaf(tensor: Tensor, node: dict[str, Any], path: tuple[Any, ...], walk: _Walk) -> Node:
    key = "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)
    # The keys 0 and "0" of one dict; and "rank-00000.json" is taken by the tree.
    while key in walk.keys or key.startswith("rank-"):
        key = f"~{key}"
    walk.keys.add(key)
    if walk.whose.rank > 0 and not is_sharded(tensor):
        key = f"rank-{walk.whose.rank:05d}/{key}"
    walk.leaves.append(Leaf(path[0] if path else None, key, tensor, node))
    return node


# -- Decoding --------------------------------------------------------------------------------------


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of that name; ValueError where this torch has none."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


def _view(memory: Tensor, node: Node) -> Tensor:
    dtype = dtype_of(node["dtype"])
    view = torch.empty(0, dtype=dtype, device="cpu")
    item, start = view.element_size(), node["start"]
    storage = memory.untyped_storage()
    if start % item or start < 0 or min([0, *node["shape"], *node["strides"]]) < 0:
        raise ValueError(f"view begins at byte {start}")
    # torch checks the end, and would otherwise make the memory larger.
    spans = zip(node["shape"], node["strides"], strict=True)
    end = start + item * (1 + sum((size - 1) * stride for size, stride in spans))
    if 0 not in node["shape"] and end > storage.nbytes():
        raise ValueError(f"view ends at byte {end} of {storage.nbytes()}")
    return view.set_(storage, start // item, node["shape"], node["strides"])


def _array(memory: Tensor, node: Node) -> np.ndarray[Any, Any]:
    dtype = np.dtype(str(node["dtype"]))
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype} refers to objects")
    return np.frombuffer(memory.numpy(), dtype=dtype).reshape(node["shape"])


def _container(kind: str, node: Node, tensors: Mapping[str, Tensor]) -> Any:
    if kind in ("dict", "ordered_dict", "counter"):
        pairs = [(unflatten(key, {}), unflatten(value, tensors)) for key, value in node["items"]]
        made = _CONTAINERS[kind](pairs)
        if "metadata" in node:
            made._metadata = unflatten(node["metadata"], tensors)
        return made
    items = [unflatten(item, tensors) for item in node["items"]]
    return deque(items, node["maxlen"]) if kind == "deque" else _CONTAINERS[kind](items)


def _number(value: list[str]) -> np.generic:
    dtype = np.dtype(value[0])
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype} refers to objects")
    number = np.frombuffer(bytes.fromhex(value[1]), dtype=dtype)[0]
    if not isinstance(number, np.generic):
        raise TypeError(f"{value!r} is no number")
    return number


# -- The kinds -------------------------------------------------------------------------------------

_SURROGATES: Final = "surrogatepass"
_CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": dict,
    "ordered_dict": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "list": list,
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_KINDS: Final[dict[type, str]] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
_ENCODERS: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("bytes", bytes.hex),
    bytearray: ("bytearray", bytearray.hex),
    complex: ("complex", lambda value: struct.pack(">dd", value.real, value.imag).hex()),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
}
_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "str": lambda value: bytes.fromhex(value).decode("utf-8", _SURROGATES),
    "int": lambda value: int(value, 16),
    "float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda value: complex(*struct.unpack(">dd", bytes.fromhex(value))),
    "dtype": dtype_of,
    "device": torch.device,
    "number": _number,
}


def _tagged(kind: str, value: Any, name: str = "value") -> dict[str, Any]:
    return {TAG: kind, name: value}


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _place(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)


def _type_name(kind: type) -> str:
    known = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: object) -> str:
    if callable(getattr(value, "state_dict", None)):
        return "give its state_dict()"
    return _REMEDY

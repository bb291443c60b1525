"""Results that selective recompute keeps: what costs much to compute again for its bytes.

In a transformer or a convolutional network nearly all arithmetic is in matrix products,
convolutions and attention, and half of what is saved for the backward is not theirs: norms,
activations, dropout, casts. Those are cheap to compute again.

Keeping all results of the expensive operations would save less than half of the memory in a GPT,
though: the wide ones, such as the one of the first layer of a feed-forward, are large. So results
are taken in the order of what they cost for a byte, attention first, as far as a share of what the
block saves goes. What each costs is known from its shapes, so the choice is the same in every run;
how many bytes a block saves, and which results the backward needs at all, is seen in its first
call, which runs without recompute.

The second run of the block is given the results in the order of the first. One that has been
changed in place since is computed again. Operations that draw random numbers leave the generator as
it was behind them, so that what comes after draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import override

OpClass: TypeAlias = Literal["attention", "product", "convolution", "norm", "inputs"]

# About what a device computes in the time in which it moves a byte: an H100 or H200 in bf16.
_FLOPS_PER_BYTE = 170
# By so little more than its share a block may keep: the statistics of norms are no reason not to.
_TINY = 256

_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "mkldnn_linear",
        "_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm",
    )
)  # fmt: skip
_CONVOLUTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose",
        "mkldnn_convolution", "miopen_convolution",
    )
)  # fmt: skip
_ATTENTION = frozenset(
    f"aten::{name}"
    for name in (
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    )
)
_ATTENTION_PREFIXES = ("aten::_scaled_dot_product_", "flash_attn::", "flash_attn_3::")

# Views whose writes are counted for themselves, and not for what they are of: what ``matmul``
# returns, and the gates of torch's recurrent layers, which are written to.
_COUNT_APART = frozenset(
    (
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
        torch.ops.aten.unsafe_chunk.default,
    )
)


def op_class(func: Any) -> OpClass | None:
    """Return which kind of expensive operation it is; None for the rest."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return None
    name: str = schema.name
    if name in _PRODUCTS:
        return "product"
    if name in _CONVOLUTIONS:
        return "convolution"
    is_attention = name in _ATTENTION or name.startswith(_ATTENTION_PREFIXES)
    return "attention" if is_attention and "backward" not in name else None


def policy(_: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Say to the compiler what to keep; it finds out itself what of that is needed."""
    keeps = op_class(func) is not None
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class Result(NamedTuple):
    """What an expensive operation would take and cost.

    Attributes:
        kind: Of the operation.
        size_bytes: Of what it returns.
        flops: To compute it again.
        is_needed: Whether the backward waits for it; the last product of a block often is not.
        ms: How long it took; 0 if that was not measured.
        moved_bytes: Read and written to compute it again.
        needs: The number of the result without which it is not kept; None if it stands alone.
        spares: The numbers of the results that nobody waits for if it is kept.
    """

    kind: OpClass
    size_bytes: int
    flops: float
    is_needed: bool = True
    ms: float = 0.0
    moved_bytes: int = 0
    needs: int | None = None
    spares: tuple[int, ...] = ()

    @property
    def cost(self) -> float:
        """What it takes to compute it again, in operations."""
        moving = _FLOPS_PER_BYTE * self.moved_bytes
        # A convolution moves what it needs while it computes.
        return max(self.flops, moving) if self.kind == "convolution" else self.flops + moving


@dataclass(frozen=True)
class KeptChoice:
    """Which results of a block are kept, by their number in the order of the calls.

    Attributes:
        kept: For each expensive operation, whether its result is.
        results: What they take and cost.
        plain_bytes: What the block saves without recompute.
    """

    kept: tuple[bool, ...]
    results: tuple[Result, ...]
    plain_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What the kept results take."""
        return sum(r.size_bytes for r, kept in zip(self.results, self.kept, strict=True) if kept)

    @property
    def _num_inputs(self) -> int:
        """How many calls of attention are kept with their inputs."""
        pairs = zip(self.results, self.kept, strict=True)
        return sum(kept for result, kept in pairs if result.kind == "inputs")

    def __str__(self) -> str:
        counted = []
        for kind, plural in (
            ("attention", "attention"),
            ("product", "products"),
            ("convolution", "convolutions"),
            ("norm", "norms"),
        ):
            of_kind = [
                kept for r, kept in zip(self.results, self.kept, strict=True) if r.kind == kind
            ]
            if of_kind:
                counted.append(f"{sum(of_kind)} of {len(of_kind)} {plural}")
                if kind == "attention" and (num_inputs := self._num_inputs):
                    counted[-1] += f" ({num_inputs} with its inputs, in place of products)"
        kept = ", ".join(counted) if counted else "nothing, since it has no expensive operation"
        return (
            f"keeps {kept}: {self.kept_bytes / 2**20:.1f} MiB beside its input, where "
            f"{self.plain_bytes / 2**20:.1f} MiB are saved without recompute"
        )


def choose_kept(
    results: Sequence[Result], plain_bytes: int, input_bytes: int, share: float
) -> KeptChoice:
    """Return which results to keep.

    Args:
        results: Of one call of a block, in order.
        plain_bytes: What it saves without recompute.
        input_bytes: What it saves in any case.
        share: The part of ``plain_bytes`` that input and kept results may take.

    Example:
        >>> wide, narrow = Result("product", 400, 8e3), Result("product", 100, 4e3)
        >>> choose_kept([wide, narrow], 1000, 100, 0.5).kept
        (False, True)
    """
    left, slack = share * plain_bytes - input_bytes, plain_bytes // _TINY
    kept = [False] * len(results)

    def worth(number: int) -> tuple[bool, int, int]:
        result = results[number]
        per_byte = result.cost / max(1, result.size_bytes)
        replaced = [results[other] for other in result.spares]
        if (more := result.size_bytes - sum(other.size_bytes for other in replaced)) > 0:
            # Not before those that it takes the place of, unless what it adds is worth as much.
            cost = result.cost - sum(other.cost for other in replaced)
            per_byte = min(per_byte, cost / more)
        # Products of one depth cost the same for a byte: the largest first fill the room best.
        return result.kind == "attention", round(per_byte), result.size_bytes

    spared: set[int] = set()
    for number in sorted(range(len(results)), key=worth, reverse=True):
        result = results[number]
        if not result.is_needed or number in spared:
            continue
        if result.needs is not None and not kept[result.needs]:
            continue
        given_up = [other for other in result.spares if kept[other]]
        size = result.size_bytes - sum(results[other].size_bytes for other in given_up)
        if size <= left + slack:
            kept[number] = True
            left -= size
            spared.update(result.spares)
            for other in given_up:
                kept[other] = False
    return KeptChoice(tuple(kept), tuple(results), plain_bytes)


def flops_of(kind: OpClass, args: Sequence[Any], out: Any) -> float:
    """Return what an operation takes, by its shapes, roughly."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.dim() >= 2]
    first = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
    if not tensors:
        return float(first.numel())
    if kind == "attention":
        keys = tensors[1] if len(tensors) > 1 else tensors[0]
        return 4.0 * first.numel() * keys.shape[-2]
    if kind == "convolution" and len(tensors) > 1:
        weight = tensors[1]
        return 2.0 * first.numel() * weight.numel() / max(1, weight.shape[0])
    # The two matrices are the last ones: of addmm the first argument may be a matrix too.
    return 2.0 * first.numel() * tensors[-2 if len(tensors) > 1 else 0].shape[-1]


@final
class _Entry:
    """A result, what it was when it was kept, and the generator behind it."""

    __slots__ = ("_generator", "_seen", "_versions", "func", "value")

    def __init__(
        self, func: Any, value: Any, generator: tuple[torch.device, Tensor] | None
    ) -> None:
        self.func = func
        self.value = tree_map_only(Tensor, counted_alias, value)
        self._seen = [self.value]
        self._versions = _versions(self._seen)
        self._generator = generator

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in its memory."""
        key = tensor.untyped_storage()._cdata
        held = (t for t in tree_leaves(self.value) if isinstance(t, Tensor))
        return any(t.untyped_storage()._cdata == key for t in held)

    def also_watch(self, tensor: Tensor) -> None:
        """Count the writes to another view of it, which counts for itself."""
        alias = counted_alias(tensor)
        self._seen.append(alias)
        self._versions += _versions(alias)  # of the others as they were: they may be changed by now

    def given(self) -> Any:
        """Return the result, if it is still what it was; None if not."""
        if _versions(self._seen) != self._versions:
            return None
        if self._generator is not None:
            device, state = self._generator
            _set_generator(device, state)
        return self.value


@final
class KeptResults:
    """The results that one stretch of a block keeps.

    Args:
        choice: For each expensive operation in it, whether its result is kept.
    """

    def __init__(self, choice: tuple[bool, ...]) -> None:
        self._choice = choice
        self._entries: list[_Entry | None] = []

    def keeping(self) -> TorchDispatchMode:
        """Return a context in which they are kept."""
        return _Keeping(self._choice, self._entries)

    def giving(self) -> TorchDispatchMode:
        """Return a context in which they are given, each once, instead of computed."""
        return _Giving(self._entries)


@final
class _Keeping(TorchDispatchMode):
    def __init__(self, choice: tuple[bool, ...], entries: list[_Entry | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._entries = choice, entries

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled inside a block be compiled."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_class(func) is None:
            out = func(*args, **kwargs)
            if func in _COUNT_APART:
                for entry in self._entries:
                    if entry is not None and entry.holds(args[0]):
                        for part in [out] if isinstance(out, Tensor) else out:
                            entry.also_watch(part)
            return out
        number = len(self._entries)
        is_kept = number < len(self._choice) and self._choice[number]
        if not is_kept or torch.is_inference_mode_enabled():  # in which no writes are counted
            self._entries.append(None)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        # Noted even if it may have drawn nothing: to find out would be to read a tensor.
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        self._entries.append(_Entry(func, out, _generator(args) if is_seeded else None))
        return out


@final
class _Giving(TorchDispatchMode):
    def __init__(self, entries: list[_Entry | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries
        self._number = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled inside a block be compiled."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_class(func) is None:
            return func(*args, **kwargs)
        number = self._number
        self._number += 1
        entry = self._entries[number] if number < len(self._entries) else None
        if entry is None or entry.func is not func:
            return func(*args, **kwargs)
        self._entries[number] = None  # its memory is free as soon as the backward has used it
        given = entry.given()
        return func(*args, **kwargs) if given is None else given


def counted_alias(tensor: Tensor) -> Tensor:
    """Return a tensor without a place in a graph, which would hold what is to be freed.

    Below autograd an alias counts its own writes unless torch is told to share the count.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(value: Any) -> list[int]:
    return [t._version for t in tree_leaves(value) if isinstance(t, Tensor)]


def _generator(args: Sequence[Any]) -> tuple[torch.device, Tensor]:
    """Return the state of the generator of the device that an operation runs on."""
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type == "cpu":
        return device, torch.get_rng_state()
    return device, getattr(torch, device.type).get_rng_state(device)


def _set_generator(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        getattr(torch, device.type).set_rng_state(state, device)

"""An account of what was in memory when there was no more, by category, tensor and module.

Every block that the allocator has handed out is counted once, with its rounding: by the storage
that begins in it where its owner is known (a parameter, a gradient, ...), by the pool where it
belongs to a graph or to a `MemoryPool`, else as an activation or some other intermediate. So the
lines in use add up to what the allocator counts as allocated, and with the free ones to what it has
reserved.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, final

from torch import nn

from torchfast.memory.memory_pool import NO_POOL, PoolId
from torchfast.memory.moment import MemoryMoment
from torchfast.memory.owners import Owner
from torchfast.memory.sources import NO_LINE, line_of

REST = "activations and other intermediates"
GRAPHS = "graphs (their tensors)"
GRAPHS_KEPT = "kept by graphs for their replays"
POOLS_KEPT = "free in memory pools"
CACHED = "free segments (the cache)"
PIECES = "free pieces between tensors"
PENDING = "freed, but another stream may still use it"
_LARGEST = 10
_MODULES = 10


@final
@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """One line of an account.

    Attributes:
        name: A category, or a module.
        num_bytes: In blocks, rounding included.
        num_blocks: How many.
    """

    name: str
    num_bytes: int
    num_blocks: int


@final
@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """One of the largest blocks.

    Attributes:
        num_bytes: Of the block, rounding included.
        category: As in the account's lines.
        name: Of the parameter or buffer, or the operation that made it; empty if not known.
        form: Shape and dtype, such as ``"(64, 128) float32"``; empty if not known.
        line: The user's line that allocated it, if lines were noted; else empty.
    """

    num_bytes: int
    category: str
    name: str
    form: str
    line: str


@final
@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """What was in memory when a step ran out of it. Print it, or ``to_dict()``.

    Attributes:
        device: Whose memory.
        stage: ``"forward"``, ``"backward"``, ``"update"``, ``"capture"`` or ``"step"``.
        line: The user's line that asked, from the traceback; None in a backward pass.
        requested_bytes: What was asked for; None if torch does not say.
        free_bytes: Free on the device, as the driver sees it; None where it cannot be asked.
        limit_bytes: The most that this process may take.
        total_bytes: What the device has.
        outside_bytes: Taken on the device by other processes, by CUDA itself and by libraries that
            do not ask torch.
        allocated_bytes: In tensors, by the allocator's own counter.
        reserved_bytes: Taken by torch from the device, likewise.
        in_use: What is in tensors, by category, largest first; adds up to `allocated_bytes`.
        not_in_use: What is reserved besides; both together add up to `reserved_bytes`.
        largest: The largest tensors.
        modules: What of the activations was made in which module, if lines were noted.
        advice: What to try, the most promising first.
        snapshot_path: The file for torch's memory visualizer, if one was written.
        remarks: What could not be told, and why.
    """

    device: str
    stage: str
    line: str | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    total_bytes: int | None = None
    outside_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    in_use: tuple[MemoryLine, ...] = ()
    not_in_use: tuple[MemoryLine, ...] = ()
    largest: tuple[HeldTensor, ...] = ()
    modules: tuple[MemoryLine, ...] = ()
    advice: tuple[str, ...] = ()
    snapshot_path: str | None = None
    remarks: tuple[str, ...] = ()

    def bytes_of(self, name: str) -> int:
        """Return the bytes of one line, in use or not; 0 if there is no such line."""
        return sum(e.num_bytes for e in (*self.in_use, *self.not_in_use) if e.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready builtins."""
        values = {name: getattr(self, name) for name in type(self).__dataclass_fields__}
        return {name: _plain(value) for name, value in values.items()}

    def __str__(self) -> str:
        """Return the account as lines for a person."""
        return "\n".join(_written(self))


class _Block(NamedTuple):
    address: int
    size: int
    state: str
    home: str
    is_alone: bool
    frames: Sequence[Mapping[str, Any]]


class Found(NamedTuple):
    """What the blocks of a moment are.

    Attributes:
        in_use: As `MemoryAccount` has it.
        not_in_use: Likewise.
        largest: Likewise.
        modules: Likewise.
    """

    in_use: tuple[MemoryLine, ...]
    not_in_use: tuple[MemoryLine, ...]
    largest: tuple[HeldTensor, ...]
    modules: tuple[MemoryLine, ...]


def look(
    moment: MemoryMoment,
    known: Sequence[Owner],
    living: Iterable[Owner],
    model: nn.Module,
    pools: Mapping[PoolId, str] | None = None,
) -> Found:
    """Return what the blocks of a moment are; without blocks, what the known owners hold.

    Args:
        moment: With the allocator's blocks, or without.
        known: Owners with a category; the first that begins in a block has it.
        living: Owners that only Python knows, for shapes.
        model: For the names of modules.
        pools: Names of the pools that are no graph's.
    """
    if moment.segments is None:
        return _without_blocks(known)
    blocks = sorted(_blocks(moment.segments, pools or {}))
    owners = _by_block(blocks, [*known, *living])
    in_use: Counter[str] = Counter()
    not_in_use: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    modules: dict[str, list[int]] = defaultdict(list)
    places = _Places(model)
    largest: list[tuple[_Block, str]] = []
    for index, block in enumerate(blocks):
        if block.state != "active_allocated":
            name = _name_of_free(block)
            not_in_use[name] += block.size
        else:
            owner = owners.get(index)
            name = owner.category if owner is not None and owner.category else ""
            name = name or block.home or REST
            in_use[name] += block.size
            largest.append((block, name))
            if name == REST and block.frames:
                modules[places.module(block.frames)].append(block.size)
        numbers[name] += 1
    largest.sort(key=lambda each: -each[0].size)
    position = {block.address: index for index, block in enumerate(blocks)}
    return Found(
        _lines(in_use, numbers),
        _lines(not_in_use, numbers),
        tuple(_held(b, n, owners.get(position[b.address])) for b, n in largest[:_LARGEST]),
        _lines(
            {name: sum(sizes) for name, sizes in modules.items()},
            {name: len(sizes) for name, sizes in modules.items()},
        )[:_MODULES],
    )


def _without_blocks(known: Sequence[Owner]) -> Found:
    sizes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for owner in known:
        sizes[owner.category] += owner.num_bytes
        numbers[owner.category] += 1
    most = sorted(known, key=lambda owner: -owner.num_bytes)[:_LARGEST]
    largest = tuple(
        HeldTensor(num_bytes=o.num_bytes, category=o.category, name=o.name, form=o.form, line="")
        for o in most
    )
    return Found(_lines(sizes, numbers), (), largest, ())


def _blocks(segments: Sequence[Mapping[str, Any]], pools: Mapping[PoolId, str]) -> Iterator[_Block]:
    for segment in segments:
        address = segment["address"]
        pool_id = tuple(segment.get("segment_pool_id", NO_POOL))
        home = ""
        if pool_id != NO_POOL:
            home = f"pool {pools[pool_id]!r}" if pool_id in pools else GRAPHS
        is_alone = all(block["state"] == "inactive" for block in segment["blocks"])
        for block in segment["blocks"]:
            yield _Block(
                block.get("address", address),
                block["size"],
                block["state"],
                home,
                is_alone,
                block.get("frames") or (),
            )
            address += block["size"]


def _by_block(blocks: Sequence[_Block], owners: Iterable[Owner]) -> dict[int, Owner]:
    """Return the first owner that begins in each block that is in use."""
    starts = [block.address for block in blocks]
    found: dict[int, Owner] = {}
    for owner in owners:
        index = bisect.bisect_right(starts, owner.address) - 1
        if index < 0 or blocks[index].state != "active_allocated":
            continue
        if owner.address < blocks[index].address + blocks[index].size:
            found.setdefault(index, owner)
    return found


def _name_of_free(block: _Block) -> str:
    if block.state != "inactive":
        return PENDING
    if block.home:
        return GRAPHS_KEPT if block.home == GRAPHS else POOLS_KEPT
    return CACHED if block.is_alone else PIECES


def _held(block: _Block, category: str, owner: Owner | None) -> HeldTensor:
    line = line_of(block.frames) if block.frames else ""
    return HeldTensor(
        num_bytes=block.size,
        category=category,
        name="" if owner is None else owner.name,
        form="" if owner is None else owner.form,
        line="" if line == NO_LINE else line,
    )


def _lines(sizes: Mapping[str, int], numbers: Mapping[str, int]) -> tuple[MemoryLine, ...]:
    names = sorted(sizes, key=lambda name: -sizes[name])
    return tuple(MemoryLine(name=n, num_bytes=sizes[n], num_blocks=numbers[n]) for n in names)


@final
class _Places:
    """Which module's forward a line of code belongs to."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[type[nn.Module], list[str]] = defaultdict(list)
        for name, module in model.named_modules():
            names[type(module)].append(name)
        self._by_code: dict[tuple[str, str], list[tuple[range, str, bool]]] = defaultdict(list)
        for kind, held in names.items():
            code = getattr(kind.forward, "__code__", None)
            if not isinstance(code, CodeType):
                continue
            lines = [line for *_, line in code.co_lines() if line]
            span = range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)
            shown = held[0] or "the model"
            told = f"{kind.__name__} ({shown if len(held) == 1 else f'{len(held)} of them'})"
            is_own = not kind.__module__.startswith("torch.")
            self._by_code[code.co_filename, code.co_name].append((span, told, is_own))

    def module(self, frames: Sequence[Mapping[str, Any]]) -> str:
        """Return the innermost module of the user's, else of torch's, else the line."""
        found = [
            (told, is_own)
            for frame in frames
            for span, told, is_own in self._by_code.get((frame["filename"], frame["name"]), ())
            if frame["line"] in span
        ]
        own = [told for told, is_own in found if is_own]
        return next(iter(own or [told for told, _ in found]), "") or line_of(frames)


def size(num_bytes: int | None) -> str:
    """Return a number of bytes in words."""
    if num_bytes is None:
        return "?"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"


def _written(account: MemoryAccount) -> Iterator[str]:
    asked = "memory" if account.requested_bytes is None else size(account.requested_bytes)
    at = f" at {account.line}" if account.line else ""
    yield f"{account.device} is out of memory in the {account.stage}{at}: {asked} was asked for"
    if account.total_bytes is not None:
        allowed = ""
        if account.limit_bytes is not None and account.limit_bytes < account.total_bytes:
            allowed = f", of which this process may take {size(account.limit_bytes)}"
        yield (
            f"  the device has {size(account.total_bytes)}{allowed}: torch holds "
            f"{size(account.reserved_bytes)}, others and CUDA itself {size(account.outside_bytes)},"
            f" free are {size(account.free_bytes)}"
        )
    width = max((len(line.name) for line in (*account.in_use, *account.not_in_use)), default=0)
    for title, lines in (("in tensors", account.in_use), ("not in use", account.not_in_use)):
        if lines:
            yield f"  {title}: {size(sum(line.num_bytes for line in lines))}"
            for line in lines:
                yield f"    {line.name:<{width}}  {size(line.num_bytes)} in {line.num_blocks}"
    if account.modules:
        yield "  activations by module:"
        yield from (f"    {line.name}: {size(line.num_bytes)}" for line in account.modules)
    if account.largest:
        yield "  the largest tensors:"
        for held in account.largest:
            words = [held.form, held.name, held.category, held.line]
            yield f"    {size(held.num_bytes)}  {', '.join(word for word in words if word)}"
    yield from (f"  note: {remark}" for remark in account.remarks)
    if account.snapshot_path:
        yield f"  a snapshot for pytorch.org/memory_viz: {account.snapshot_path}"
    if account.advice:
        yield "  what to try:"
        yield from (f"    {n}. {text}" for n, text in enumerate(account.advice, 1))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, MemoryLine | HeldTensor):
        return {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    return value

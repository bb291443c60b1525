"""The storage of torch.distributed.checkpoint, in files that hold no pickle.

torch.distributed.checkpoint (DCP) divides a save into plans (what each rank writes) and storage
(how). The plans are its own: which rank writes which piece of which tensor, and how pieces are
found again under another number of ranks. Its storage is replaced here, because the plain one
pickles its metadata and pickles every value that is no tensor, and its planner unpickles both with
``weights_only=False``.

=========================  =====================================================================
``rank-00000-0000.bin``    tensors of rank 0 as raw bytes, each at a multiple of 64
``rank-00000.json``        everything else of rank 0 (see ``tree.py``)
``metadata.json``          DCP's metadata: dtype, size and pieces of every tensor, and their places
``manifest.json``          all files with sizes and hashes; written last
=========================  =====================================================================

Files of some 256 MiB, so that several threads hash and write at once. `ShardWriter`, `ShardReader`
and the two planners plug into ``dcp.save`` and ``dcp.load``. Here the same calls are made in the
order that DCP documents (`write`, `read`), by one process or by many: ``dcp.save`` warns of a
single process each time, and Python's filters for warnings are not made for threads; and of many
ranks each is to hear what failed on which other.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchfast._core.errors import (
    CheckpointCorruptError,
    CheckpointWriteError,
    StateMismatchError,
)
from torchfast._core.rank_group import RankGroup
from torchfast.checkpoint.dcp_metadata import Place, metadata_from_json, metadata_to_json
from torchfast.checkpoint.files import (
    FileEntry,
    HashedFile,
    num_threads,
    run_in_threads,
    write_file,
)
from torchfast.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    check_stream,
    parse_json,
    read_named,
)
from torchfast.checkpoint.sharded import empty_like, placed_like
from torchfast.checkpoint.sharing import plain

SHARD_BYTES: Final = 256 << 20
_ALIGNMENT: Final = 64
_CPU: Final = torch.device("cpu")  # named, since torch's default device may be another


@final
class PlainSavePlanner(DefaultSavePlanner):
    """Plans a flat state of tensors and of bytes that are JSON already."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return what to write; the base class would pickle what is no tensor."""
        return io.BytesIO(object) if write_item.type == WriteItemType.BYTE_IO else object


@final
class PlainLoadPlanner(DefaultLoadPlanner):
    """Loads into the tensors of a flat state, and bytes as bytes: nothing is unpickled.

    Stricter than ``weights_only=True``, which would unpickle tensors and plain values.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take bytes over."""
        # Under the key that the caller has: the other dict is the base class's own.
        self.original_state_dict[read_item.dest_index.fqn] = value.getvalue()


# -- Writing ---------------------------------------------------------------------------------------


@final
class ShardWriter(StorageWriter):
    """Writes a checkpoint's files into a folder that exists.

    Args:
        folder: Where to; on storage that all ranks see.
        describe: Makes the manifest from its files and the number of ranks.
        read_back: Read each file again once it is on the disk, and compare it with its hash, while
            others are still being written.
    """

    def __init__(
        self,
        folder: Path,
        describe: Callable[[Mapping[str, FileEntry], int], Manifest],
        *,
        read_back: bool = False,
    ) -> None:
        self._folder = folder
        self._describe = describe
        self._read_back = read_back

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another folder, if one is given."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number, after which its files are named."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, several files at once."""
        prefix = f"rank-{plan.storage_data:05d}"
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        texts = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        files = [(f"{prefix}-{n:04d}.bin", items) for n, items in enumerate(_divided(tensors))]
        # DCP knows no name for a rank's own values but the key, so the key is the name.
        files += [(item.index.fqn, [item]) for item in texts]
        results: list[WriteResult] = []
        run_in_threads(
            lambda file: results.extend(self._write_file(*file, planner)), files, num_threads()
        )
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write DCP's metadata, then the manifest."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        files = {place.file: place.entry for place in places.values()}
        body = json.dumps(metadata_to_json(metadata, places), indent=1).encode("ascii")
        files[METADATA] = write_file(self._folder / METADATA, body)
        manifest = self._describe(dict(sorted(files.items())), len(results))
        write_file(self._folder / MANIFEST, manifest.to_bytes())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept paths."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        spans = []
        with HashedFile(self._folder / name) as file:
            for item in items:
                file.pad_to(_ALIGNMENT)
                start = file.num_bytes
                data = planner.resolve_data(item)
                file.write(data.getbuffer() if isinstance(data, io.BytesIO) else raw_bytes(data))
                spans.append((item.index, start, file.num_bytes - start))
            entry = file.finish()
        if self._read_back:
            check_stream(self._folder / name, entry)
        return [
            WriteResult(index, num_bytes, Place(name, start, num_bytes, entry))
            for index, start, num_bytes in spans
        ]


def write(
    flat: dict[str, Any],
    folder: Path,
    describe: Callable[[Mapping[str, FileEntry], int], Manifest],
    *,
    ranks: RankGroup | None = None,
    explained: Callable[[], AbstractContextManager[Any]] = nullcontext,
    read_back: bool = False,
) -> None:
    """Write a flat state of tensors and bytes, in the order that DCP documents.

    Args:
        flat: What this rank has of it.
        folder: Where to.
        describe: Makes the manifest.
        ranks: Who writes; this process alone if left out. Returns on each when all have written
            and the manifest is on the disk.
        explained: Entered where this rank writes.
        read_back: Whether to read each file again.

    Raises:
        CheckpointCorruptError: With ``read_back``, a file does not hold what was written.
        CheckpointWriteError: The parts of the ranks do not make whole tensors.
        RankError: Another rank failed.
    """
    ranks = RankGroup.alone() if ranks is None else ranks
    planner, writer = PlainSavePlanner(), ShardWriter(folder, describe, read_back=read_back)

    def planned() -> SavePlan:
        planner.set_up_planner(flat, is_coordinator=ranks.is_first)
        writer.set_up_storage_writer(is_coordinator=ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def written() -> list[WriteResult]:
        with explained():
            return writer.write_data(plan, planner).wait()

    # Each rank draws up the plan for all by itself: they were told the same, so it is the same.
    try:
        plans, metadata = planner.create_global_plan(ranks.together(planned))
    except ValueError as error:
        raise CheckpointWriteError(
            f"what the {ranks.size} ranks hold does not make whole tensors ({error}; DCP has "
            "logged which); save the same state on every rank"
        ) from error
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])
    results = ranks.together(written)

    def finished() -> None:
        if ranks.is_first:
            with explained():
                writer.finish(metadata, results)

    # The disk may be full just now: the others are to hear of it, not to wait for what comes next.
    ranks.together(finished)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in order: its own memory where it lies so."""
    flat = plain(tensor.detach()).cpu().contiguous().reshape(-1)
    # Through numpy, the only view of a tensor's memory that Python can write from; it knows uint8.
    return flat.view(torch.uint8).numpy().data


def _divided(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide items into files, in order."""
    files: list[list[WriteItem]] = []
    room = 0
    for item in items:
        data = cast("Any", item.tensor_data)
        num_bytes = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        if not files or num_bytes > room:
            files.append([])
            room = SHARD_BYTES
        files[-1].append(item)
        room -= num_bytes
    return files


# -- Reading ---------------------------------------------------------------------------------------


@final
class ShardReader(StorageReader):
    """Reads a checkpoint's files, each in one pass that also compares it with the manifest.

    Only the files that the plan asks for are read.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files = manifest.files
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: another folder would have another manifest."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return DCP's metadata.

        Raises:
            CheckpointCorruptError: It is damaged.
            UnsafeCheckpointError: It is a pickle.
        """
        path = self._folder / METADATA
        data = read_named(self._folder, self._manifest, METADATA)
        metadata, self._places = parse_json(path, data, partial(metadata_from_json, self._files))
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_metadata` has found the places."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items, several files at once."""
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            files.setdefault(place.file, {}).setdefault(item.storage_index, []).append(item)
        run_in_threads(lambda file: self._read_items(*file, planner), files.items(), num_threads())
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept paths."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _read_items(
        self, name: str, items: Mapping[MetadataIndex, list[ReadItem]], planner: LoadPlanner
    ) -> None:
        sinks: list[tuple[int, memoryview]] = []
        finish: list[Callable[[], None]] = []
        for index, requests in items.items():
            place = self._places[index]
            sink, done = _sink(index, place, requests, planner)
            if sink:
                sinks.append((place.start, sink))
            finish.append(done)
        check_stream(self._folder / name, self._files[name], sinks)
        for done in finish:
            done()


def read(
    reader: ShardReader,
    wanted: Mapping[str, Sequence[int] | None],
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Load tensors, in the order of calls that DCP documents. No other rank is asked.

    Args:
        reader: Of the checkpoint.
        wanted: Keys, each with the strides that the tensor shall have, or None.
        like: Sharded tensors by key; what is stored under these keys is sharded as they are.

    Raises:
        CheckpointCorruptError: A file that holds one of them is damaged, or none does.
        StateMismatchError: What is to be sharded has another size.
    """
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for key, strides in wanted.items():
        found = metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointCorruptError(f"the checkpoint has no tensor {key!r}; load another step")
        dtype = found.properties.dtype
        sharded = placed_like(like or {}, key, found.size)
        if sharded is not None:
            if sharded.shape != found.size:
                raise StateMismatchError(
                    f"the checkpoint has {key!r} of {tuple(found.size)}, expected "
                    f"{tuple(sharded.shape)}; build the model as it was saved"
                )
            flat[key] = empty_like(sharded, dtype)
            continue
        flat[key] = (
            torch.empty(found.size, dtype=dtype, device=_CPU)
            if strides is None
            else torch.empty_strided(found.size, strides, dtype=dtype, device=_CPU)
        )
    planner = PlainLoadPlanner()
    planner.set_up_planner(flat, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return flat


def _sink(
    index: MetadataIndex, place: Place, requests: Sequence[ReadItem], planner: LoadPlanner
) -> tuple[memoryview, Callable[[], None]]:
    """Return memory to read an item into, and what to do when it is there."""
    if requests[0].type == LoadItemType.BYTE_IO:
        text = bytearray(place.num_bytes)
        return memoryview(text), lambda: planner.load_bytes(requests[0], io.BytesIO(bytes(text)))
    first = planner.resolve_tensor(requests[0]).detach()
    whole = len(requests) == 1 and first.numel() * first.element_size() == place.num_bytes
    if whole and first.is_contiguous() and first.device.type == "cpu":
        return raw_bytes(first), lambda: planner.commit_tensor(requests[0], first)
    # A part of it, another order or another device: by way of a copy of this one piece.
    raw = torch.empty(place.num_bytes, dtype=torch.uint8, device=_CPU)
    sizes = _chunk_sizes(index, planner)
    piece = (
        raw.view(first.dtype).view(sizes)
        if raw.numel()
        else torch.empty(sizes, dtype=first.dtype, device=_CPU)
    )

    def hand_over() -> None:
        for request in requests:
            target = planner.resolve_tensor(request).detach()
            source = piece
            for dim, (start, length) in enumerate(
                zip(request.storage_offsets, request.lengths, strict=True)
            ):
                source = source.narrow(dim, start, length)
            plain(target).copy_(plain(source))
            planner.commit_tensor(request, target)

    return raw.numpy().data, hand_over


def _chunk_sizes(index: MetadataIndex, planner: LoadPlanner) -> torch.Size:
    metadata = cast("DefaultLoadPlanner", planner).metadata
    stored = cast(
        "TensorStorageMetadata", cast("Metadata", metadata).state_dict_metadata[index.fqn]
    )
    return next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future

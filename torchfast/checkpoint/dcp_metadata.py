"""The metadata of torch.distributed.checkpoint as JSON, which it would otherwise pickle.

For every tensor its dtype, its size and the pieces that the ranks wrote, each with its offsets in
the tensor and its place in a file::

    {
        "tensors": {
            "model/weight": {
                "dtype": "bfloat16",
                "size": [8, 4],
                "chunks": [
                    {
                        "offsets": [0, 0],
                        "sizes": [8, 4],
                        "file": "rank-00000-0000.bin",
                        "start": 0,
                        "num_bytes": 64,
                    }
                ],
            }
        },
        "texts": {"rank-00000.json": {"file": "rank-00000.json", "start": 0, "num_bytes": 190}},
    }

Read back, each number is checked against the others, so that what was changed by hand raises rather
than reads elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchfast.checkpoint.files import FileEntry
from torchfast.checkpoint.manifest import natural
from torchfast.checkpoint.sharing import dtype_name
from torchfast.checkpoint.tree import dtype_of


@final
@dataclass(frozen=True)
class Place:
    """Where an item lies; what a rank tells the coordinator of what it has written."""

    file: str
    start: int
    num_bytes: int
    entry: FileEntry


def metadata_to_json(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    """Return what is saved and where each piece of it lies."""
    tensors, texts = {}, {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            texts[key] = _place_to_json(places[MetadataIndex(key)])
            continue
        tensors[key] = {
            "dtype": dtype_name(stored.properties.dtype),
            "size": list(stored.size),
            "chunks": [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **_place_to_json(places[MetadataIndex(key, chunk.offsets)]),
                }
                for chunk in stored.chunks
            ],
        }
    return {"tensors": tensors, "texts": texts}


def _place_to_json(place: Place) -> dict[str, Any]:
    return {"file": place.file, "start": place.start, "num_bytes": place.num_bytes}


def metadata_from_json(
    files: Mapping[str, FileEntry], body: Any
) -> tuple[Metadata, dict[MetadataIndex, Place]]:
    """Return what `metadata_to_json` was given.

    Args:
        files: The files that the manifest names.
        body: The parsed JSON.

    Raises:
        Exception: It is none; of various types, for `parse_json` to explain.
    """
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for key, tensor in body["tensors"].items():
        dtype, size = dtype_of(tensor["dtype"]), _size(tensor["size"])
        chunks = []
        for number, chunk in enumerate(tensor["chunks"]):
            offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
            place = _place_from_json(files, chunk)
            if place.num_bytes != math.prod(sizes) * dtype.itemsize:
                raise ValueError(f"{key!r} of {tuple(sizes)} {dtype} has {place.num_bytes} bytes")
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            places[MetadataIndex(key, offsets, number)] = place
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"the pieces of {key!r} do not make {tuple(size)}")
        stored[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    for key, text in body["texts"].items():
        stored[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _place_from_json(files, text)
    return Metadata(stored), places


def _place_from_json(files: Mapping[str, FileEntry], body: Any) -> Place:
    entry = files[body["file"]]
    start, num_bytes = natural(body["start"]), natural(body["num_bytes"])
    if start + num_bytes > entry.num_bytes:
        raise ValueError(f"{body['file']} ends before byte {start + num_bytes}")
    return Place(body["file"], start, num_bytes, entry)


def _size(numbers: list[int]) -> torch.Size:
    return torch.Size([natural(number) for number in numbers])

"""Reading one checkpoint: manifest, tree, tensors, each checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from torchfast.checkpoint.manifest import (
    METADATA,
    Manifest,
    check_sizes,
    explaining,
    parse_json,
    read_manifest,
    read_named,
    verify_files,
)
from torchfast.checkpoint.sharing import TAG
from torchfast.checkpoint.tree import Node, stored_tensors, unflatten, with_parts_of

TREE: Final = "rank-00000.json"


def read_checkpoint(
    folder: Path,
    part: str | None = None,
    *,
    rank: int = 0,
    like: Mapping[str, Tensor] | None = None,
) -> tuple[Manifest, Any]:
    """Return the manifest and the state of the checkpoint in ``folder``.

    Every file that is read is compared with its hash in the same pass.

    Args:
        folder: The checkpoint.
        part: A key of the state, to read only what belongs to it.
        rank: Whose own parts of the state to read. A rank that did not save any has those of the
            rank with its number modulo theirs.
        like: Sharded tensors by key, as which what is stored is to be sharded.

    Raises:
        CheckpointCorruptError: Something is damaged or missing.
        UnsafeCheckpointError: Something is a pickle.
        StateMismatchError: It is of a newer schema, or what is to be sharded has another size.
        ValueError: It has no such part.
    """
    # Imported here: torch.distributed.checkpoint takes a second, which `import torchfast` spares.
    from torchfast.checkpoint.storage import ShardReader, read

    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    reader = ShardReader(folder, manifest)
    tree = part_of(read_tree(folder, manifest, rank), part, folder)
    with explaining(folder / TREE):
        wanted = stored_tensors(tree)
    # What is loaded is trained further, even if an evaluation happens to ask for it.
    with torch.inference_mode(mode=False):
        tensors = read(reader, wanted, like) if wanted else {}
        with explaining(folder / TREE):
            return manifest, unflatten(tree, tensors)


def verify_folder(folder: Path, *, contents: bool = True) -> Manifest:
    """Read all of a checkpoint, compare it with its hashes, and return its manifest.

    Args:
        folder: The checkpoint.
        contents: Whether tensors are read too; without, of their files only the sizes are compared.

    Raises:
        CheckpointCorruptError: Something is damaged or missing.
        UnsafeCheckpointError: Something is a pickle.
        StateMismatchError: It is of a newer schema.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    if contents:
        verify_files(folder, manifest)
    for name in (*map(tree_name, range(manifest.world_size)), METADATA):
        read_named(folder, manifest, name)  # a manifest could leave one out
    return manifest


def tree_name(rank: int) -> str:
    """Return the name of the file with the tree of a rank; that of rank 0 is `TREE`."""
    return f"rank-{rank:05d}.json"


def read_tree(folder: Path, manifest: Manifest, rank: int = 0) -> Node:
    """Return the tree of the state as a rank has it, without its tensors."""
    tree = _read_tree(folder, manifest, TREE)
    saved_by = rank % max(1, manifest.world_size)
    if saved_by == 0:
        return tree
    own = _read_tree(folder, manifest, tree_name(saved_by))
    with explaining(folder / TREE):
        return with_parts_of(tree, own)


def _read_tree(folder: Path, manifest: Manifest, name: str) -> Node:
    return parse_json(folder / name, read_named(folder, manifest, name), _mapping)


def part_of(tree: Node, part: str | None, folder: Path) -> Node:
    """Return the value under a key of the state."""
    if part is None:
        return tree
    pairs = tree["items"] if TAG in tree else tree.items()
    found = {key: value for key, value in pairs if isinstance(key, str)}
    if part not in found:
        raise ValueError(
            f"{folder} has no part {part!r}; it has {sorted(found)}: take one of these"
        )
    return found[part]


def _mapping(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise TypeError(f"a state is a mapping, this is a {type(body).__name__}")
    return body

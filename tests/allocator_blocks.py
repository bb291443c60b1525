"""Blocks as torch's allocator lists them, laid down by a test."""

from __future__ import annotations

from torchfast.memory.moment import MemoryMoment

MB = 2**20
FAR = 2**60  # where no tensor of the process lies


def block(address, size, state="active_allocated", frames=()):
    return {"address": address, "size": size, "state": state, "frames": list(frames)}


def block_of(tensor, frames=()):
    storage = tensor.untyped_storage()
    return block(storage.data_ptr(), -(-storage.nbytes() // 512) * 512, frames=frames)


def segment(*blocks, pool=(0, 0)):
    return {
        "device": 0,
        "address": blocks[0]["address"],
        "segment_pool_id": pool,
        "blocks": list(blocks),
    }


def moment_of(*segments, **others):
    blocks = [b for s in segments for b in s["blocks"]]
    return MemoryMoment(
        allocated_bytes=sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        reserved_bytes=sum(b["size"] for b in blocks),
        segments=list(segments),
        **others,
    )

"""A pool in this very process, as a worker has it, and the other end of it."""

from __future__ import annotations

import contextlib
import pickle

from torch.utils.data import _utils, default_collate

from torchfast.data.pool_receiver import PoolStatistics, Receiver
from torchfast.data.pooled_collate import Message, PooledCollate


class Line:
    """Collates as a worker does, and opens as the training does."""

    def __init__(self, collate_fn=default_collate, most_blocks=4):
        self.collate = PooledCollate(collate_fn, most_blocks)
        self.collate.start(0)
        self.statistics = PoolStatistics()
        self.receiver = Receiver(self.statistics)

    def __call__(self, samples):
        sent = self.collate(samples)
        if not isinstance(sent, Message):
            self.statistics.num_ordinary += 1
            return pickle.loads(pickle.dumps(sent))
        return self.receiver.opened(sent)

    @property
    def blocks(self):
        return [slot.block for slot in self.collate._pool._slots]

    @property
    def in_use(self):
        return sum(block.is_in_use for block in self.blocks)


@contextlib.contextmanager
def registry():
    """Put torch's registry of collating back, which is a worker's own to change."""
    known = _utils.collate.default_collate_fn_map
    before = dict(known)
    try:
        yield
    finally:
        known.clear()
        known.update(before)

"""The ranks' store, of whatever kind it is."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchfast.parallel.rank_store import connection_to_store


class Plain(dist.Store):
    """As a scheduler may bring its own: in Python, with what torch asks for and no more."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def set(self, key, value):
        self.held[key] = value

    def get(self, key):
        return self.held[key]


def test_a_store_that_cannot_be_cloned_is_used_itself(monkeypatch):
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    store = Plain()
    connection_to_store("words/0", 5.0).set("1", "here")
    assert store.held == {"words/0/1": b"here"}


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_how_long_others_wait_in_the_store_is_left_alone(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    inner = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    store = dist.PrefixStore("default_pg", inner)  # as torch does
    before = store.timeout
    found = connection_to_store("words/0", 5.0)
    found.set("1", "here")
    assert store.get("words/0/1") == b"here"
    assert store.timeout == before
    assert found.timeout == (before if kind == "hash" else timedelta(seconds=5))

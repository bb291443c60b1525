"""A compiler that compiles nothing, and stores to keep what it did not compile."""

from __future__ import annotations

import os

import pytest

from torchfast.compiler.store import CacheStore
from torchfast.compiler.store_artifacts import CacheCounts, join, split
from torchfast.compiler.store_key import StoreKey

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give a file away")
MACHINE = {"torch": "2.13.0", "device_name": "a device", "device": "cpu"}


def key(work="model", **machine):
    return StoreKey(work={"model_class": work}, machine=MACHINE | machine)


class Compiler:
    """One process's compiler: what it finds it takes, what it does not find it makes anew.

    As torch's own, it makes other bytes each time, and hands out only what it used.
    """

    def __init__(self, num_bytes=16):
        self.num_bytes = num_bytes
        self.known, self.used = {}, {}
        self.hits = self.misses = self.bypasses = 0
        self.payloads = []
        self.off = ""

    def compile(self, *graphs, fits=True):
        for graph in graphs:
            if graph in self.known and fits:
                self.hits += 1
                self.used[graph] = self.known[graph]
            else:
                self.misses += 1
                self.used[graph] = (*self.used.get(graph, ()), os.urandom(self.num_bytes))
        return self

    def save(self):
        return join({"inductor": self.used}) if self.used else None

    def load(self, payload):
        self.payloads.append(payload)
        self.known = split(payload)["inductor"]
        return len(self.known)

    def counts(self):
        return CacheCounts(self.hits, self.misses, self.bypasses)

    def switched_off(self):
        return self.off


def process(folder, *graphs, num_bytes=16, **options):
    """Return the store of a new process, and its compiler, which has compiled ``graphs``."""
    compiler = Compiler(num_bytes).compile(*graphs)
    return CacheStore(folder, artifacts=compiler, **options), compiler


def stored(folder, of=None):
    """Return which graphs a new process finds under a key."""
    store, compiler = process(folder)
    outcome = store.load(of or key())
    assert outcome.status in ("loaded", "miss"), outcome
    return set(compiler.known)


def folder_with_one(path):
    """Return a folder with one good entry."""
    process(path, "a")[0].save(key())
    return path

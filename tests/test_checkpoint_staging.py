"""Copies for a checkpoint: what they hold meanwhile, and for whom; and deleting several files."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from torchfast._core import pinned_block
from torchfast.checkpoint import staging
from torchfast.checkpoint.files import remove_tree
from torchfast.checkpoint.staging import Stager


def test_nothing_of_the_state_is_held_once_the_copies_are_there(monkeypatch):
    """While they are written, that is: the tensors may be ones that training has let go of."""
    monkeypatch.setattr(staging, "is_sharded", lambda _: True)
    monkeypatch.setattr(staging, "with_part", lambda _, part: part)
    tensor = torch.arange(4.0)
    held = weakref.ref(tensor)
    staged = Stager().stage({"a": tensor, "b": torch.ones(2)})
    del tensor
    copies = staged.arrived()
    assert held() is None
    assert copies["a"].tolist() == [0, 1, 2, 3]
    assert copies["b"].tolist() == [1, 1]


def test_the_thread_that_sends_works_on_the_device_of_the_copies(monkeypatch):
    """A new thread is on the first device, where CUDA would begin when it leaves the stream."""
    inside = ["cuda:0"]

    @contextmanager
    def on(where):
        inside.append(str(getattr(where, "device", where)))
        yield
        inside.pop()
        left.append(inside[-1])

    left = []
    second = torch.device("cuda", 1)
    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
    stream = SimpleNamespace(device=second, wait_event=lambda _: None)
    for name, fake in {
        "Event": lambda **_: event,
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "device": on,
        "stream": on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(pinned_block, "pin_in_place", lambda *_: (0, lambda: None))
    first = torch.arange(8, dtype=torch.uint8)
    assert torch.equal(Stager()._sender(second, first, 8)(), first)
    assert left == ["cuda:1", "cuda:0"]  # behind the stream, and behind the device


def test_a_block_on_the_device_is_not_held_by_an_error(monkeypatch):
    """It is as large as the state, and the error waits for the next save."""

    def no_memory(*_):
        raise RuntimeError("no host memory")

    event, stream = SimpleNamespace(record=lambda _: None), SimpleNamespace()
    for name, fake in {"Event": event, "Stream": stream, "current_stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fake=fake: fake)
    monkeypatch.setattr(staging, "PinnedBlock", no_memory)
    first = torch.ones(8, dtype=torch.uint8)
    held = weakref.ref(first)
    send = Stager()._sender(torch.device("cuda", 0), first, 8)
    del first
    with pytest.raises(RuntimeError, match="no host memory") as caught:
        send()
    assert held() is None
    assert caught.value.__traceback__ is not None


def test_a_link_is_not_deleted_and_nothing_behind_it(tmp_path):
    """As an old checkpoint that was moved to another disk."""
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "model.bin").write_bytes(b"weights")
    link = tmp_path / "step-5"
    link.symlink_to(kept)
    with pytest.raises(OSError, match=r"step-5|symbolic link"):
        remove_tree(link)
    assert (kept / "model.bin").read_bytes() == b"weights"


def test_a_folder_is_deleted_with_links_and_folders_in_it(tmp_path):
    kept = tmp_path / "kept"
    kept.write_bytes(b"1")
    folder = tmp_path / "step-5"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_bytes(b"2")
    (folder / "file").write_bytes(b"3")
    (folder / "link").symlink_to(kept)
    (folder / "to-folder").symlink_to(tmp_path)
    remove_tree(folder)
    assert not folder.exists()
    assert kept.read_bytes() == b"1"

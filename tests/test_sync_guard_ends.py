"""However a SyncGuard is entered and left, torch is as it was; a copy is a guard of its own."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch

from host_waits import batch, read_item
from torchfast import SyncGuard, UnsupportedDeviceError


class Check:
    """Stands for torch's check of CUDA synchronisation, with what it says of itself."""

    mode = 0

    def set(self, mode):
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self.mode = mode


@pytest.fixture
def check(monkeypatch):
    check = Check()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_get_sync_debug_mode", lambda: check.mode, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", check.set, raising=False)
    return check


def test_what_torch_says_of_its_check_is_not_told_to_the_user(check):
    # Warnings are errors here.
    with SyncGuard(device="cuda"):
        assert check.mode == 1
        check.mode = 2  # the user's, meanwhile
    assert check.mode == 2


def test_the_check_is_on_for_each_guard_and_off_behind_it(check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SyncGuard(device="cuda"):
            check.mode = 0  # switched off by somebody
            with SyncGuard(device="cuda"):
                assert check.mode == 1
            assert check.mode == 1
        assert check.mode == 0


def test_a_guard_for_a_device_that_is_not_there_leaves_nothing_behind(monkeypatch):
    def no_cuda():
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", no_cuda)
    item = torch.Tensor.item
    with pytest.raises(UnsupportedDeviceError, match="device='cpu'"), SyncGuard(device="cuda"):
        pass
    assert torch.Tensor.item is item
    with SyncGuard(device="cpu") as guard:
        torch.ones(1).item()
    assert [sync.kind for sync in guard.report().syncs] == ["item"]
    assert torch.Tensor.item is item


def test_a_guard_left_in_another_thread_leaves_nothing_behind():
    item = torch.Tensor.item
    guard = SyncGuard(device="cpu")
    guard.__enter__()
    thread = threading.Thread(target=guard.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    torch.ones(1).item()
    assert guard.report().count == 0
    assert torch.Tensor.item is item


def test_a_copy_of_a_guard_is_another_one():
    with SyncGuard("warn", device="cpu", max_lines=3) as guard:
        torch.ones(1).item()
    for other in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert (other.mode, other.device_type, other.report().count) == ("warn", "cpu", 0)
        with other:
            torch.ones(1).item()
        assert other.report().count == 1
    assert guard.report().count == 1


def test_guards_of_two_devices_hear_what_is_theirs(check):
    host = torch.ones(1)  # no guard for CUDA minds it
    with (
        warnings.catch_warnings(),
        SyncGuard(device="cuda") as cuda,
        SyncGuard(device="cpu") as cpu,
    ):
        warnings.simplefilter("ignore")  # of setting the mode back, which CUDA does not say again
        host.item()
    assert (cuda.report().count, cpu.report().count) == (0, 1)


def test_a_backward_is_heard_by_all_guards_of_whoever_runs_it():
    x = torch.ones(2, requires_grad=True)
    with SyncGuard(device="cpu") as outer, SyncGuard(device="cpu") as inner:
        y = (x * 2).sum()
        y.register_hook(lambda gradient: gradient.item() and None)
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert (outer.report().count, inner.report().count) == (1, 1)


def test_a_guard_around_each_step_stays_in_place_until_it_is_closed():
    guard = SyncGuard(device="cpu")
    with guard:
        read_item(batch())
    assert "item" not in vars(torch.Tensor)
    for _ in range(2):
        with guard:
            read_item(batch())
        read_item(batch())  # outside: not counted
    assert "item" in vars(torch.Tensor)
    assert guard.report().count == 3
    guard.close()
    assert "item" not in vars(torch.Tensor)
    with pytest.raises(RuntimeError, match="make a new one"), guard:
        pass


def test_a_guard_that_is_dropped_puts_torch_back():
    guard = SyncGuard(device="cpu")
    for _ in range(2):
        with guard:
            pass
    assert "item" in vars(torch.Tensor)
    del guard
    assert "item" not in vars(torch.Tensor)

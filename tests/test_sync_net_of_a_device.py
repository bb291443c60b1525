"""Reads of single numbers are heard in place of the device's kernel; those on the host are not."""

import threading
import warnings
from argparse import Namespace

import pytest
import torch

from torchfast._core import sync_net
from torchfast._core.sync_net import SyncNet


class Owner:
    def __init__(self):
        self.told = []

    def run_below(self, call, original, args, options, frame):
        self.told.append((call.kind, frame.f_code.co_name))
        return original(*args, **options)

    def run_unheard(self, original, args, options):
        return original(*args, **options)


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def net(owner):
    net = SyncNet(owner, lambda code: None)
    yield net
    net.take_in()


def read():
    return torch.full((1,), 3.0).item()


def test_reads_on_the_host_pass_no_python_where_cuda_is_watched(net, owner):
    net.spread("cuda")
    assert read() == 3.0
    assert owner.told == []
    net.spread("cpu")
    assert read() == 3.0
    assert owner.told == [("item", "read")]


@pytest.fixture
def as_device(monkeypatch):
    """The CPU stands for the device that is watched."""
    monkeypatch.setattr(sync_net, "_DEVICE_KEY", "CPU")


def test_to_put_a_kernel_in_place_of_another_gives_no_warning(as_device, net, owner):
    torch.set_warn_always(True)  # else torch says it once a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before = list(warnings.filters)
            net.spread("cuda")
            assert warnings.filters == before
    finally:
        torch.set_warn_always(False)
    read()
    assert owner.told


def test_warnings_that_another_thread_filters_meanwhile_stay_filtered(as_device, net, monkeypatch):
    impl = torch.library.Library.impl

    def impl_beside_a_thread(library, name, kernel, key, **options):
        if key == "CPU":
            thread = threading.Thread(target=warnings.filterwarnings, args=("ignore", "of theirs"))
            thread.start()
            thread.join()
        return impl(library, name, kernel, key, **options)

    monkeypatch.setattr(torch.library.Library, "impl", impl_beside_a_thread)
    with warnings.catch_warnings():
        before = list(warnings.filters)
        net.spread("cuda")
        (more,) = warnings.filters[: -len(before)]
        assert more[1].pattern == "of theirs"


def test_reads_of_the_device_are_told_whoever_makes_them(as_device, net, owner):
    net.spread("cuda")
    assert read() == 3.0
    assert owner.told == [("item", "read")]
    owner.told.clear()
    # From C++, below the keys of autograd.
    ends = torch.tensor(0.0), torch.tensor(1.0)
    assert torch.linspace(*ends, 3).tolist() == [0.0, 0.5, 1.0]
    assert {kind for kind, _ in owner.told} == {"item"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_is_read_is_what_the_device_s_own_kernel_reads(as_device, net, owner, mode):
    values = [torch.tensor(x) for x in (2, 2.5, True, 1 + 2j)]
    values += [torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(4.0, requires_grad=True)]
    plain = [value.item() for value in values]
    net.spread("cuda")
    with mode():
        assert [value.item() for value in values] == plain
    assert len(owner.told) == len(values)
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        torch.zeros(2).item()


def test_the_device_s_own_kernel_comes_back(as_device, net, owner):
    net.spread("cuda")
    net.take_in()
    assert read() == 3.0
    assert owner.told == []
    net.spread("cuda")
    assert read() == 3.0
    assert owner.told == [("item", "read")]


def test_a_device_that_is_not_there_is_no_error(monkeypatch, net):
    monkeypatch.setattr(sync_net, "_DEVICE_KEY", "XLA")
    net.spread("cuda")
    assert read() == 3.0


@pytest.mark.parametrize("is_capturing", [False, True])
def test_what_is_waited_for_has_passed_when_the_device_s_own_kernel_is_called(
    monkeypatch, is_capturing
):
    """It is called with the GIL held, so that no thread of Python goes on while it waits."""
    done = []

    class Base:
        def synchronize(self):
            done.append("waited")

    class Event(Base):
        def record(self, stream):
            done.append(stream)

        def synchronize(self):
            raise AssertionError("this may be replaced, and told as the user's wait")

    tensor = Namespace(is_cuda=True, device="cuda:1")
    kernel = Namespace(call_boxed=lambda *args: done.append(args))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    sync_net._Native("read", kernel).redispatch("keys", tensor)
    waited = [] if is_capturing else ["that of cuda:1", "waited"]  # a capture may wait for nothing
    assert done == [*waited, ("keys", tensor)]

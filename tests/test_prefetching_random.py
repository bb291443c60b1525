"""Random numbers fall as in a plain loop, and the thread sees torch as its caller does."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from drawing_loaders import LOADERS, Plain, trained
from simulated_device import Prompt, numbered
from torchfast import PrefetchingLoader
from torchfast._core.rng import same_rng_state


class Rarely(Plain):
    """Draws late in the epoch only."""

    def __getitem__(self, index):
        return index + (random.random() if index == 15 else 0.0)


@pytest.mark.parametrize("training_draws", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_random_numbers_fall_as_in_a_plain_loop(device, name, training_draws):
    given = {"training_draws": training_draws}
    expected, state, _ = trained(LOADERS[name], None, **given)
    log, own, loader = trained(LOADERS[name], device, **given)
    assert log == expected
    assert same_rng_state(own, state)
    # Training that draws may be under suspicion when the epoch ends; what is found out is not.
    is_told = "fetching draws from a random generator" in str(loader.report())
    assert is_told == (name == "augmented")


def test_draws_that_come_late_are_noticed_and_told(device, monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.LOOKS_EVERY", 1)
    _, _, loader = trained(lambda: DataLoader(Rarely(), 1), device, epochs=2, training_draws=False)
    report = str(loader.report())
    assert "keeps its turn" in report
    assert "had been fetched ahead before that was seen" in report


def test_training_that_draws_is_not_taken_for_fetching(device, monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.LOOKS_EVERY", 1)

    class Slow(Plain):
        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.tensor(float(index))

    loader = PrefetchingLoader(DataLoader(Slow(), 1), "cpu")
    for _ in range(3):
        for _ in loader:
            for _ in range(20):
                time.sleep(0.0002)
                torch.rand(())
    assert loader._fetching.training_draws
    assert "runs ahead in a thread" in str(loader.report())


def test_fetching_in_the_callers_thread(device):
    threads = set()

    def batches():
        for batch in numbered(8):
            threads.add(threading.current_thread())
            yield batch

    loader = PrefetchingLoader(batches(), "cpu", background=False)
    assert len(list(loader)) == 8
    assert threads == {threading.current_thread()}
    assert "background=False" in str(loader.report())


def test_an_epoch_begins_in_the_callers_thread_and_goes_on_in_another(device):
    threads = []

    class Upstream:
        def __iter__(self):
            threads.append(threading.current_thread().name)
            for batch in numbered(6):
                threads.append(threading.current_thread().name)
                yield batch

    loader = PrefetchingLoader(Upstream(), "cpu")
    list(loader)
    main = threading.current_thread().name
    assert threads == [main] * 3 + ["torchfast-stager"] * 4
    threads.clear()
    list(loader)
    assert threads == [main] * 2 + ["torchfast-stager"] * 5


def test_the_thread_sees_torch_as_the_caller_does(device):
    seen, made = [], numbered(6)

    def batches():
        for batch in made:
            seen.append((torch.is_grad_enabled(), torch.get_default_device()))
            yield batch

    with torch.no_grad(), torch.device("meta"):
        for _ in PrefetchingLoader(batches(), "cpu", reuse=True):
            pass
    assert seen == [(False, torch.device("meta"))] * 6


def test_the_thread_runs_a_transform_under_the_callers_autocast_and_inference_mode(device):
    device.kind = Prompt
    seen = []

    def transform(batch):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        seen.append((product.dtype, product.is_inference()))
        return batch

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        for _ in PrefetchingLoader(iter(numbered(8)), "cpu", transform=transform):
            pass
    assert len(seen) >= 8
    assert set(seen) == {(torch.bfloat16, True)}


def test_a_thread_that_cannot_begin_says_so(device, monkeypatch):
    def broken(self):
        raise OSError("no settings")

    monkeypatch.setattr("torchfast.data.stager._Settings.applied", broken)
    with pytest.raises(OSError, match="no settings"):
        list(PrefetchingLoader(numbered(8), "cpu"))

"""The search for the largest size goes back fast from a bad guess, and hides no error."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import largest, largest_tries


def tried(most_that_fits, guesses):
    seen = []

    def fits(number):
        seen.append(number)
        return number <= most_that_fits

    def guess():
        return guesses([number for number in seen if number <= most_that_fits])

    yielded = list(largest.sizes_to_try(fits, 4, 1024, guess=guess))
    assert yielded == seen
    return seen


def test_a_guess_that_hopes_too_much_is_gone_back_from_faster_each_time():
    def hopes(fitting):
        return None if len(fitting) < 2 else 201 if max(fitting) < 100 else 190

    assert tried(190, hopes) == [4, 8, 201, 195, 185, 190]


SEARCH = largest.SEARCHES["smoke"]["batch"]


def fails_with(monkeypatch, error):
    def train(*args):
        raise error

    monkeypatch.setattr(largest_tries, "train", train)
    return largest_tries.tried(2, SEARCH, largest_tries.LEVERS["plain"], "cpu", 1.0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_what_is_about_memory_does_not_fit(monkeypatch, error):
    found = fails_with(monkeypatch, error)
    assert (found.fits, found.error) == (False, "")
    assert found.why == str(error).splitlines()[0]


def test_any_other_error_ends_the_search(monkeypatch):
    found = fails_with(monkeypatch, ValueError("a block computed something else"))
    assert "ValueError: a block computed something else" in found.error
    with pytest.raises(largest.TryError, match="something else"):
        largest.searched("plain", SEARCH, lambda number, limit_s: found, math.inf, 1)


def test_a_long_step_is_not_done_again(monkeypatch):
    sizes = []
    real = largest_tries.TrainStep.__call__

    def noting(self, batch):
        sizes.append(len(batch[0]))
        return real(self, batch)

    monkeypatch.setattr(largest_tries.TrainStep, "__call__", noting)
    levers = largest_tries.LEVERS["plain"]
    for limit_s, expected in ((math.inf, [1, 2, 2]), (0.0, [1, 2])):
        monkeypatch.setattr(largest_tries, "LONG_STEP_S", limit_s)
        sizes.clear()
        assert largest_tries.tried(2, SEARCH, levers, "cpu", 1.0).fits
        assert sizes == expected

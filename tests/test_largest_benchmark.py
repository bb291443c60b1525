"""The search for the largest size: in few tries, back fast from a bad guess; it hides no error."""

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


@pytest.mark.parametrize("true", [1, 2, 7, 37, 64, 1000])
def test_sizes_are_tried_until_the_largest_that_fits_is_known(true):
    tried = []
    for number in largest.sizes_to_try(lambda n: n <= true, first=4, most=64, resolution=0.0):
        tried.append(number)
        assert len(tried) < 20
    assert len(set(tried)) == len(tried)
    assert max(n for n in tried if n <= true) == min(true, 64)
    coarse = list(largest.sizes_to_try(lambda n: n <= 1000, first=4, most=2048, resolution=0.1))
    assert 900 < max(n for n in coarse if n <= 1000) <= 1000


@pytest.mark.parametrize("true", [0, 1, 3, 37, 63, 64, 1000])
@pytest.mark.parametrize("off", [-40, -1, 0, 1, 40, 10**6])
def test_a_guess_of_the_largest_size_saves_tries_and_may_be_wrong(true, off):
    tried = []

    def guess():
        return None if sum(n <= true for n in tried) < 2 else max(true + off, 0)

    for number in largest.sizes_to_try(lambda n: n <= true, 4, 64, resolution=0.0, guess=guess):
        tried.append(number)
        assert len(tried) < 20
    assert len(set(tried)) == len(tried)
    assert max([n for n in tried if n <= true], default=0) == min(true, 64)
    if off == 0 and true == 37:
        assert tried == [4, 8, 37, 38]


def test_the_largest_size_is_guessed_by_what_two_sizes_take():
    def fitting(number):
        return largest_tries.Try(number, fits=True, peak_bytes=100 + 10 * number)

    assert largest.guessed([fitting(4)], 1000) is None
    assert largest.guessed([fitting(4), fitting(8)], 1000) == 90
    assert largest.guessed([fitting(8), fitting(4), fitting(80)], 995) == 89
    flat = [largest_tries.Try(n, fits=True, peak_bytes=100) for n in (4, 8)]
    assert largest.guessed(flat, 1000) is None


def test_the_largest_batch_of_a_small_memory(run_benchmark):
    options = ["--searches", "batch", "--levers", "plain", "recompute", "--limit-gb", "0.002"]
    rows, printed = run_benchmark(largest, *options)
    assert [row["levers"] for row in rows] == ["plain", "recompute"]
    assert all(row["settled"] for row in rows)
    plain, recompute = (row["largest"] for row in rows)
    assert 2 <= plain < recompute < 64
    for row in rows:
        fits = {found["number"]: found["fits"] for found in row["tries"]}
        assert fits[row["largest"]]
        assert not fits[row["largest"] + 1]
        assert 0 < row["peak_bytes"] <= 2e6
    assert "out of memory" in printed


def test_the_largest_model_of_a_small_memory(run_benchmark):
    levers = ["low-bit", "recompute, chunked loss, low-bit, bf16 weights"]
    rows, _ = run_benchmark(
        largest, "--searches", "model", "--levers", *levers, "--limit-gb", "0.001"
    )
    low_bit, few_bytes = rows
    assert 2 <= low_bit["largest"] < few_bytes["largest"] < 64
    assert low_bit["num_parameters"] < few_bytes["num_parameters"]
    assert all(row["host_bytes"] > 1e9 for row in rows)


@pytest.mark.parametrize("name", largest_tries.LEVERS)
def test_every_set_of_levers_trains(name):
    search = largest.SEARCHES["smoke"]["model"]
    found = largest_tries.tried(2, search, largest_tries.LEVERS[name], "cpu", None)
    assert found.fits
    assert found.num_parameters > 10_000


def test_a_model_is_built_where_and_in_what_its_levers_want_it():
    size = largest.SEARCHES["smoke"]["model"].size
    for name, levers in largest_tries.LEVERS.items():
        model = largest_tries.built(size, levers, "cpu")
        dtypes = {parameter.dtype for parameter in model.parameters()}
        assert dtypes == {torch.bfloat16 if "bf16 weights" in name else torch.float32}
        assert levers.home == ("cpu" if "parameters" in name else None)
    plain = largest_tries.Llama(size)
    assert torch.equal(model.cos, plain.cos)
    assert torch.equal(model.norm.weight, plain.norm.weight)
    weight = model.blocks[0].up.weight
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_a_size_whose_process_dies_or_hangs_does_not_fit():
    search = largest.SEARCHES["smoke"]["batch"]
    dying = largest_tries.Trier(search, "no such levers", "cpu", None)
    try:
        assert not dying(2, 60.0).fits
        assert dying(2, 60.0).why == "its process ended with 1"  # by a second process
        assert dying(2, 0.0).why == "not done in 0 s"
    finally:
        dying.stop()

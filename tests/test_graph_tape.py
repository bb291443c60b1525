"""The tape has the semantics of a CUDA graph: without them the tests on it would prove nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tape import CPU, TapeBackend


def capture(body, *generators):
    return TapeBackend(CPU).capture(body, generators)


def test_a_capture_computes_nothing():
    total = torch.zeros(3)
    before = torch.get_rng_state()
    graph, _ = capture(lambda: total.add_(1.0).mul_(torch.rand(3)))
    assert torch.equal(total, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), before)
    graph.replay()
    assert (total != 0).all()


def test_a_capture_leaves_running_statistics_and_a_replay_moves_them():
    norm = nn.BatchNorm1d(4)
    graph, _ = capture(lambda: norm(torch.arange(8.0).view(2, 4)))
    assert not norm.running_mean.any()
    assert int(norm.num_batches_tracked) == 0
    graph.replay()
    assert norm.running_mean.any()
    assert int(norm.num_batches_tracked) == 1


def test_a_capture_undoes_a_write_through_a_view():
    total = torch.zeros(4)
    graph, _ = capture(lambda: total.view(2, 2)[0].fill_(1.0))
    assert not total.any()
    graph.replay()
    assert total.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_replay_reads_what_lies_at_its_addresses_now():
    x = torch.ones(2)
    graph, out = capture(lambda: x * 2)
    x.fill_(5.0)
    graph.replay()
    assert out.tolist() == [10.0, 10.0]


def test_a_replay_reads_the_old_memory_of_what_was_replaced():
    held = {"x": torch.ones(2)}
    graph, out = capture(lambda: held["x"] * 2)
    held["x"] = torch.full((2,), 5.0)
    graph.replay()
    assert out.tolist() == [2.0, 2.0]


def test_no_python_runs_in_a_replay_and_its_numbers_are_frozen():
    factor, calls = [2.0], []

    def body():
        calls.append(1)
        return torch.ones(2) * factor[0]

    graph, out = capture(body)
    factor[0] = 7.0
    graph.replay()
    assert out.tolist() == [2.0, 2.0]
    assert len(calls) == 1


def test_an_output_is_overwritten_by_the_next_replay():
    x = torch.ones(())
    graph, out = capture(lambda: x + 1)
    graph.replay()
    kept, value = out, float(out)
    x.fill_(9.0)
    graph.replay()
    assert (value, float(kept)) == (2.0, 10.0)


def test_a_whole_backward_is_replayed():
    layer = nn.Linear(2, 1, bias=False)
    x = torch.ones(1, 2)

    def body():
        layer.weight.grad = None
        layer(x).sum().backward()
        return layer.weight.grad

    graph, gradient = capture(body)
    x.fill_(3.0)
    graph.replay()
    assert gradient.tolist() == [[3.0, 3.0]]


READS = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "if": lambda t: 1 if t[0] > 0 else 2,
    "nonzero": torch.nonzero,
    "mask": lambda t: t[t > 0],
    "write by mask": lambda t: t.clone().__setitem__(t > 0, 0.0),
    "masked_select": lambda t: t.masked_select(t > 0),
    "equal": lambda t: torch.equal(t, t + 1),
    "unique": torch.unique,
}


@pytest.mark.parametrize("name", READS)
def test_reading_a_value_in_a_capture_raises(name):
    values = torch.tensor([1.0, -1.0])
    READS[name](values)  # as it is, it works
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture(lambda: READS[name](values * 2))


def test_a_failed_capture_is_undone_and_the_next_one_works():
    total = torch.zeros(2)
    backend = TapeBackend(CPU)

    def body():
        total.add_(torch.rand(2))
        return total.sum().item()

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="not permitted"):
        backend.capture(body, [])
    assert not total.any()
    assert torch.equal(torch.get_rng_state(), before)
    assert (backend.num_captures, backend.on_side_stream) == (0, 0)
    graph, _ = backend.capture(lambda: total.add_(1.0), [])
    graph.replay()
    assert total.tolist() == [1.0, 1.0]


def draws(count, generator=None, *, named=()):
    graph, out = capture(lambda: torch.rand(2, generator=generator), *named)
    found = []
    for _ in range(count):
        graph.replay()
        found.append(tuple(out.tolist()))
    return found


def test_the_default_generator_goes_on_as_without_a_graph():
    torch.manual_seed(3)
    expected = [tuple(torch.rand(2).tolist()) for _ in range(3)]
    torch.manual_seed(3)
    assert draws(3) == expected


def test_a_named_generator_goes_on_and_an_unnamed_one_repeats():
    one, two = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    expected = [tuple(torch.rand(2, generator=two).tolist()) for _ in range(3)]
    assert draws(3, one, named=[one]) == expected
    repeated = draws(3, one)
    assert repeated == [repeated[0]] * 3

"""All ranks replay graphs of one joint capture, or none does: NCCL's rule for what a graph holds.

The steps hold a collective, the mean of each gradient. What the tape captures and replays is noted
on each rank, a graph by the step in which it was captured; the rule is kept where all ranks have
the same notes.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ranks
from models import DropoutNet, make_batches, mean_loss
from tape import TapeBackend, TapeGraph, Twins
from torchfast import CUDAGraphOptions, Plan
from torchfast._core.errors import CaptureError
from torchfast._core.rank_group import RankGroup
from torchfast.graphs import replay_check
from torchfast.graphs.together import OTHERS, Together

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)


@torch.library.custom_op("joint_captures::mean", mutates_args=())
def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    found = value.clone()
    if not Noted.is_capturing:  # as a device, which does nothing in a capture
        dist.all_reduce(found)
    return found / dist.get_world_size()


class Noted:
    """A plain loop and a captured step of one rank, and what became of each step in graphs."""

    is_capturing = False

    def __init__(self, loss_fn=mean_loss, **options):
        self.twins = Twins(
            DropoutNet,
            ADAMW,
            loss_fn,
            plan=Plan(cuda_graph=CUDAGraphOptions(**options)),
        )
        self.twins.both(self._share_gradients)
        self.graph = self.twins.captured._graph
        self.graph._together = self.graph._graph._together = Together(RankGroup.join(timeout_s=20))
        self.notes, self.differences = [], []
        self._note()

    @staticmethod
    def _share_gradients(model, optimizer):
        for parameter in model.parameters():
            parameter.register_hook(mean_over_ranks)

    def _note(self):
        capture, replay, noted = TapeBackend.capture, TapeGraph.replay, self

        def capture_noted(backend, body, generators):
            noted.notes[-1].append("begins to capture")
            Noted.is_capturing = True
            try:
                graph, result = capture(backend, body, generators)
            finally:
                Noted.is_capturing = False
            graph.captured_at = len(noted.notes)
            return graph, result

        def replay_noted(graph):
            noted.notes[-1].append(f"replays that of {graph.captured_at}")
            replay(graph)

        TapeBackend.capture, TapeGraph.replay = capture_noted, replay_noted

    def train(self, batches, events=None):
        """Take steps; ``events`` are done before steps by number, to both models alike."""
        for batch in batches:
            self.notes.append([])
            number = len(self.notes)
            if events and number in events:
                self.twins.both(events[number])
            self.twins.step(batch)
            self.differences += map(str, self.twins.differences(gradients=False))
        report = self.twins.captured.report()
        return {
            "notes": self.notes,
            "differences": self.differences[:5],
            "counters": dict(report.counters),
            "report": str(report),
        }


def replayed(result):
    """Return which steps were replays, each with the step of its capture."""
    words = "replays that of "
    last = [notes[-1] if notes else "" for notes in result["notes"]]
    return {
        number: int(text.removeprefix(words))
        for number, text in enumerate(last, start=1)
        if text.startswith(words)
    }


def check(results):
    """Check that all did the same in each step, and what a plain loop does; return the first."""
    for result in results:
        assert not result["differences"]
        assert result["notes"] == results[0]["notes"]
    return results[0]


def a_hook(model, optimizer):
    """Change what graphs are captured from, and no number."""
    model.register_forward_pre_hook(lambda *_: None)


def shorter(batch, by):
    return tuple(tensor[:-by] for tensor in batch)


# --- shapes -----------------------------------------------------------------------------------


ODD = (7, 8, 9, *range(12, 28, 2))


def odd_shapes(rank):
    batches = make_batches(30, seed=rank)
    for number in ODD:
        if rank == 1:
            batches[number - 1] = shorter(batches[number - 1], 2)
    return Noted().train(batches)


def test_a_step_with_other_shapes_on_one_rank_is_eager_on_all():
    results = ranks.run(odd_shapes)
    expected = [number for number in range(4, 31) if number not in ODD]
    assert replayed(check(results)) == dict.fromkeys(expected, 4)
    for result in results:
        assert result["counters"]["captures"] == 1
        assert (
            "11 steps ran eagerly on all ranks: some had a graph for their batches, and others had "
            "none; give all ranks batches of the same shapes" in result["report"]
        )


def agreed_shapes(rank):
    lengths = [0, 0, 0, 0, 2, 2, 2, 0, 2, 4, 4, 4, 0, 2, 4]
    batches = make_batches(len(lengths), seed=rank, size=8)
    kept = [shorter(b, by) if by else b for b, by in zip(batches, lengths, strict=True)]
    return Noted(max_graphs=2).train(kept)


def test_shapes_that_change_on_all_ranks_at_once_have_graphs_of_their_own():
    first = check(ranks.run(agreed_shapes))
    # The second 13 finds a graph thrown out for that of 11, and makes one again.
    assert replayed(first) == {4: 4, 6: 6, 7: 6, 8: 4, 9: 6, 11: 11, 12: 11, 13: 13, 14: 14, 15: 15}
    assert "on all ranks" not in first["report"]


def own_shapes(rank):
    return Noted().train([shorter(b, 1 + rank) for b in make_batches(8, seed=rank)])


def test_ranks_that_always_have_shapes_of_their_own_replay():
    assert replayed(check(ranks.run(own_shapes))) == dict.fromkeys(range(4, 9), 4)


def a_captured_mixture(rank):
    """The step to be captured, and some before it, have other shapes on one rank only."""
    batches = make_batches(30, seed=rank)
    for number in (1, 2):
        if rank == 1:
            batches[number - 1] = shorter(batches[number - 1], 2)
    return Noted(warm_up_steps=1).train(batches)


def test_a_capture_of_shapes_that_do_not_come_again_is_given_up():
    first = check(ranks.run(a_captured_mixture))
    steps = replayed(first)
    assert steps.pop(2) == 2
    assert min(steps) < 20
    assert sorted(steps) == [*range(min(steps), 31)]
    assert set(steps.values()) == {min(steps)}


def lengths_at_random(rank):
    draws = random.Random(rank)
    batches = [shorter(b, draws.choice((1, 2, 3))) for b in make_batches(160, seed=rank)]
    return Noted().train(batches)


def test_ranks_that_choose_shapes_by_themselves_replay_where_they_agree():
    first = check(ranks.run(lengths_at_random))
    assert 20 < len(replayed(first)) < 80
    assert first["counters"]["captures"] < 8
    assert "they had graphs of different captures for their batches" in first["report"]


# --- one rank alone ---------------------------------------------------------------------------


def one_invalidated(rank):
    return Noted().train(make_batches(36, seed=rank), {8: a_hook} if rank == 1 else {})


def test_a_graph_that_one_rank_has_lost_is_captured_anew_by_all():
    results = ranks.run(one_invalidated)
    steps = replayed(check(results))
    again = min(number for number in steps if number > 8)
    assert 9 <= again <= 20
    assert steps == dict.fromkeys(range(4, 8), 4) | dict.fromkeys(range(again, 37), again)
    for result in results:
        assert result["counters"]["captures"] == 2
        assert result["counters"]["graphs"] == 1
        assert "some had a graph for their batches, and others had none" in result["report"]


def all_invalidated(rank):
    return Noted().train(make_batches(20, seed=rank), {16: a_hook})


def test_a_graph_that_all_have_lost_is_captured_anew_at_once():
    first = check(ranks.run(all_invalidated))
    assert replayed(first) == dict.fromkeys(range(4, 16), 4) | dict.fromkeys(range(16, 21), 16)
    assert "on all ranks" not in first["report"]


def invalidated_again_and_again(rank):
    events = dict.fromkeys(range(20, 130, 24), a_hook) if rank == 1 else {}
    return Noted().train(make_batches(130, seed=rank), events)


def test_a_rank_that_loses_its_graph_again_and_again_does_not_make_all_capture_for_ever():
    first = check(ranks.run(invalidated_again_and_again))
    assert 1 < first["counters"]["captures"] < 5


def one_varies(rank):
    """Another weight decay again and again, which one rank answers by an update outside."""

    def decay(number, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.01 * number

    events = {n: partial(decay, n) for n in (20, 34)} if rank == 1 else {}
    return Noted().train(make_batches(110, seed=rank), events)


def test_one_rank_takes_the_update_out_of_its_graph():
    first, second = results = ranks.run(one_varies)
    steps = replayed(check(results))
    assert "the update runs after the graph from now on" in second["report"]
    assert "the update runs after the graph from now on" not in first["report"]
    assert steps[110] > 34


class Waits:
    def __init__(self, waits):
        self.waits = waits

    def __call__(self, model, batch):
        loss = mean_loss(model, batch)
        if self.waits:
            loss.item()
        return loss


def one_cannot(rank):
    return Noted(Waits(rank == 1)).train(make_batches(10, seed=rank))


def test_one_rank_that_cannot_capture_keeps_all_from_it():
    first, second = ranks.run(one_cannot)
    check([first, second])
    assert not replayed(first)
    assert OTHERS in first["report"]
    assert "the host waits for the device" in second["report"]


def one_has_an_iterator(rank):
    numbers = iter(range(1000))

    def draws(model, batch):
        return mean_loss(model, batch) * (1 + 0 * next(numbers))

    return Noted(draws if rank == 1 else mean_loss).train(make_batches(10, seed=rank))


def test_nobody_begins_a_capture_that_one_rank_knows_it_cannot_make():
    first, second = ranks.run(one_has_an_iterator)
    check([first, second])
    assert not any(first["notes"])
    assert OTHERS in first["report"]
    assert "draws from an iterator" in second["report"]


def one_has_no_memory_for_the_check(rank):
    if rank == 1:

        class Full:
            def __init__(self, *_):
                raise torch.OutOfMemoryError("CUDA out of memory")

        replay_check.SavedNamedState = Full
    return Noted().train(make_batches(10, seed=rank))


def test_nobody_checks_a_graph_that_one_rank_has_no_memory_to_check():
    first, second = ranks.run(one_has_no_memory_for_the_check)
    check([first, second])
    assert not replayed(first)
    assert OTHERS in first["report"]
    assert "memory ran out" in second["report"]


# --- what ranks tell each other ---------------------------------------------------------------


def words(rank):
    together = Together(RankGroup.join(timeout_s=20))
    asked = [
        ((0, 0), True),
        ((-1, -1), True),
        ((-1, 0), False),
        ((1, 1), True),
        ((1, -1), False),
        ((1, 2), False),
        ((1, 0), False),
        ((-1, -1), True),
    ]
    found = [together.meet(would[rank]) is same for would, same in asked]
    together.begin()
    if rank == 0:
        together.fail()
    else:
        with pytest.raises(CaptureError, match="another rank could not capture"):
            together.go_on()
    return all(found), together.num_captures, [d.detail for d in together.decisions()]


def test_ranks_hear_the_same():
    first, second = ranks.run(words)
    assert first == second
    agreed, num_captures, told = first
    assert agreed
    assert num_captures == 2
    assert [text.split(" steps")[0] for text in told] == ["1", "2", "1"]


@pytest.mark.parametrize(("num_apart", "num_all", "is_told"), [(20, 60, True), (20, 200, False)])
def test_a_warning_is_for_ranks_that_differ_often(num_apart, num_all, is_told, caplog):
    class Two:
        size = 2

        def span(self, value):
            return (0, 1) if value else (0, 0)

    together = Together(Two())
    for number in range(num_all):
        together.meet(int(number >= num_all - num_apart))
    for _ in range(3):
        together.meet(1)
    told = [r.getMessage() for r in caplog.records if "since the ranks differed" in r.getMessage()]
    assert len(told) == is_told

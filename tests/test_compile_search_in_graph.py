"""Where a graph will hold the step, a search times replays."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import _get_current_dispatch_mode

from compiled_training import BATCHES, Deep, compiled_in
from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from planting import TEXT
from search_lab import CPU, Lab, statuses
from stepping import make_trainer
from tape import counts
from torchfast import CompiledModule, CompileOptions, MicroBatches, Plan, Trainer
from torchfast._core.compare import differences
from torchfast._core.errors import CaptureError
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast.compiler import mode_search
from torchfast.compiler.candidates import ModeChoice
from torchfast.compiler.receipts import Receipt
from torchfast.graphs.options import CUDAGraphOptions
from torchfast.graphs.trials import GraphTrials

# -- A search among fakes --------------------------------------------------------------------------


class FakeGraphs:
    """Captures what is in force in a lab; a replay takes as long as was said for it."""

    def __init__(self, lab, seconds, cannot=()):
        self.lab, self.seconds, self.cannot = lab, seconds, cannot
        self.captured, self.replayed, self.num_closed = [], [], 0

    def capture(self):
        name = self.lab.in_force or "eager"
        self.captured.append(name)
        if name in self.cannot:
            raise CaptureError("the step was not captured: it waits")

        def replay():
            assert not self.num_closed
            self.replayed.append(name)
            self.lab.now += self.seconds[name]

        return replay

    def close(self):
        self.num_closed += 1


def searched(lab, seconds, **options):
    """Search where "whole" loses when it is launched."""
    graphs = FakeGraphs(lab, seconds, **options)
    receipt = lab.search(lab.candidate("blocks", 0.9), lab.candidate("whole", 1.4), graphs=graphs)
    assert graphs.num_closed == 1
    return receipt, graphs


def test_what_is_slower_launched_is_chosen_where_its_replay_is_faster():
    seconds = {"eager": 0.8, "blocks": 0.75, "whole": 0.6}
    receipt, graphs = searched(Lab(), seconds)
    assert receipt.choice == "whole"
    assert receipt["whole"].ratio == pytest.approx(0.75)
    assert receipt["whole"].median_ms == pytest.approx(600.0)
    assert all(c.is_replayed for c in receipt.candidates)
    assert graphs.captured == ["eager", "blocks", "whole"]
    assert any("timed as replays of a CUDA graph" in note for note in receipt.notes)
    assert Receipt.from_json(receipt.to_json()) == receipt
    without = Lab()
    receipt = without.search(without.candidate("whole", 1.4))
    assert receipt.choice == "eager"
    assert not any(c.is_replayed for c in receipt.candidates)


def test_what_is_timed_by_replays_is_not_launched_meanwhile():
    lab = Lab()
    _, graphs = searched(lab, dict.fromkeys(("eager", "blocks", "whole"), 0.5))
    first = graphs.replayed[0]
    assert {"eager", "blocks", "whole"} == set(graphs.replayed)
    assert first in graphs.captured
    launched = len(lab.log)
    lab = Lab()
    lab.search(lab.candidate("blocks", 0.9), lab.candidate("whole", 1.4))
    assert launched < len(lab.log) / 2


def test_what_cannot_be_captured_is_timed_as_it_is_and_that_is_said():
    seconds = {"eager": 0.8, "blocks": 0.6}
    receipt, graphs = searched(Lab(), seconds, cannot=("whole",))
    assert receipt.choice == "blocks"
    assert set(statuses(receipt).values()) == {"measured"}
    assert receipt["whole"].median_ms == pytest.approx(1400.0)
    assert not receipt["whole"].is_replayed
    assert receipt["whole"].reason.startswith("timed launched kernel by kernel")
    assert "it waits" in receipt["whole"].reason
    assert receipt["blocks"].reason == ""
    assert "whole" not in graphs.replayed


def test_where_the_reference_cannot_be_captured_all_are_launched_and_that_is_said():
    receipt, graphs = searched(Lab(), {}, cannot=("eager",))
    assert receipt.choice == "blocks"
    assert receipt["whole"].median_ms == pytest.approx(1400.0)
    assert graphs.captured == ["eager"]  # nor would the others be
    assert not any(c.is_replayed for c in receipt.candidates)
    assert "it waits" in receipt["eager"].reason
    assert any("all were timed launched" in note for note in receipt.notes)
    assert not any("timed as replays" in note for note in receipt.notes)


def test_the_graphs_are_let_go_of_whatever_happens():
    lab = Lab()
    graphs = FakeGraphs(lab, {"eager": 1.0})

    def interrupted():
        raise KeyboardInterrupt

    graphs.capture = interrupted
    with pytest.raises(KeyboardInterrupt):
        lab.search(graphs=graphs)
    assert graphs.num_closed == 1


# -- Captures on tape ------------------------------------------------------------------------------


class Work:
    """Forward and backward of a model, done in one of two ways."""

    def __init__(self, model):
        self.model, self.factor, self.kept = model, 1.0, []

    def __call__(self, batch):
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = mean_loss(self.model, batch) * self.factor
        self.kept.append(loss)  # as a step keeps what it has found until it is told to forget
        loss.backward()
        return loss.detach()


def made(model, work, batch, **options):
    return GraphTrials(
        work,
        batch,
        model=model,
        found=[],
        options=CUDAGraphOptions(**options),
        device=CPU,
        after_failure=work.kept.clear,
    )


@pytest.mark.parametrize("net", [DropoutNet, BatchNormNet])
def test_a_replay_does_what_the_work_does(tape, net):
    torch.manual_seed(0)
    model = net()
    work = Work(model)
    batch = make_batches(1)[0]
    with made(model, work, batch) as graphs:
        replay = graphs.capture()
        before = copy.deepcopy(model.state_dict()), get_rng_state(CPU)
        work(batch)
        expected = copy.deepcopy(model.state_dict()), get_rng_state(CPU)
        model.load_state_dict(before[0])
        set_rng_state(before[1], CPU)
        calls = len(work.kept)
        replay()
        assert len(work.kept) == calls  # no Python of it ran
        assert differences(expected, (model.state_dict(), get_rng_state(CPU))) == []
        assert differences(expected, before) != []


def test_all_captures_share_one_backend_and_are_closed_with_what_the_work_kept(tape):
    model = DropoutNet()
    work = Work(model)
    graphs = made(model, work, make_batches(1)[0])
    replays = [graphs.capture(), graphs.capture()]
    assert len(tape) == 1
    assert tape[0].num_captures == 2
    assert all(p.grad is None for p in model.parameters())  # which another graph may write over
    held = [replay.__self__.graph for replay in replays]
    for replay in replays:
        replay()
    graphs.close()
    assert [graph.tape for graph in held] == [None, None]
    assert work.kept == []
    graphs.close()


def test_what_cannot_be_captured_says_why_and_leaves_nothing(tape):
    class Asks(DropoutNet):
        def forward(self, x):
            y = super().forward(x)
            return y if float(y.detach().abs().sum()) > -1 else -y

    model = Asks()
    work = Work(model)
    with made(model, work, make_batches(1)[0]) as graphs:
        with pytest.raises(CaptureError, match="host waits"):
            graphs.capture()
        assert work.kept == []
        assert not torch.cuda.is_current_stream_capturing()


def test_what_changes_at_each_call_is_not_waited_for_for_ever(tape):
    model = DropoutNet()
    model.number = 0
    work = Work(model)

    def restless(batch):
        model.number += 1
        model.layers[0].weight.data = model.layers[0].weight.data.clone()
        return work(batch)

    with made(model, work, make_batches(1)[0]) as graphs:
        graphs._work = restless
        with pytest.raises(CaptureError):
            graphs.capture()


# -- A trainer -------------------------------------------------------------------------------------


@pytest.fixture
def two_ways(monkeypatch):
    """Let a search try eager and one way that is compiled quickly."""

    def choices(device, *, has_blocks, outer_graph):
        return [ModeChoice("eager", None, None), ModeChoice("whole: default", "default", "whole")]

    compile_ = torch.compile
    monkeypatch.setattr(mode_search, "mode_choices", choices)
    monkeypatch.setattr(
        torch, "compile", lambda f, *, backend, **kwargs: compile_(f, backend="eager", **kwargs)
    )
    found = []
    search = mode_search.search

    def noted(*args, **kwargs):
        found.append(search(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(mode_search, "search", noted)
    return found


EXACT = Plan.preset("exact")
AUTO = CompileOptions(mode="auto", budget_s=5.0)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("net", [Deep, DropoutNet, BatchNormNet])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_captured_step_is_searched_by_replays_and_trains_as_ever(tape, two_ways, net, accumulate):
    batches = make_batches(8)
    groups = [batches[i : i + accumulate] for i in range(0, 8, accumulate)]
    plans = (EXACT.replace(compile=AUTO), Plan(cuda_graph=False))
    losses = []
    for plan in plans:
        torch.manual_seed(0)
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, mean_loss, plan, accumulate=accumulate)
        torch.manual_seed(1)
        losses.append([trainer.step(g[0] if accumulate == 1 else MicroBatches(g)) for g in groups])
        if not losses[1:]:
            (receipt,) = two_ways
            assert all(c.is_replayed for c in receipt.candidates), str(receipt)
            assert "mode 'auto' took" in compiled_in(trainer)[0].detail
            if accumulate == 1:
                assert counts(trainer)[1] > 0  # and the step was captured after it
            trainer.close()
    assert torch.equal(*map(torch.stack, losses))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_that_is_not_captured_is_searched_by_launches(tape, two_ways):
    trainer = make_trainer(plan=EXACT.replace(compile=AUTO, cuda_graph=False))
    trainer.step(BATCHES[0])
    (receipt,) = two_ways
    assert not any(c.is_replayed for c in receipt.candidates)
    assert not any("timed" in note for note in receipt.notes)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_that_cannot_be_captured_is_searched_by_launches_and_says_so(tape, two_ways, caplog):
    class Asks(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if float(y.detach().abs().sum()) > -1 else -y

    with caplog.at_level(logging.INFO):
        trainer = make_trainer(net=lambda: Asks(8, 4), plan=EXACT.replace(compile=AUTO))
        trainer.step(BATCHES[0])
    (receipt,) = two_ways
    assert not any(c.is_replayed for c in receipt.candidates)
    assert any("all were timed launched" in note for note in receipt.notes)
    assert "host waits" in receipt["eager"].reason


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fails", ["trials", "trials and the step"])
def test_trials_that_run_out_of_memory_leave_the_warning_to_the_step(tape, two_ways, caplog, fails):
    class Large(nn.Linear):
        has_room = False

        def forward(self, x):
            if not self.has_room and _get_current_dispatch_mode() is not None:
                raise torch.OutOfMemoryError(TEXT)
            return super().forward(x)

    trainer = make_trainer(net=lambda: Large(8, 4), plan=EXACT.replace(compile=AUTO))
    trainer.step(BATCHES[0])
    (receipt,) = two_ways
    assert not any(c.is_replayed for c in receipt.candidates)
    assert "memory ran out" in receipt["eager"].reason
    assert trainer._step.memory.last_account is None
    trainer.model.has_room = fails == "trials"
    for batch in BATCHES:
        trainer.step(batch)
    told = [r.getMessage() for r in caplog.records if r.name == "torchfast.memory.out_of_memory"]
    counters = trainer.report().counters
    if fails == "trials":
        assert told == []
        assert "captures_out_of_memory" not in counters
        assert counters["graphs"] == 1
        return
    assert told == [str(trainer._step.memory.last_account)]
    assert counters["captures_out_of_memory"] == 1
    assert counters["graphs"] == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_search_of_a_handle_launches_and_leaves_all_as_it_was(two_ways):
    model = BatchNormNet()
    model.head.bias.grad = torch.ones(4)
    before = copy.deepcopy(model.state_dict()), get_rng_state(CPU)
    with CompiledModule(model, mode="auto", budget_s=5.0) as compiled:
        receipt = compiled.search(mean_loss, BATCHES[0])
        assert [c.status for c in receipt.candidates] == ["measured", "measured"]
        assert not any(c.is_replayed for c in receipt.candidates)
        assert differences(before, (model.state_dict(), get_rng_state(CPU))) == []
        assert torch.equal(model.head.bias.grad, torch.ones(4))
        assert model.conv.weight.grad is None
        assert compiled.is_compiled == (receipt.choice != "eager")

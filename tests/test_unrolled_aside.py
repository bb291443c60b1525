"""Steps that are given together and run one by one: why, with what numbers, and what fails."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from models import make_batches, mean_loss
from stepping import make_trainer
from tape import CPU, counts, reasons
from torchfast import (
    CaptureError,
    CompileOptions,
    CUDAGraphOptions,
    OffloadOptions,
    OutOfMemoryError,
    Plan,
    StepBatches,
)
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state
from torchfast.graphs.unrolled_update import UnrolledUpdate
from torchfast.unrolled import UnrolledSteps
from unrolling import Both, K, micro, said

FUSED = partial(optim.AdamW, lr=0.01, fused=True)


class Halving:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.num_calls = 0

    def step(self):
        self.num_calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state):
        self.num_calls = state["num_calls"]


def ends_alike(both, batches, error, message):
    """Take steps both ways, of which one raises, and compare all that they leave."""

    def singly(trainer):
        for batch in batches:
            trainer.step(batch)

    ways = (singly, lambda trainer: trainer.steps(StepBatches(batches)))
    for number, (trainer, way) in enumerate(zip(both.trainers, ways, strict=True)):
        torch.manual_seed(7)
        with pytest.raises(error, match=message):
            way(trainer)
        both.rng[number] = get_rng_state(CPU)
    both.check()


# --- for good -------------------------------------------------------------------------------------

GRAPH = Plan(cuda_graph=True)
NEVER = {
    "the update is not in the graph": {"optimizer": partial(optim.AdamW, lr=0.01)},
    "out_of_memory='split'": {"plan": GRAPH.replace(out_of_memory="split")},
    "what is offloaded": {"plan": GRAPH.replace(offload=OffloadOptions(activations=True))},
    "time_phases": {"plan": GRAPH.replace(cuda_graph=CUDAGraphOptions(time_phases=True))},
    "Halving is not an LRScheduler": {"lr_scheduler": lambda optimizer: Halving(optimizer)},
}


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("why", NEVER)
def test_what_needs_the_host_between_steps_runs_them_one_by_one(why, caplog):
    both = Both(**{"optimizer": FUSED, **NEVER[why]})
    caplog.clear()
    both.run(make_batches(4 * K))
    ((outcome, detail),) = said(both.several)
    assert outcome == "stepped aside"
    assert detail.startswith(f"steps that are given together run one by one: {why}")
    assert both.unrolled == (0, 0)
    told = [r.getMessage() for r in caplog.records if "given together" in r.getMessage()]
    assert len(told) == 1
    assert why in told[0]


@pytest.mark.parametrize("plan", ["exact", "eager"])
def test_without_graphs_nothing_is_warned_of(plan, caplog):
    both = Both(plan=plan, max_grad_norm=0.1, lr_scheduler=partial(schedulers.StepLR, step_size=3))
    caplog.clear()
    both.run(make_batches(4 * K))
    ((outcome, detail),) = said(both.several)
    assert outcome == "left alone"
    assert detail.endswith("there is no graph of a step, see cuda_graph")
    assert not caplog.records


OF_PLANS = {
    "ranks agree before each step": {"shard": "ddp"},
    "float8 looks at batches": {"precision": "fp8"},
    "the update is compiled": {"compile": CompileOptions(update=True)},
}


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("why", OF_PLANS)
def test_what_a_plan_does_between_steps_runs_them_one_by_one(why):
    """Without doing it, which takes a GPU, several processes or a compiler."""
    step = make_trainer(FUSED)._step
    unrolled = UnrolledSteps(
        step.plan.replace(**OF_PLANS[why]),
        step.optimizer,
        None,
        average=step._average,
        compiled=step._compiled,
        memory=step.memory,
        graph=step._graph,
    )
    assert unrolled(tuple((batch,) for batch in make_batches(K))) is None
    (decision,) = unrolled.decisions()
    assert why in decision.detail


def test_who_never_gives_several_steps_reads_nothing_of_them():
    trainer = make_trainer()
    trainer.step(make_batches(1)[0])
    assert said(trainer) == []
    assert "unrolled steps" not in trainer.report().to_dict()["counters"]


# --- for now --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tape")
def test_a_shorter_last_group_runs_one_by_one():
    both = Both(lr_scheduler=partial(schedulers.StepLR, step_size=3))
    for epoch in range(4):
        both.run(make_batches(3 * K + 2, seed=epoch))
    assert both.unrolled == (11, 11 * K)
    assert counts(both.several) == (2, 1 + 11 + 4 * 2, 3, 2)
    assert "8 one by one (groups of fewer steps than others, or of one)" in said(both.several)[0][1]


@pytest.mark.usefixtures("tape")
def test_a_group_of_batches_of_several_shapes_runs_one_by_one():
    both = Both()
    full, small = make_batches(7 * K), make_batches(2 * K, size=3, seed=1)
    both.run(full[: 3 * K])
    both.steps(*full[3 * K : 4 * K - 1], small[0])
    both.steps(*full[4 * K : 5 * K - 1], small[1])
    both.run(full[5 * K :])
    assert both.unrolled == (4, 4 * K)
    assert "8 one by one (batches of different shapes" in said(both.several)[0][1]
    both.run([small[0]] * 2 + small)  # of its own shape it gets a graph of its own
    both.run(make_batches(K, size=3, seed=2))
    assert both.unrolled == (4 + 2, 6 * K)


@pytest.mark.usefixtures("tape")
def test_a_tensor_that_stands_in_two_batches_of_a_group_runs_it_one_by_one():
    both = Both()
    batches = make_batches(3 * K)
    both.run(batches)
    both.steps(*batches[: K - 1], batches[0])
    assert both.unrolled == (2, 2 * K)


@pytest.mark.usefixtures("tape")
def test_a_tensor_that_stands_twice_in_each_batch_does_no_harm():
    def loss_fn(model, batch):
        (inputs, targets), again = batch
        return mean_loss(model, (inputs + again, targets))

    both = Both(loss_fn=loss_fn)
    both.run([(batch, batch[0]) for batch in make_batches(4 * K)])
    assert both.unrolled == (3, 3 * K)


@pytest.mark.usefixtures("tape")
def test_a_short_last_group_of_micro_batches_runs_one_by_one():
    both = Both(accumulate=2)
    batches = make_batches(8 * K - 1)
    both.run(micro(batches))
    assert both.unrolled == (2, 2 * K)


@pytest.mark.usefixtures("tape")
def test_no_graph_is_thrown_out_for_several_steps():
    both = Both(plan=Plan(cuda_graph=CUDAGraphOptions(max_graphs=1)))
    both.run(make_batches(4 * K))
    assert both.unrolled == (0, 0)
    assert counts(both.several) == (1, 4 * K - 3, 3, 1)
    assert "one by one (max_graphs graphs are kept already)" in said(both.several)[0][1]


@pytest.mark.usefixtures("tape")
def test_new_shapes_that_run_eagerly_do_so_in_groups_too():
    both = Both(plan=Plan(cuda_graph=CUDAGraphOptions(new_shapes="eager")))
    both.run(make_batches(4 * K))
    both.run(make_batches(2 * K, size=3))
    assert both.unrolled == (3, 3 * K)
    assert counts(both.several) == (2, 1 + 3, 3 + 2 * K, 2)


def without_optimizer(trainer):
    return list(trainer.model.parameters())[2:]


@pytest.mark.usefixtures("tape")
def test_gradients_that_nobody_zeroes_are_added_to_in_groups_too():
    """Of parameters that stand in no optimizer."""
    both = Both(lambda params: FUSED(list(params)[:2]))
    both.run(make_batches(8 * K))
    for pair in zip(*map(without_optimizer, both.trainers), strict=True):
        assert not differences(*(p.grad for p in pair))
    assert both.unrolled == (7, 7 * K)


@pytest.mark.usefixtures("tape")
def test_gradients_that_come_and_go_are_added_to_one_by_one():
    """To capture again and again would not pay."""
    both = Both(lambda params: FUSED(list(params)[:2]))
    for group in range(8):
        both.steps(*make_batches(K, seed=group))
        for pair in zip(*map(without_optimizer, both.trainers), strict=True):
            assert not differences(*(p.grad for p in pair))
        both.both(lambda trainer: [setattr(p, "grad", None) for p in without_optimizer(trainer)])
    assert both.unrolled == (0, 0)
    assert "gradients that the step adds to were replaced" in " ".join(reasons(both.several))


# --- schedules that do more -----------------------------------------------------------------------


class Decaying(schedulers.LRScheduler):
    """Sets the weight decay too, at some steps."""

    def __init__(self, optimizer, at):
        self.at = at
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch in self.at:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = self.at[self.last_epoch]
        return [0.01 / (1 + self.last_epoch) for _ in self.optimizer.param_groups]


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("step", range(12 * K, 13 * K + 1))
def test_a_schedule_that_sets_another_hyperparameter_is_followed(step):
    both = Both(lr_scheduler=partial(Decaying, at={step: 0.4}))
    both.run(make_batches(16 * K))
    assert both.unrolled == (14, 14 * K)
    # Where the change falls between two groups, none of them is broken up by it.
    assert ("the schedule changed more" in said(both.several)[0][1]) == (step % K != 0)


@pytest.mark.usefixtures("tape")
def test_one_that_sets_it_and_sets_it_back_within_a_group_is_followed():
    both = Both(lr_scheduler=partial(Decaying, at={9: 0.9, 10: 0.1}))
    both.run(make_batches(4 * K))
    assert both.unrolled[0] > 0


@pytest.mark.usefixtures("tape")
def test_a_schedule_that_cycles_momentum_moves_the_update_out_of_the_graph():
    cycle = partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=60)
    both = Both(lr_scheduler=cycle)
    both.run(make_batches(5 * K))
    assert both.unrolled == (0, 0)
    ((outcome, detail),) = said(both.several)
    assert (outcome, detail.rpartition(": ")[2]) == (
        "stepped aside",
        "the update is not in the graph, see cuda_graph",
    )


@pytest.mark.usefixtures("tape")
def test_a_schedule_that_ends_within_a_group_raises_where_it_ends():
    short = partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=10, cycle_momentum=False)
    both = Both(lr_scheduler=short)
    batches = make_batches(3 * K)
    both.run(batches[: 2 * K])
    ends_alike(both, batches[2 * K :], ValueError, "Tried to step 11 times")
    assert both.several.num_steps == 11


@pytest.mark.usefixtures("tape")
def test_a_rate_on_the_device_that_a_schedule_writes_to_is_followed():
    def build(params):
        return optim.AdamW(params, lr=torch.tensor(0.01), capturable=True, foreach=False)

    both = Both(build, plan="fast", lr_scheduler=partial(schedulers.ExponentialLR, gamma=0.9))
    both.run(make_batches(4 * K))
    assert both.unrolled == (0, 0)


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("tape")
def test_an_error_of_the_users_leaves_what_was_done_before_it():
    class Moody:
        is_bad = False

        def __call__(self, model, batch):
            if self.is_bad and int(batch[1][0]) == 3:
                raise KeyError("moody")
            return mean_loss(model, batch)

    moody = Moody()
    both = Both(loss_fn=moody, lr_scheduler=partial(schedulers.ExponentialLR, gamma=0.9), ema=0.9)
    batches = [
        (inputs, targets.index_fill(0, torch.tensor([0]), 3 if place % K == 2 else 1))
        for place, (inputs, targets) in enumerate(make_batches(3 * K))
    ]
    both.run(batches[: 2 * K])
    moody.is_bad = True  # which is noticed, so nothing is replayed until it was captured again
    ends_alike(both, batches[2 * K :], KeyError, "moody")
    assert both.several.num_steps == 2 * K + 2


def failing(self, groups):
    raise RuntimeError("no room for several")


@pytest.mark.usefixtures("tape")
def test_several_steps_that_cannot_be_captured_run_one_by_one(monkeypatch, caplog):
    monkeypatch.setattr(UnrolledUpdate, "__call__", failing)
    both = Both(lr_scheduler=partial(schedulers.ExponentialLR, gamma=0.9), ema=0.9)
    caplog.clear()
    both.run(make_batches(6 * K))
    assert both.unrolled == (0, 0)
    assert counts(both.several) == (1, 6 * K - 3, 3, 1)
    (reason,) = reasons(both.several)
    assert reason.startswith(
        f"{K} steps of 6x8 float32, 6 int64: RuntimeError: no room for several"
    )
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1
    assert "run one by one: RuntimeError: no room for several" in told[0]


@pytest.mark.usefixtures("tape")
def test_strict_raises_where_several_steps_cannot_be_captured(monkeypatch):
    monkeypatch.setattr(UnrolledUpdate, "__call__", failing)
    both = Both(plan=Plan(cuda_graph=CUDAGraphOptions(on_failure="raise")))
    batches = make_batches(3 * K)
    both.run(batches[:K])
    with pytest.raises(CaptureError, match=r"4 steps of .* was not captured: .*no room"):
        both.several.steps(StepBatches(batches[K : 2 * K]))
    both.run(batches[K:])  # the state is as it was before


@pytest.mark.usefixtures("tape")
def test_a_graph_of_several_steps_that_computes_something_else_is_not_used(monkeypatch):
    run = UnrolledUpdate.__call__
    num_calls = 0

    def wrong(self, groups):
        nonlocal num_calls
        num_calls += 1
        return run(self, groups[::-1] if num_calls == 1 else groups)

    monkeypatch.setattr(UnrolledUpdate, "__call__", wrong)
    both = Both()
    both.run(make_batches(4 * K))
    assert both.unrolled == (0, 0)
    assert "2 replays and 2 eager steps" in reasons(both.several)[0]


@pytest.mark.usefixtures("tape")
def test_a_replay_that_fails_leaves_the_schedule_as_it_was(monkeypatch):
    both = Both(lr_scheduler=partial(schedulers.ExponentialLR, gamma=0.9))
    batches = make_batches(4 * K)
    both.run(batches[: 2 * K])
    with monkeypatch.context() as patch:
        patch.setattr(UnrolledUpdate, "_replayed", failing)
        with pytest.raises(RuntimeError, match="no room"):
            both.several.steps(StepBatches(batches[2 * K : 3 * K]))
    both.run(batches[2 * K :])


@pytest.mark.usefixtures("tape")
def test_a_replay_that_memory_does_not_suffice_for_has_an_account(monkeypatch):
    def out_of_memory(self, ready):
        raise torch.OutOfMemoryError("no room")

    both = Both(lr_scheduler=partial(schedulers.ExponentialLR, gamma=0.9))
    batches = make_batches(4 * K)
    both.run(batches[: 2 * K])
    with monkeypatch.context() as patch:
        patch.setattr(UnrolledUpdate, "_replayed", out_of_memory)
        with pytest.raises(OutOfMemoryError) as caught:
            both.several.steps(StepBatches(batches[2 * K : 3 * K]))
    assert caught.value.account is not None
    both.run(batches[2 * K :])

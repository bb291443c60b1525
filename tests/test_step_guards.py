"""Plan(sync_guard=...) finds the waits of a trainer's steps, and only those that Python runs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from torchfast import CUDAGraphOptions, HostSyncError, Plan, PlanError, SyncGuard, Trainer

ONE = torch.ones(())
BATCH = torch.arange(12.0).reshape(3, 4)


def clean(model, batch):
    return model(batch).square().mean()


def reading(model, batch):
    loss = model(batch).square().mean()
    return loss, {"loss": loss.item()}


LINE = reading.__code__.co_firstlineno + 2


def make(loss_fn, plan, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, loss_fn, plan, **options)


def test_off_is_nothing():
    trainer = make(reading, "eager")
    trainer.step(BATCH)
    assert trainer.sync_report is None
    assert "sync_guard" not in str(trainer.report())
    assert "item" not in vars(torch.Tensor)


def test_record_names_the_line_in_the_report():
    with make(reading, Plan(sync_guard="record")) as trainer:
        for _ in range(3):
            trainer.step(BATCH)
        (sync,) = trainer.sync_report.syncs
        assert (sync.file, sync.line, sync.kind, sync.count) == (__file__, LINE, "item", 3)
        detail = f"item at test_step_guards.py:{LINE}, in reading: return loss, "
        assert detail in str(trainer.report())
        assert " ms" not in str(trainer.report())  # on the CPU nothing waits
        assert trainer.report().counters["host_syncs"] == 3
    assert "item" not in vars(torch.Tensor)


def test_a_guarded_run_has_the_same_numbers():
    plain, guarded = make(reading, Plan()), make(reading, Plan(sync_guard="record"))
    for _ in range(3):
        assert torch.equal(plain.step(BATCH), guarded.step(BATCH))
    guarded.close()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_a_clean_step_is_silent(max_grad_norm, nonfinite):
    plan = Plan(sync_guard="raise", nonfinite=nonfinite)
    with make(clean, plan, max_grad_norm=max_grad_norm) as trainer:
        for _ in range(3):
            trainer.step(BATCH)
        assert not trainer.sync_report
        assert "at no line" in str(trainer.report())


def test_raise_comes_from_the_step():
    with make(reading, Plan(sync_guard="raise")) as trainer:
        before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        with pytest.raises(HostSyncError, match=f"item at test_step_guards.py:{LINE}"):
            trainer.step(BATCH)
        assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
        assert trainer.num_steps == 0


def test_warn_says_it_once(caplog):
    with make(reading, Plan(sync_guard="warn")) as trainer, caplog.at_level(logging.WARNING):
        for _ in range(3):
            trainer.step(BATCH)
    assert len([r for r in caplog.records if "the host waits" in r.getMessage()]) == 1


def test_both_halves_are_watched():
    with make(reading, Plan(sync_guard="record")) as trainer:
        trainer.forward_backward(BATCH)
        trainer.update()
        assert trainer.sync_report.count == 1


def test_the_optimizers_own_waits_are_found():
    class Reads(torch.optim.SGD):
        def step(self, closure=None):
            self.norm = self.param_groups[0]["params"][0].grad.norm().item()
            return super().step(closure)

    model = nn.Linear(4, 2)
    with Trainer(model, Reads(model.parameters(), lr=0.1), clean, Plan(sync_guard="record")) as t:
        t.step(BATCH)
        assert [(s.function, s.kind) for s in t.sync_report.syncs] == [("step", "item")]


def test_what_is_done_between_steps_is_not_the_steps():
    with make(clean, Plan(sync_guard="record")) as trainer:
        for _ in range(3):
            trainer.step(BATCH).item()
        assert not trainer.sync_report


def test_warm_up_steps_are_watched_and_replays_are_not(tape):
    calls = []

    def reads_at_first(model, batch):
        calls.append(len(calls))
        if len(calls) <= 2:
            batch.sum().item()
        return model(batch).square().mean()

    plan = Plan(cuda_graph=CUDAGraphOptions(warm_up_steps=2), sync_guard="record")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, optimizer, reads_at_first, plan) as trainer:
        for _ in range(8):
            trainer.step(BATCH)
        assert trainer.report().counters["replays"] > 0
        assert len(calls) < 8
        # The tape reads, too, where it plays an operator by itself.
        (sync,) = [s for s in trainer.sync_report.syncs if s.file == __file__]
        assert (sync.kind, sync.count, sync.function) == ("item", 2, "reads_at_first")


def test_a_step_that_cannot_be_captured_for_a_wait_is_counted_once_a_step(tape):
    def masked(model, batch):
        return model(batch).square().mean() + 0 * batch[batch > 100].sum()

    plan = Plan(cuda_graph=CUDAGraphOptions(warm_up_steps=2), sync_guard="record")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, optimizer, masked, plan) as trainer:
        for _ in range(8):
            trainer.step(BATCH)
        assert trainer.report().counters["replays"] == 0
        assert [(s.kind, s.count) for s in trainer.sync_report.syncs] == [("boolean mask", 8)]


def test_the_guard_is_found_in_compiled_code(fresh_dynamo):
    from torchfast import CompileOptions

    plan = Plan(compile=CompileOptions(backend="aot_eager"), sync_guard="record")
    with make(reading, plan) as trainer:
        for _ in range(3):
            trainer.step(BATCH)
        assert {(s.line, s.kind) for s in trainer.sync_report.syncs} == {(LINE, "item")}


def test_a_plan_knows_its_modes():
    assert Plan.from_json(Plan(sync_guard="warn").to_json()) == Plan(sync_guard="warn")
    with pytest.raises(PlanError, match="sync_guard must be one of"):
        Plan(sync_guard="shout")


def test_fit_hears_what_runs_between_its_steps():
    batches = [torch.ones(3, 4) for _ in range(6)]

    def callback(event):
        if event.kind == "step":
            event.loss.item()  # callbacks

    def transform(batch):
        return batch / batch.max().item()  # transform

    def count(batch):
        return int(batch.sum())  # count_items

    def evaluate(model):
        return {"loss": model(batches[0]).mean().item()}

    def where(text):
        lines = Path(__file__).read_text().split("\n")
        return 1 + next(n for n, line in enumerate(lines) if line.endswith(f"# {text}"))

    with make(clean, Plan(sync_guard="record")) as trainer:
        loader = trainer.prefetch(batches, transform=transform)
        trainer.fit(
            loader,
            steps=6,
            log_every=2,
            callbacks=[callback],
            count_items=count,
            evaluate=evaluate,
            evaluate_every=2,
            progress=False,
        )
        found = {(s.line, s.kind, s.during, s.count) for s in trainer.sync_report.syncs}
        assert found == {
            (where("callbacks"), "item", "callbacks", 6),
            (where("transform"), "item", "transform", 6),
            (where("count_items"), "int", "count_items", 6),
        }
        assert "in callback (of callbacks): event.loss.item()" in str(trainer.sync_report)


def test_what_fit_reads_itself_and_what_loaders_read_on_the_host_is_silent(tmp_path):
    def load():
        for _ in range(4):
            yield torch.ones(3, 4) * torch.ones(2).sum().item()

    events = []
    with make(clean, Plan(sync_guard="raise"), max_grad_norm=1.0) as trainer:
        trainer.fit(
            load(),
            steps=4,
            log_every=1,
            callbacks=[lambda event: events.append(event.kind)],
            log_path=tmp_path / "log.jsonl",
            checkpoint=tmp_path / "kept",
            checkpoint_every=2,
            evaluate=[torch.ones(3, 4)],
            progress=False,
        )
        assert events.count("step") == 4
        assert not trainer.sync_report


def test_raise_comes_from_a_callback():
    def callback(event):
        float(event.loss)

    with make(clean, Plan(sync_guard="raise")) as trainer:
        with pytest.raises(HostSyncError, match=r"float at .* in callback \(of callbacks\)"):
            trainer.fit([torch.ones(3, 4)], steps=3, callbacks=[callback], progress=False)
        assert trainer.num_steps == 1


def test_a_transform_in_a_thread_of_the_loaders_is_heard():
    from torchfast._core.syncs import WATCH

    with SyncGuard(device="cpu") as guard:
        thread = threading.Thread(target=WATCH.heard, args=("transform", torch.Tensor.item, ONE))
        thread.start()
        thread.join()
        other = threading.Thread(target=torch.Tensor.item, args=(ONE,))
        other.start()
        other.join()
    assert [(s.kind, s.during, s.count) for s in guard.report().syncs] == [("item", "transform", 1)]


def test_a_guard_that_is_entered_twice_counts_once():
    guard = SyncGuard(device="cpu")
    with guard, guard:
        ONE.item()
    assert guard.report().count == 1
    guard.close()

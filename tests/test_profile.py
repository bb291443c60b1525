"""profile() and Trainer.profile, on the CPU."""

import os
import time

import pytest
import torch
from torch import nn

import parallel_training
import ranks
from torchfast import Plan, Profile, TraceError, Trainer, profile
from torchfast.profiling.places import Places
from torchfast.profiling.trace import read_trace


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()  # THE LINE


LINE_OF_ITEM = train.__code__.co_firstlineno + 5


def setting():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), [torch.ones(4, 8)] * 50


def test_steps_are_measured_and_the_loop_ends(tmp_path):
    model, optimizer, batches = setting()
    seen = 0
    with profile(tmp_path / "out", steps=3, warmup=2) as profiling:
        for batch in profiling.iterate(batches):
            train(model, optimizer, batch)
            seen += 1

    report = profiling.report

    assert seen == profiling.num_wanted == 2 + 3 + 3
    assert profiling.is_done
    assert report.figures.num_steps == 3
    assert {"backward", "update", "data_wait"} <= set(report.figures.host_phases)
    assert report.trace.memory
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "lines.json.gz",
        "report.html",
        "trace.json.gz",
    ]


def test_the_lines_of_the_users_calls_are_known(tmp_path):
    model, optimizer, batches = setting()
    with profile(tmp_path, steps=1, warmup=1) as profiling:
        for batch in profiling.iterate(batches):
            train(model, optimizer, batch)
    assert profiling.report.figures.num_steps == 1

    lined = read_trace(tmp_path / "lines.json.gz")

    places = Places(lined)
    waits = [s for s in lined.spans if s.name == "aten::item" and s.kind == "op"]
    found = {places.at(wait.thread, wait.start).rsplit("/")[-1] for wait in waits}
    # On a CPU AdamW makes numbers of its step counts; those lines are torch's, so its caller's.
    assert found == {f"test_profile.py:{line}" for line in (LINE_OF_ITEM - 1, LINE_OF_ITEM)}


def test_without_lines_there_are_no_more_steps(tmp_path):
    model, optimizer, batches = setting()
    with profile(tmp_path, steps=2, warmup=1, lines=False) as profiling:
        for batch in batches:
            train(model, optimizer, batch)
            profiling.step()

    report = profiling.report

    assert profiling.num_wanted == 3
    assert profiling.num_steps == 50
    assert report.figures.num_steps == 2
    assert any("no Python frames" in remark for remark in report.remarks)


@pytest.mark.parametrize(("num", "measured"), [(3, 1), (5, 3)])
def test_a_loop_that_ends_early_says_so(tmp_path, num, measured):
    model, optimizer, batches = setting()
    with profile(tmp_path, steps=10, warmup=2) as profiling:
        for batch in profiling.iterate(batches[:num]):
            train(model, optimizer, batch)

    report = profiling.report

    assert report.figures.num_steps == measured
    assert any(f"10 steps were wanted and {measured} were" in r for r in report.remarks)


@pytest.mark.parametrize("num", [0, 1, 2])
def test_a_loop_that_ends_before_a_step_is_measured(tmp_path, num):
    model, optimizer, batches = setting()
    with profile(tmp_path, steps=10, warmup=2) as profiling:
        for batch in profiling.iterate(batches[:num]):
            train(model, optimizer, batch)

    with pytest.raises(TraceError, match=f"the loop made {num} steps, and the first 2 are not"):
        _ = profiling.report


def test_an_error_in_the_loop_is_the_users(tmp_path):
    model, optimizer, batches = setting()
    profiling = profile(tmp_path, steps=10, warmup=1)

    def loop():
        with profiling:
            for number, batch in enumerate(profiling.iterate(batches)):
                train(model, optimizer, batch)
                if number == 4:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert profiling.report.figures.num_steps == 3
    assert not torch.autograd._profiler_enabled()


def test_step_outside_of_the_with_block():
    with pytest.raises(RuntimeError, match="outside of the with block"):
        profile("unused").step()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be >= 1"),
        ({"warmup": 0}, ValueError, "warmup must be >= 1"),
        ({"steps": 2.0}, TypeError, "steps must be an int"),
        ({"lines": 1}, TypeError, "lines must be True or False"),
        ({"step": 3}, TypeError, "did you mean"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        profile(**arguments)


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("asked", ["1", None])
def test_the_devices_tracing_is_taken_away_after_the_last_stretch(
    tmp_path, monkeypatch, lines, asked
):
    """torch does so in a thread of its own, which a stretch that follows at once would feel."""
    if asked is None:
        monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    else:
        monkeypatch.setenv("TEARDOWN_CUPTI", asked)
    found, stop = [], torch.profiler.profile.stop

    def noting(self):
        found.append(os.environ.get("TEARDOWN_CUPTI"))
        stop(self)

    monkeypatch.setattr(torch.profiler.profile, "stop", noting)
    with profile(tmp_path, steps=2, warmup=1, lines=lines) as profiling:
        for x in profiling.iterate([torch.ones(4)] * 20):
            x.sum()
    assert found == (["0", asked] if lines else [asked])
    assert os.environ.get("TEARDOWN_CUPTI") == asked


def test_profiling_changes_no_number(tmp_path):
    def run(profiled):
        model, optimizer, _ = setting()
        trainer = Trainer(model, optimizer, lambda m, b: m(b).square().mean(), plan="eager")
        batches = list(torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(1)))
        if profiled:
            trainer.profile(batches, steps=3, warmup=2, folder=tmp_path)
        else:
            for batch in batches[:8]:
                trainer.step(batch)
        assert trainer.num_steps == 8
        return model.weight.detach()

    assert torch.equal(run(True), run(False))


def test_a_trainer_goes_through_a_short_loader_again(tmp_path):
    model, optimizer, batches = setting()
    trainer = Trainer(model, optimizer, lambda m, b: m(b).square().mean())

    report = trainer.profile(batches[:2], steps=4, warmup=1, folder=tmp_path)

    assert report.figures.num_steps == 4
    assert "update" in report.figures.host_phases


def test_a_trainer_without_batches(tmp_path):
    model, optimizer, _ = setting()
    trainer = Trainer(model, optimizer, lambda m, b: m(b).square().mean())

    with pytest.raises(TraceError, match="the loop made 0 steps"):
        trainer.profile([], folder=tmp_path)


def test_slow_data_is_found_with_its_line(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            time.sleep(0.001)
            return torch.ones(8)

    model, optimizer, _ = setting()
    with profile(tmp_path, steps=3, warmup=1) as profiling:
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=8):
            train(model, optimizer, batch)
            profiling.step()
            if profiling.is_done:
                break
    here = test_slow_data_is_found_with_its_line.__code__.co_firstlineno + 11

    verdict = profiling.report.verdict

    assert verdict.name == "input-bound"
    assert verdict.line.endswith(f"test_profile.py:{here}")


def test_it_says_where_it_stands(tmp_path):
    assert isinstance(profiling := profile(tmp_path, steps=3, warmup=2, lines=False), Profile)
    assert repr(profiling) == f"Profile({str(tmp_path)!r}, 0 of 5 steps)"


def test_every_device_in_use_is_idle_when_the_measured_steps_begin(monkeypatch, tmp_path):
    waited = []
    with profile(tmp_path, steps=2, warmup=1, lines=False) as profiling:
        for name, fake in {
            "is_initialized": lambda: True,
            "device_count": lambda: 4,
            "memory_reserved": lambda device: device % 2,
            "synchronize": waited.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for _ in profiling.iterate(range(10)):
            torch.ones(2).sum()
        monkeypatch.undo()
    assert waited == [1, 3]


def test_what_a_step_takes_without_a_profiler_is_known(tmp_path):
    """From the steps before it begins, the very first left out."""

    def run(folder, warmup):
        with profile(folder, steps=2, warmup=warmup, lines=False) as profiling:
            for number in range(warmup + 2):
                time.sleep(0.3 if number == 0 else 0.02)
                profiling.step()
        return profiling.report

    report = run(tmp_path / "long", 4)
    assert 0.02e6 <= report.figures.untraced_us < 0.3e6  # not the first, however busy the machine
    assert report.to_dict()["untraced_step_ms"] == report.figures.untraced_us / 1e3
    assert run(tmp_path / "short", 2).figures.untraced_us is None


def test_each_rank_has_a_folder_of_its_own(tmp_path):
    def work(rank):
        trainer = Trainer(
            parallel_training.fresh(),
            parallel_training.OPTIMIZERS["adamw"],
            parallel_training.mean_loss,
            Plan(shard="ddp"),
            max_grad_norm=1.0,
        )
        own = parallel_training.Own(parallel_training.batches(rank))
        report = trainer.profile(own, steps=2, warmup=2, folder=tmp_path, lines=False)
        return report.figures.num_steps, sorted(report.figures.host_phases)

    first, second = ranks.run(work)
    assert first == second
    assert first[0] == 2
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gz"))
    assert found == ["rank0/trace.json.gz", "rank1/trace.json.gz"]

"""profile(), Trainer.profile and the command line, on the CPU."""

import json
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn

import parallel_training
import ranks
import torchfast
from synthetic_trace import SyntheticTrace
from torchfast import Plan, Profile, TraceError, Trainer, profile
from torchfast.__main__ import main
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


# --- the command line ---------------------------------------------------------------------------

SCRIPT = """
import sys, torch
def main(num):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    for _ in range(num):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    print("trained", num, __name__, sys.argv[1:])
if __name__ == "__main__":
    main(int(sys.argv[1]))
    if len(sys.argv) > 2:
        {end}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(end="sys.exit(0)"):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.replace("{end}", end))
        return str(path)

    return written


def test_a_script_as_it_stands(script, tmp_path, capsys):
    path, before = (
        script(),
        (list(sys.argv), list(sys.path), torch.optim.Optimizer.profile_hook_step),
    )

    status = main(["profile", "--steps", "4", "--warmup", "2", "--json", "out.json", path, "20"])

    said = capsys.readouterr().out
    assert status == 0
    assert "trained 20 __main__ ['20']" in said
    assert f"the page is {tmp_path / 'torchfast-profile' / 'report.html'}" in said
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["verdict"]["class"] == "compute-bound"
    assert set(data["verdict"]) >= {"class", "line", "evidence", "lever"}
    assert data["steps"] == 4
    assert set(data["findings"][0]) >= {"kind", "line", "figure"}
    assert (tmp_path / "torchfast-profile" / "report.html").exists()
    assert (sys.argv, sys.path, torch.optim.Optimizer.profile_hook_step) == before


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(None)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('no more')", 1),
        ("raise ValueError('broken')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_status_is_that_of_the_script(script, capsys, end, status):
    assert main(["profile", "--steps=2", "--no-lines", script(end), "20", "x"]) == status

    said = capsys.readouterr()
    assert "time of a step, over 2 steps" in said.out  # what was measured is not lost
    if "broken" in end:
        assert said.err.index("Traceback") < said.err.index("train.py") < said.err.index("broken")
        assert "runpy" not in said.err
        assert "commands.py" not in said.err


def test_options_of_the_script_are_its_own(script, tmp_path, capsys):
    path = script()
    arguments = ["20", "--json", "mine", "--steps", "3", "--out", "here"]

    assert main(["profile", "--steps", "2", "--no-lines", path, *arguments]) == 0

    assert f"trained 20 __main__ {arguments}" in capsys.readouterr().out
    assert not (tmp_path / "mine").exists()
    assert (tmp_path / "torchfast-profile").is_dir()


def test_the_script_can_be_ended(script, capsys):
    assert main(["profile", "--steps=2", "--no-lines", "--stop", script(), "1000000"]) == 0

    said = capsys.readouterr().out
    assert "trained" not in said
    assert "over 2 steps" in said


def test_a_script_with_too_few_steps(script, capsys):
    assert main(["profile", script(), "3"]) == 1

    assert "the loop made 3 steps, and the first 5 are not measured" in capsys.readouterr().err


def test_a_trace_from_the_command_line(tmp_path, capsys):
    made = SyntheticTrace()
    for step in range(3):
        made.step(step, 1000.0 * step, 1000.0 * step + 999)
        made.kernel(1000.0 * step + 10, 1000.0 * step + 900, "ampere_sgemm_128x64_nn")
    path = made.write(tmp_path / "some.json")
    out = tmp_path / "out.json"

    assert main(["profile", str(path), "--json", str(out)]) == 0

    said = capsys.readouterr().out
    assert said.startswith("compute-bound")
    assert json.loads(out.read_text())["findings"][0]["kind"] == "fp32-matmul"
    assert (tmp_path / "some.json.html").exists()


def test_lines_beside_a_trace_are_found(tmp_path, capsys):
    for name in ("trace.json.gz", "lines.json.gz"):
        made = SyntheticTrace()
        for step in range(3):
            begin = 1000.0 * step
            made.step(step, begin, begin + 999)
            made.kernel(begin + 5, begin + 400, "ampere_sgemm_128x64_nn", op="aten::mm")
            if name == "lines.json.gz":
                made.line("train.py:17", begin + 410, begin + 900)
        made.write(tmp_path / name)

    assert main(["profile", str(tmp_path / "trace.json.gz")]) == 0

    assert capsys.readouterr().out.startswith("launch-bound at train.py:17")


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [(None, 2, "is not there"), (b"", 1, "is empty"), (b"x", 1, "is not JSON")],
)
def test_a_trace_that_is_none(tmp_path, capsys, content, status, message):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)

    assert main(["profile", str(path)]) == status

    assert message in capsys.readouterr().err


def test_a_graph_that_comes_round_is_a_step(tmp_path, monkeypatch):
    """A captured step has no update of an optimizer to count."""

    class Graph:
        def replay(self):
            torch.ones(3).sum()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        one, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for _ in range(30):
            one.replay()
            other.replay()
        """)
    )
    monkeypatch.chdir(tmp_path)

    assert main(["profile", "--steps", "4", "--json", "out.json", str(path)]) == 0

    data = json.loads((tmp_path / "out.json").read_text())
    assert data["steps"] == 4
    (ones,) = [o for o in data["operators"] if o["name"] == "aten::ones"]
    assert ones["count"] == 2.0  # both graphs are one step


def test_as_a_module_in_a_process_of_its_own(script, tmp_path):
    command = ["-m", "torchfast", "profile", "--steps=2", "--no-lines", script(), "12", "x"]
    root = torchfast.__file__.rsplit("/", 2)[0]
    run = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    )

    assert run.returncode == 0, run.stderr
    assert "over 2 steps" in run.stdout


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
    assert 0.02e6 <= report.figures.untraced_us < 0.1e6
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

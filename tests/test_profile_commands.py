"""python -m torchfast profile on scripts that are not as simple as a loop with one optimizer."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import torchfast
import warm_python
from torchfast import TraceError, profile
from torchfast.__main__ import main
from torchfast.profiling import profiler


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script with a model and an optimizer, and return the status and the report."""
    monkeypatch.chdir(tmp_path)

    def ran(body, *options, steps=4, arguments=()):
        path = tmp_path / "train.py"
        begin = """
            import os, sys, threading, torch
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            def backward():
                model(torch.ones(2, 4)).sum().backward()
        """
        path.write_text(textwrap.dedent(begin) + textwrap.dedent(body))
        command = ["profile", "--steps", str(steps), "--warmup", "2", "--no-lines", *options]
        status = main([*command, "--json", "out.json", "train.py", *arguments])
        out = tmp_path / "out.json"
        return status, json.loads(out.read_text()) if out.exists() else None

    return ran


def count(data, operator):
    return sum(o["count"] for o in data["operators"] if o["name"] == operator)


def test_a_step_that_calls_its_base_is_counted_once(run):
    status, data = run("""
        class Own(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        optimizer = Own(model.parameters(), lr=0.1)
        for _ in range(20):
            backward()
            optimizer.step()
    """)

    assert (status, data["steps"]) == (0, 4)
    assert count(data, "aten::addmm") == 1.0


class Graph:
    def replay(self):
        torch.ones(3).sum()


def test_replays_for_micro_batches_are_no_steps_of_their_own(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    status, data = run("""
        graph = torch.cuda.CUDAGraph()
        for _ in range(20):
            for _ in range(4):
                backward()
                graph.replay()
            optimizer.step()
    """, "--warmup", "6")  # fmt: skip

    assert status == 0
    assert count(data, "aten::ones") == 4 + 4.0  # one of the graph's, one of the batch's


def test_replays_after_updates_of_a_warm_up_are_steps(run, monkeypatch):
    """An update that was captured is not seen again."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    status, data = run("""
        graph = torch.cuda.CUDAGraph()
        backward()
        optimizer.step()
        for _ in range(20):
            graph.replay()
    """)

    assert (status, data["steps"]) == (0, 4)
    assert count(data, "aten::ones") == 1.0


def test_updates_of_other_threads_do_not_move_the_profiler(run, capsys):
    status, data = run("""
        def update():
            optimizer.step()
        for _ in range(20):
            backward()
            other = threading.Thread(target=update)
            other.start()
            other.join()
    """)

    assert (status, data) == (1, None)
    assert "made no steps that can be counted" in capsys.readouterr().err


COMPILED = {
    "a function": """
        @torch.compile(backend=compiler)
        def update():
            optimizer.step()
    """,
    "its step": """
        update = torch.compile(optimizer.step, backend=compiler)
    """,
    "its step, in place": """
        update = optimizer.step = torch.compile(optimizer.step, backend=compiler)
    """,
    "both of two": """
        other = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1)
        @torch.compile(backend=compiler)
        def update():
            optimizer.step()
            other.step()
    """,
}


@pytest.mark.parametrize("what", COMPILED)
def test_compiled_updates_are_counted_at_the_backward_that_follows(run, capsys, fresh_dynamo, what):
    status, data = run(
        """
        compiled = []
        def compiler(graph, inputs):
            compiled.append(graph)
            return graph.forward
        """
        + COMPILED[what]
        + """
        for _ in range(20):
            for _ in range(3):
                backward()
            update()
            optimizer.zero_grad()
        print("compiled", len(compiled), "times")
        """
    )

    assert (status, data["steps"]) == (0, 4)
    assert count(data, "aten::addmm") == 3.0
    # What counts them is a part of the compiled code: it breaks no graph (torch does, behind each
    # update), and no guard of it fails.
    num = 2 if what == "both of two" else 1
    assert f"compiled {num} times" in capsys.readouterr().out


def test_updates_of_hooks_are_counted_when_the_backward_ends(run):
    """Each parameter has an optimizer of its own, as in a backward that keeps no gradients."""
    status, data = run("""
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        def update(p):
            own[p].step()
            own[p].zero_grad()
        for p in own:
            p.register_post_accumulate_grad_hook(update)
        for _ in range(20):
            backward()
    """)

    assert (status, data["steps"]) == (0, 4)
    assert count(data, "aten::addmm") == 2.0
    assert count(data, "aten::add_") + count(data, "aten::_foreach_add_") == 4.0


def test_updates_of_hooks_on_a_thread_of_autograd_are_counted(run):
    """As on CUDA devices, whose backward has a thread of its own, while the script's waits."""
    status, data = run("""
        def update(*_):
            other = threading.Thread(target=optimizer.step)
            other.start()
            other.join()
        model.weight.register_post_accumulate_grad_hook(update)
        for _ in range(20):
            backward()
    """)

    assert (status, data["steps"]) == (0, 4)
    assert count(data, "aten::addmm") == 1.0


def test_a_script_sees_itself_as_python_shows_it(run, capsys, tmp_path):
    status, data = run("""
        os.makedirs("away")
        os.chdir("away")
        print([__file__, sys.path[0], sys.argv, sys.modules["__main__"].model is model])
        for _ in range(20):
            backward()
            optimizer.step()
    """, arguments=["--lr", "1"])  # fmt: skip

    assert (status, data["steps"]) == (0, 4)
    shown = [
        str(tmp_path / "train.py"),
        str(tmp_path.resolve()),
        ["train.py", "--lr", "1"],  # the name as it was given
        True,
    ]
    assert str(shown) in capsys.readouterr().out
    assert (tmp_path / "torchfast-profile" / "report.html").exists()


def test_the_path_with_safe_path(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    root = torchfast.__file__.rsplit("/", 2)[0]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "torchfast", "profile", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    )

    assert f"['{tmp_path}', '{root}'" in ran.stdout


LOOP = """
    for _ in range(20):
        backward()
        optimizer.step()
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_writes_the_json(run, monkeypatch, tmp_path, rank):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)

    status, data = run(LOOP)

    assert status == 0
    assert (data is not None) is (rank == "0")
    assert (tmp_path / "torchfast-profile" / f"rank{rank}" / "report.html").exists()


def test_a_fork_that_ends_looks_at_nothing(tmp_path):
    script = """
        import os, sys, torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not os.fork():
            sys.exit(7)
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        print("child", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = """
        import sys
        from torchfast.__main__ import main
        sys.exit(main(["profile", "--steps=4", "--warmup=2", "--no-lines", "train.py"]))
    """
    ran = warm_python.run(textwrap.dedent(command), cwd=tmp_path, timeout=60)

    assert "child 7" in ran.stdout
    assert ran.stdout.count("the page is") == 1
    assert ran.returncode == 0
    assert "over 4 steps" in ran.stdout


# --- what fails beside the script ---------------------------------------------------------------


def broken(*_, **__):
    raise OSError(28, "No space left on device")


def loop(profiling, number=20, error=None):
    model = torch.nn.Linear(4, 4)
    with profiling:
        for at in range(number):
            model(torch.ones(2, 4)).sum().backward()
            profiling.step()
            if at == 5 and error is not None:
                raise error


def test_a_full_disk_does_not_end_the_loop(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profiler.shutil, "copyfileobj", broken)
    profiling = profile(tmp_path, steps=2, warmup=1)

    loop(profiling)

    assert profiling.num_steps == 20
    assert "No space left" in caplog.text
    assert os.listdir(tmp_path) == []
    with pytest.raises(TraceError, match=r"nothing was profiled: trace.*No space left"):
        _ = profiling.report


def test_what_was_written_before_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler.UserLines, "write_into", broken)
    profiling = profile(tmp_path, steps=2, warmup=1)

    loop(profiling)

    assert profiling.report.figures.num_steps == 2
    assert any("lines.json.gz could not be written" in r for r in profiling.report.remarks)


def test_the_users_error_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler.shutil, "copyfileobj", broken)

    with pytest.raises(ZeroDivisionError):
        loop(profile(tmp_path, steps=10, warmup=1), error=ZeroDivisionError())


def test_ceilings_that_fail_cost_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiler, "measure_ceilings", broken)
    profiling = profile(tmp_path, steps=2, warmup=1, lines=False, ceilings=True)

    loop(profiling)

    assert any("ceilings could not be measured" in r for r in profiling.report.remarks)


@pytest.mark.parametrize(("end", "asked"), [("", 1), ("raise ValueError", 0), ("sys.exit(3)", 0)])
def test_no_ceilings_after_a_script_that_failed(run, monkeypatch, end, asked):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiler, "measure_ceilings", lambda: calls.append(1))

    run(textwrap.dedent(LOOP) + end, "--ceilings")

    assert len(calls) == asked

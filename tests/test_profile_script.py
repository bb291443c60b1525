"""python -m torchfast profile: on a script as it stands, and on a trace that is there."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

import torchfast
from synthetic_trace import SyntheticTrace
from torchfast.__main__ import main

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


@pytest.mark.parametrize("end", ["import nowhere", "raise SystemExit(2)", "def f(:"])
def test_a_script_that_fails_before_its_first_step(tmp_path, capsys, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(end)

    status = main(["profile", "train.py"])

    said = capsys.readouterr().err
    assert status == (2 if "Exit" in end else 1)
    assert said.splitlines()[-1] == (
        f"the script ended with status {status}, before its first step"
    )
    assert "warmup" not in said


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

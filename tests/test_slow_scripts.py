"""The slow scripts run, their answers can be found, and a wrong answer is called wrong."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import warm_python
from benchmarks import tables
from benchmarks.slow_scripts import check, expected
from benchmarks.slow_scripts.check import Answer, Finding, NoVerdictError, judge, read_answer
from benchmarks.slow_scripts.expected import EXPECTED, lines_of, path_of
from torchfast.profiling.figures import Figures
from torchfast.profiling.findings import Finding as ProfilerFinding
from torchfast.profiling.report import ProfileReport
from torchfast.profiling.trace import Trace
from torchfast.profiling.verdict import Verdict

ROOT = Path(__file__).parent.parent
OF_TORCH = [name for name, answer in EXPECTED.items() if answer.needs is None]

# All in one process, which may be left as they leave it: what they set is never put back.
RUN_ALL = """
import importlib, json, sys, time, traceback
import torch
# Under autocast torch asks oneDNN for an LSTM in bf16 on any CPU, and on those without AVX-512 it
# has none: there torch's own runs, which those who train on such a CPU have to ask for too.
has_lstm = torch.ops.mkldnn._is_mkldnn_bf16_supported()
outcomes = {}
for name in sys.argv[2:]:
    started = time.monotonic()
    try:
        script = importlib.import_module(f"benchmarks.slow_scripts.{name}")
        torch.backends.mkldnn.enabled = has_lstm or name != "recurrent_model"
        script.main(["--device", "cpu", "--steps", "2", "--small"])
        outcomes[name] = "ran"
    except BaseException:
        outcomes[name] = traceback.format_exc()
    print(name, round(time.monotonic() - started, 1), "s")
with open(sys.argv[1], "w") as file:
    json.dump(outcomes, file)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    out = tmp_path_factory.mktemp("slow_scripts") / "outcomes.json"
    command = [sys.executable, "-W", "error", "-c", RUN_ALL, str(out), *OF_TORCH]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_script_trains_on_the_cpu(outcomes, name):
    assert outcomes[name] == "ran"


# -- The scripts and their answers -----------------------------------------------------------------


def test_there_is_an_answer_for_each_script_and_a_script_for_each_answer():
    others = {"__init__", "check", "expected"}
    assert {path.stem for path in expected.FOLDER.glob("*.py")} - others == set(EXPECTED)
    assert len(OF_TORCH) == 20


def test_each_kind_of_fault_is_there():
    kinds = [EXPECTED[name].kind for name in OF_TORCH]
    assert sorted(kinds[:12]) == sorted(expected.Kind.__args__)
    assert len(set(kinds[12:])) == 8


@pytest.mark.parametrize("name", EXPECTED)
def test_the_markers_stand_on_statements_of_the_script(name):
    text = path_of(name).read_text()
    lines = lines_of(name)
    assert bool(lines) == (EXPECTED[name].kind != "none")
    assert text.count(expected.MARKER.lstrip("# ")) == len(lines)
    statements = {n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)}
    assert set(lines) <= statements


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_is_plain_and_short_and_does_not_name_its_fault(name):
    text = path_of(name).read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= 120
    assert "torchfast" not in text
    summary = ast.get_docstring(tree)
    assert summary.startswith("Trains ")
    for word in ("slow", "sync", "pinned", "mask", "fault", ".item"):
        assert word not in summary


@pytest.mark.parametrize("package", ["transformers", "accelerate", "lightning"])
def test_a_missing_package_is_said(package):
    name = f"with_{package}"
    code = f"""
        import runpy, sys
        sys.modules[{package!r}] = None
        runpy.run_path({str(path_of(name))!r}, run_name="__main__")
    """
    found = warm_python.run(textwrap.dedent(code), timeout=60)
    assert found.returncode == 1
    assert found.stderr.strip() == f"this script needs {package}: pip install {package}"


# -- The comparison --------------------------------------------------------------------------------


def right_answer(name):
    answer = EXPECTED[name]
    line = lines_of(name)[-1] if answer.kind != "none" else None
    findings = () if line is None else (Finding(kind=answer.kind, line=line),)
    return Answer(verdict=answer.classes[0], line=line, findings=findings)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_right_answer_is_right(name):
    assert judge(name, right_answer(name)).right


@pytest.mark.parametrize("name", EXPECTED)
def test_the_answer_for_another_script_is_wrong(name):
    others = [other for other in EXPECTED if EXPECTED[other].kind != EXPECTED[name].kind]
    assert not any(judge(name, right_answer(other)).right for other in others)


@pytest.mark.parametrize(
    ("verdict", "at", "findings", "wrong"),
    [
        ("fine", 0, [("host-sync", 0)], {"verdict"}),
        ("sync-bound", None, [], {"kind", "line"}),
        ("sync-bound", 3, [("tiny-kernels", 3)], {"kind", "line"}),
        ("sync-bound", -1, [("host-sync", -1)], {"line"}),
        ("sync-bound", None, [("host-sync", None)], {"line"}),
        ("sync-bound", 0, [("tiny-kernels", 3), ("host-sync", 0)], {"kind"}),
        ("sync-bound", 0, [("host-sync", 0), ("tiny-kernels", 3)], set()),
        ("sync-bound", 0, [("host-sync", None), ("host-sync", 0)], set()),
        ("sync-bound", -1, [("host-sync", -1), ("host-sync", 0)], {"line"}),
    ],
)
def test_what_is_wrong_is_named(verdict, at, findings, wrong):
    name = "language_model"
    (line,) = lines_of(name)
    made = tuple(Finding(kind=k, line=None if o is None else line + o) for k, o in findings)
    named = None if at is None else line + at
    judgement = judge(name, Answer(verdict=verdict, line=named, findings=made))
    parts = {p for p in ("verdict", "kind", "line") if not getattr(judgement, p)}
    assert parts == wrong
    assert judgement.right == (not wrong)
    kinds = [kind for kind, _ in findings]
    assert judgement.elsewhere == ("host-sync" in kinds and kinds[0] != "host-sync")


def test_where_nothing_is_wrong_any_finding_is_wrong():
    name = "diffusion_transformer"
    assert judge(name, Answer(verdict="fine", line=None, findings=())).right
    finding = Finding(kind="dtype-casts", line=None)
    assert not judge(name, Answer(verdict="fine", line=None, findings=(finding,))).right


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("language_model.py:50", 50),
        ("/somewhere/language_model.py:50", 50),
        ("/torch/nn/module.py:50", None),
        (None, None),
    ],
)
def test_an_answer_is_read_from_a_report(written, line):
    """As the profiler itself writes it."""
    finding = ProfilerFinding("host-sync", written, 1.0, 0.5, "text", "lever")
    evidence = {"waits_share": 0.3}
    verdict = Verdict("sync-bound", written, evidence, "text", "lever")
    answer = read_answer(
        {"verdict": verdict.to_dict(), "findings": [finding.to_dict()]}, "language_model"
    )
    found = (Finding(kind="host-sync", line=line),)
    assert answer == Answer(verdict="sync-bound", line=line, findings=found, evidence=evidence)


def test_a_report_without_findings_names_none():
    verdict = Verdict("fine", None, {}, "text", "lever")
    report = ProfileReport(verdict=verdict, findings=(), figures=Figures(), trace=Trace(name="t"))
    answer = read_answer(report.to_dict(), "diffusion_transformer")
    assert answer == Answer(verdict="fine", line=None, findings=())
    assert judge("diffusion_transformer", answer).right


@pytest.mark.parametrize("written", [{}, {"verdict": "fine"}, {"verdict": {}, "findings": []}, []])
def test_other_json_is_refused(written):
    with pytest.raises(NoVerdictError, match="unreadable"):
        read_answer(written, "language_model")


# -- The command -----------------------------------------------------------------------------------


def answering(tmp_path, monkeypatch, text, status=0):
    """Let a program that writes ``text`` stand in for the profiler."""
    program = tmp_path / "profiler.py"
    program.write_text(
        "import sys\n"
        "assert sys.argv[1:4:2] == ['-m', 'profile'], sys.argv\n"
        f"open(sys.argv[sys.argv.index('--json') + 1], 'w').write({text!r})\n"
        f"print('it said something')\nsys.exit({status})\n"
    )
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(launcher))


def test_the_table_is_printed_and_written(tmp_path, monkeypatch, capsys):
    line = f"{path_of('language_model')}:{lines_of('language_model')[0]}"
    written = {
        "verdict": {"class": "sync-bound", "line": line, "evidence": {"waits_share": 0.3}},
        "findings": [{"kind": "host-sync", "line": line}],
    }
    answering(tmp_path, monkeypatch, json.dumps(written))
    out = tmp_path / "table.json"
    names = ["language_model", "recurrent_model"]
    assert check.main(["--out", str(out), "--only", *names]) == 0
    table = json.loads(out.read_text())
    assert table["summary"] == {"scripts": 2, "right": 1, "verdict": 2, "kind": 1, "line": 1}
    assert [table["rows"][name]["status"] for name in names] == ["right", "wrong"]
    assert table["rows"]["language_model"]["answer"]["evidence"] == {"waits_share": 0.3}
    printed = capsys.readouterr().out
    assert "recurrent_model        wrong    sync-bound, big-log-sync; wrong kind, line" in printed
    assert "1 of 2 are right in all; verdict 2, kind 1, line 1" in printed
    # Another is added to the file, and what stands there stays.
    assert check.main(["--out", str(out), "--only", "heat_equation"]) == 0
    more = json.loads(out.read_text())
    assert list(more["rows"]) == ["language_model", "heat_equation", "recurrent_model"]
    assert more["rows"]["language_model"] == table["rows"]["language_model"]
    assert more["summary"]["scripts"] == 3
    assert [run["command"] for run in tables.runs(more, "slow scripts")] == [
        row["run"]["command"] for row in more["rows"].values()
    ]
    # One that is asked and not reached keeps what it had.
    monkeypatch.setattr(check, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check.main(["--out", str(out), "--only", "vision_transformer", *names])
    kept = json.loads(out.read_text())["rows"]
    assert kept["vision_transformer"]["status"] == "failed"
    assert {name: kept[name] for name in more["rows"]} == more["rows"]


def interrupted(script, *_):
    """Answer for the first script that is asked, and be stopped in the next one."""
    if script != "vision_transformer":
        raise KeyboardInterrupt
    expected = {"classes": ["compute-bound"], "kind": "fp32-matmul"}
    return {"status": "failed", "reason": "made up", "expected": expected}


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("{}", 3, "exit status 3: it said something"),
        ("no json", 0, "no JSON was written"),
        ("{}", 0, "unreadable"),
    ],
)
def test_a_profiler_that_fails_is_a_failure(tmp_path, monkeypatch, text, status, reason):
    answering(tmp_path, monkeypatch, text, status)
    row = check.check("language_model", 60.0)
    assert row["status"] == "failed"
    assert row["reason"].startswith(reason)
    assert check.summary({"language_model": row})["right"] == 0


def test_a_script_that_hangs_is_ended():
    sleep = [sys.executable, "-c", "import time; time.sleep(99)"]
    code = f"import subprocess; subprocess.run({sleep!r})"
    started = time.monotonic()
    with pytest.raises(NoVerdictError, match="not done in 1 s"):
        check.run([sys.executable, "-c", code], 1.0)
    # Its child holds the pipe: it ends early only if that was ended too.
    assert time.monotonic() - started < 30


def test_a_script_whose_package_is_missing_is_skipped(monkeypatch):
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    row = check.check("with_lightning", 1.0)
    assert (row["status"], row["reason"]) == ("skipped", "lightning is not installed")
    assert check.summary({"with_lightning": row})["scripts"] == 0


def test_on_the_cpu_scripts_run_alone(capsys):
    options = ["--device", "cpu", "--steps", "2", "--only", "heat_equation"]
    assert check.main(options) == 0
    assert "heat_equation          ran" in capsys.readouterr().out

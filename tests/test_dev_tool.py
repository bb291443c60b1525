"""``tools/dev.py``: what it passes on, when it installs, and what it says when it cannot."""

import ast
import sys
from pathlib import Path

import pytest

from tools import dev


@pytest.fixture
def commands(monkeypatch):
    """Record the commands instead of running them."""
    recorded = []
    monkeypatch.setattr(dev, "run", lambda command, **_: recorded.append([*map(str, command)]))
    return recorded


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment, as far as the tool looks, in which nothing is installed."""
    folder = tmp_path / "an environment"
    python = dev.python_of(folder)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("TORCHFAST_VENV", str(folder))
    return folder


def test_an_old_python_can_read_it():
    ast.parse(Path(dev.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_an_old_python_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(dev, "OLDEST_PYTHON", (99, 0))

    assert dev.main() == 1
    assert "needs Python 3.11 or newer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "--help"], ["test", "-k", "a or b", "--", "x"]])
def test_arguments_are_passed_on_untouched(words):
    assert dev.parse(words) == (words[0], words[1:])


def test_arguments_of_other_commands_are_refused(capsys):
    with pytest.raises(SystemExit):
        dev.parse(["lint", "--fix"])
    assert "lint takes no arguments, got --fix" in capsys.readouterr().err


def test_torch_is_installed_before_the_project_and_all_with_constraints(environment, commands):
    dev.prepared_environment(group="dev")

    pip, torch, project = commands
    assert pip[-1] == "pip"
    assert torch[-1] == "torch"
    assert project[-4:] == ["--editable", ".", "--group", "dev"]
    for command in commands:
        assert command[:4] == [str(dev.python_of(environment)), "-m", "pip", "install"]
        assert command[4:6] == ["--constraint", str(dev.CONSTRAINTS)]


def test_training_needs_no_dependency_group(environment, commands):
    dev.prepared_environment(group=None)

    assert not any("--group" in command for command in commands)


@pytest.mark.parametrize(
    ("first", "second", "installs"),
    [("dev", "dev", False), ("dev", None, False), (None, None, False), (None, "dev", True)],
)
def test_what_is_installed_is_not_installed_again(environment, commands, first, second, installs):
    dev.prepared_environment(group=first)
    commands.clear()
    dev.prepared_environment(group=second)

    assert bool(commands) == installs


def test_changed_requirements_are_installed(environment, commands, monkeypatch, tmp_path):
    dev.prepared_environment(group="dev")
    commands.clear()
    changed = tmp_path / "constraints.txt"
    changed.write_text("torch==2.14.0\n", encoding="utf-8")
    monkeypatch.setattr(dev, "CONSTRAINTS", changed)
    dev.prepared_environment(group="dev")

    assert len(commands) == 3


def test_a_python_without_venv_gets_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(dev.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(dev.CommandError, match=r"apt install python3\.\d+-venv"):
        dev.create_environment(tmp_path / "new")


def test_a_failure_keeps_its_exit_status(tmp_path):
    with pytest.raises(dev.CommandError) as failure:
        dev.run([sys.executable, "-c", "raise SystemExit(7)"], folder=tmp_path)
    assert failure.value.status == 7


def test_all_checks_run_before_one_failure_counts(tmp_path):
    def command(name, status):
        code = f"open('{name}', 'w').close(); raise SystemExit({status})"
        return [sys.executable, "-c", code], tmp_path

    with pytest.raises(dev.CommandError, match=r"(?s)first.*third"):
        dev.run_all([command("first", 1), command("second", 0), command("third", 1)])
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "third"}

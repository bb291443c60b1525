"""What the whole leaf keeps to; its parts have tests of their own (test_reporting_*)."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchfast import reporting
from torchfast.reporting import JSONLWriter, plot_lines, read_jsonl

FILE_FUNCTIONS = [JSONLWriter, read_jsonl, lambda path: plot_lines(path, {"a": [(0, 0)]})]


class BytesPath:
    def __fspath__(self):
        return b"log"


@pytest.mark.parametrize("function", FILE_FUNCTIONS, ids=["writer", "reader", "plot"])
def test_paths_that_are_no_file(tmp_path, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, str(tmp_path), "new/", ""):
        with pytest.raises(ValueError, match="folder"):
            function(folder)
    for other in (None, 3, b"log", BytesPath()):
        with pytest.raises(TypeError, match="path="):
            function(other)
    assert list(tmp_path.iterdir()) == []


def run_alone(code):
    """Run `code` in a new process, with the leaf and without the rest of the package."""
    stub = f"""
import sys, types
package = types.ModuleType("torchfast")
package.__path__ = [{str(Path(reporting.__file__).parents[1])!r}]
sys.modules["torchfast"] = package
"""
    return subprocess.run(
        [sys.executable, "-c", stub + code], capture_output=True, text=True, check=False
    )


def test_the_leaf_needs_no_torch():
    code = """
import torchfast.reporting
sys.stdout.write(str({"torch", "numpy"} & set(sys.modules)))
"""
    done = run_alone(code)
    assert (done.returncode, done.stdout) == (0, "set()")


def test_closed_stderr_with_default_logging_does_not_stop_the_program():
    # Here the warning itself cannot be written, and logging raises ValueError for that.
    code = """
from torchfast.reporting import ProgressLine
line = ProgressLine("plain")
sys.stderr.close()
line.update({"step": 1})
line.close()
sys.stdout.write("went on")
"""
    done = run_alone(code)
    assert (done.returncode, done.stdout) == (0, "went on")


def test_writer_survives_a_kill_without_close(tmp_path):
    path = tmp_path / "log.jsonl"
    code = f"""
import os, signal
from torchfast.reporting import JSONLWriter
log = JSONLWriter({str(path)!r})
log.write({{"step": 1}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_alone(code).returncode == -9
    assert read_jsonl(path) == [{"step": 1}]

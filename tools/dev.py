#!/usr/bin/env python3
"""Run a development command of torchfast, in an environment that this program keeps.

    python3 tools/dev.py train --steps 300    # examples/01_trainer.py; needs only what a user needs
    python3 tools/dev.py test -k parity       # CPU tests and doctests, by pytest
    python3 tools/dev.py lint                 # format, lint, types, architecture
    python3 tools/dev.py examples             # every example, two steps on the CPU
    python3 tools/dev.py docs                 # the documentation, into docs/_build/html
    python3 tools/dev.py wheel                # the wheel, tested in a clean environment, into dist/
    python3 tools/dev.py publish              # documentation and wheel, side by side
    python3 tools/dev.py all                  # what CI runs: lint, test, examples, publish

The first call creates the virtual environment .venv in the root of the repository, or the folder
named by TORCHFAST_VENV, and installs torchfast there with the versions of constraints.txt. Later
calls find it ready, until pyproject.toml or constraints.txt changes.

This file needs nothing but the standard library, and its syntax stays that of Python 3.8, so that
an older Python can still read the message that it is too old.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# These are run from outside the repository against the built wheel.
WHEEL_TESTS = ("test_exports.py", "test_import.py")


class CommandError(Exception):
    """A command that failed, with the exit status to leave with."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


# -- Commands --------------------------------------------------------------------------------------


def train(arguments: list[str]) -> NoReturn:
    """Run the main example with its own arguments."""
    python = prepared_environment(group=None)
    replace_process([python, ROOT / "examples" / "01_trainer.py", *arguments])


def test(arguments: list[str]) -> None:
    """Run the CPU tests and the doctests; further arguments go to pytest."""
    python = prepared_environment(group="dev")
    # Each worker begins with one half, so that what a file prepares is seldom prepared twice.
    options = ["-n", "2", "--dist", "worksteal", "--durations=25"]
    run([python, "-m", "pytest", *options, *arguments], folder=ROOT)


def lint() -> None:
    """Check format, lint, types and the direction of imports; report all before failing."""
    python = prepared_environment(group="dev")
    checks: list[list[str | Path]] = [
        [python, "-m", "ruff", "format", "--check", "."],
        [python, "-m", "ruff", "check", "."],
        [python, "-m", "mypy"],
        [python.parent / "lint-imports", "--no-logo"],
    ]
    run_all((check, ROOT) for check in checks)


def examples() -> None:
    """Run every example for two steps on the CPU, each in an empty folder of its own."""
    python = prepared_environment(group="dev")
    with tempfile.TemporaryDirectory(prefix="torchfast-examples-") as scratch:
        runs: list[tuple[list[str | Path], Path]] = []
        # The last ones do most: begun last, they would be waited for alone.
        for script in sorted((ROOT / "examples").glob("*.py"), reverse=True):
            folder = Path(scratch, script.stem)
            folder.mkdir()
            runs.append(([python, script, "--steps", "2", "--device", "cpu"], folder))
        run_all(runs)


def docs() -> None:
    """Build the documentation; every warning is an error."""
    python = prepared_environment(group="dev")
    source, target = ROOT / "docs", ROOT / "docs" / "_build" / "html"
    # A fresh environment: sphinx does not repeat the warnings of pages that have not changed.
    strict = ["--fail-on-warning", "--nitpicky", "--keep-going", "--fresh-env"]
    run([python, "-m", "sphinx", *strict, "-b", "html", source, target], folder=ROOT)


def wheel() -> None:
    """Build the wheel, test it in a clean environment outside the repository, keep it in dist/."""
    python = prepared_environment(group="dev")
    with tempfile.TemporaryDirectory(prefix="torchfast-wheel-") as name:
        scratch = Path(name)
        options: list[str | Path] = ["--wheel", "--no-isolation", "--outdir", scratch]
        run([python, "-m", "build", *options, ROOT], folder=scratch)
        built = next(scratch.glob("torchfast-*.whl"))
        check_contents(built)
        check_installed(built, scratch)
        (ROOT / "dist").mkdir(exist_ok=True)
        shutil.copy2(built, ROOT / "dist")


def publish() -> None:
    """Build the documentation and the wheel, side by side."""
    prepared_environment(group="dev")
    run_all(([sys.executable, __file__, command], ROOT) for command in ("docs", "wheel"))


def all_commands() -> None:
    """Run everything that CI runs, cheapest first; stop at the first failure."""
    lint()
    test([])
    examples()
    publish()


# -- The wheel -------------------------------------------------------------------------------------


def check_contents(built: Path) -> None:
    """Refuse a wheel that holds more than the package, or that forgot its type marker."""
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    strays = [name for name in names if not name.startswith(("torchfast/", "torchfast-"))]
    if strays:
        raise CommandError(f"{built.name} holds files outside torchfast/: {', '.join(strays)}")
    if "torchfast/py.typed" not in names:
        raise CommandError(f"{built.name} lacks torchfast/py.typed")


def check_installed(built: Path, scratch: Path) -> None:
    """Install the wheel as a user would and test it where the repository cannot be seen."""
    python = create_environment(scratch / "venv")
    install(python, [built, "pytest"])
    tests = scratch / "tests"
    tests.mkdir()
    for name in WHEEL_TESTS:
        shutil.copy2(ROOT / "tests" / name, tests)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    show = "import torchfast; print('torchfast is', torchfast.__file__)"
    run([python, "-I", "-c", show], folder=tests, environment=outside)
    run([python, "-m", "pytest", *WHEEL_TESTS], folder=tests, environment=outside)


# -- The environment -------------------------------------------------------------------------------


def prepared_environment(group: str | None) -> Path:
    """Return the Python of the environment, with torchfast and a dependency group installed.

    Args:
        group: The dependency group of pyproject.toml; None for what a user of torchfast has.
    """
    folder = Path(os.environ.get("TORCHFAST_VENV") or ROOT / ".venv").expanduser().absolute()
    python = python_of(folder)
    wanted = fingerprint()
    stamp = folder / f"torchfast-{group or 'runtime'}.stamp"
    # The dev group holds all groups, so its environment serves every command.
    stamps = (stamp, folder / "torchfast-dev.stamp")
    if python.exists() and any(read(path) == wanted for path in stamps):
        return python
    create_environment(folder)
    # First torch, by itself: it is by far the largest, and a failure to find it should say so.
    install(python, ["torch"])
    project: list[str | Path] = ["--build-constraint", CONSTRAINTS, "--editable", "."]
    install(python, project + (["--group", group] if group else []))
    stamp.write_text(wanted, encoding="utf-8")
    return python


def python_of(folder: Path) -> Path:
    """Return where the Python of a virtual environment is, or would be."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create_environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with the tested pip, creating what is missing."""
    python = python_of(folder)
    if not python.exists():
        for module in ("venv", "ensurepip"):
            if importlib.util.find_spec(module) is None:
                raise CommandError(missing_venv(module))
        # An environment that was left half made, or whose Python is gone, is made anew. A folder
        # that is no environment is never cleared.
        clear = ["--clear"] if (folder / "pyvenv.cfg").exists() else []
        run([sys.executable, "-m", "venv", *clear, folder])
    elif subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode:
        run([python, "-m", "ensurepip"])
    install(python, ["--upgrade", "pip"])
    return python


def missing_venv(module: str) -> str:
    """Say how to get the part of the standard library that some distributions split off."""
    version = "{}.{}".format(*sys.version_info)
    return (
        f"cannot create a virtual environment: {sys.executable} has no module {module}. On Debian "
        f"and Ubuntu: apt install python{version}-venv. Or name an environment that exists: "
        "TORCHFAST_VENV=folder."
    )


def install(python: Path, what: list[str | Path]) -> None:
    """Install with pip, in the tested versions."""
    run([python, "-m", "pip", "install", "--constraint", CONSTRAINTS, *what], folder=ROOT)


def fingerprint() -> str:
    """Return a digest of all that decides what the environment holds."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read(path: Path) -> str | None:
    """Return the text of a file, None if there is no such file."""
    return path.read_text(encoding="utf-8") if path.exists() else None


# -- Processes -------------------------------------------------------------------------------------


def run(
    command: list[str | Path],
    *,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Print a command and run it; raise CommandError if it fails."""
    words = [str(word) for word in command]
    announce(words)
    check(subprocess.run(words, cwd=folder, env=environment, text=True, check=False))


def run_all(commands: Iterable[tuple[list[str | Path], Path]]) -> None:
    """Run every command in its folder, one on each core, then fail if any of them did.

    What a command prints is shown when it has ended, so that none stands within another's.
    """
    with concurrent.futures.ThreadPoolExecutor(num_cores()) as pool:
        running = [pool.submit(printing_to_memory, *command) for command in commands]
        for future in concurrent.futures.as_completed(running):
            done = future.result()
            print(f"\n# of {shlex.join(done.args)}:\n{done.stdout}", end="", flush=True)
    failures = []
    for future in running:
        try:
            check(future.result())
        except CommandError as error:
            failures.append(str(error))
    if failures:
        raise CommandError("\n".join(failures))


def num_cores() -> int:
    """Return on how many cores this program may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def printing_to_memory(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Announce and run a command; return its exit status and what it printed, errors among it."""
    words = [str(word) for word in command]
    announce(words)
    return subprocess.run(
        words,
        cwd=folder,
        # Threads of several on the same cores would wait for each other.
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Raise CommandError if a command failed."""
    status = done.returncode
    if status:
        # A signal is reported as a shell would.
        raise CommandError(
            f"exit status {status}: {shlex.join(done.args)}", status if status > 0 else 128 - status
        )


def replace_process(command: list[str | Path]) -> NoReturn:
    """Become another program, so that Ctrl-C and SIGTERM reach it and nothing stands between."""
    words = [str(word) for word in command]
    announce(words)
    if os.name == "nt":  # where exec would return to the shell at once
        sys.exit(subprocess.run(words, check=False).returncode)
    os.execv(words[0], words)


def announce(words: list[str]) -> None:
    """Print a command as it could be typed."""
    print("$", shlex.join(words), flush=True)


# -- The door --------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[], None]] = {
    "lint": lint,
    "examples": examples,
    "docs": docs,
    "wheel": wheel,
    "publish": publish,
    "all": all_commands,
}
COMMANDS_WITH_ARGUMENTS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "test": test,
}


def parse(words: list[str]) -> tuple[str, list[str]]:
    """Split the command line into a command and the arguments that belong to it."""
    parser = argparse.ArgumentParser(
        prog="tools/dev.py",
        usage="%(prog)s [-h] command [arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*COMMANDS_WITH_ARGUMENTS, *COMMANDS]
    parser.add_argument("command", choices=names, metavar="command", help=", ".join(names))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on by train and test")
    options = parser.parse_args(words)
    if options.arguments and options.command in COMMANDS:
        parser.error(f"{options.command} takes no arguments, got {shlex.join(options.arguments)}")
    return options.command, options.arguments


def main() -> int:
    """Run the command line and return the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        found = "{}.{}".format(*sys.version_info)
        print(
            f"torchfast needs Python 3.11 or newer, and this is Python {found} ({sys.executable}). "
            "Name a newer one: python3.11 tools/dev.py ...",
            file=sys.stderr,
        )
        return 1
    command, arguments = parse(sys.argv[1:])
    try:
        if command in COMMANDS:
            COMMANDS[command]()
        else:
            COMMANDS_WITH_ARGUMENTS[command](arguments)
    except CommandError as error:
        print(f"tools/dev.py {command}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

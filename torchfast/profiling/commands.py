"""``python -m torchfast profile``: where the time of a script's training steps goes.

``profile [OPTIONS] SCRIPT [ARGS]`` runs a script as ``python SCRIPT ARGS`` would, counts the steps
of its optimizer (or the replays of its CUDA graphs), profiles a few of them and says what it saw
when the script ends. ``profile trace.json`` does the same with a trace that torch.profiler wrote,
of any machine. The exit status is that of the script; 1 if there was nothing to profile, 2 if the
arguments are wrong.

Options stand before SCRIPT; what stands after it is the script's alone.
"""

from __future__ import annotations

import argparse
import builtins
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from torchfast._core.errors import TraceError
from torchfast._core.shell import DAMAGED, WRONG, fail, say
from torchfast.profiling.profiler import LINES, PAGE, TRACE, Profile
from torchfast.profiling.report import ProfileReport, analyse_trace
from torchfast.profiling.script_steps import steps_counted

_TRACES: Final = (".json", ".gz")
_INTERRUPTED: Final = 130
_SAID_EVERY_S: Final = 5.0
_NO_STEPS: Final = (
    "the script made no steps that can be counted: a step is an update of its first optimizer, or "
    "a replay of its CUDA graphs, made by the thread that runs the script; put "
    "torchfast.profile() around the loop and call step() in it"
)


def add_commands(commands: Any) -> None:
    """Add ``profile`` to the subparsers of ``python -m torchfast``."""
    parser = commands.add_parser(
        "profile",
        help="say where the time of a script's training steps goes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="steps to measure")
    parser.add_argument(
        "--warmup", type=_positive, default=5, metavar="N", help="steps before these, at least 1"
    )
    parser.add_argument(
        "--no-lines", action="store_true", help="do not look for lines, which takes 3 steps more"
    )
    parser.add_argument(
        "--ceilings", action="store_true", help="measure what the device can do, for the roofline"
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the script when its steps are measured"
    )
    _add_outputs(parser)
    parser.add_argument("target", metavar="SCRIPT", help="a script, or a trace (.json, .json.gz)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")
    parser.set_defaults(run=_run)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="where traces and page go; torchfast-profile",
    )
    parser.add_argument(
        "--json", default=argparse.SUPPRESS, metavar="FILE", help="write the report as JSON too"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _run(arguments: argparse.Namespace) -> int:
    target = Path(arguments.target)
    if not target.is_file():
        return fail(f"{target} is not there, or is no file", WRONG)
    if target.suffix in _TRACES:
        # A trace takes no arguments, so what stands after it can only be meant for this command.
        outputs = argparse.ArgumentParser(prog="torchfast profile", allow_abbrev=False)
        _add_outputs(outputs)
        arguments = outputs.parse_args(arguments.rest, arguments)
        return _look_at(target, arguments, _folder(arguments))
    return _profile_script(arguments.target, arguments.rest, arguments, _folder(arguments))


def _folder(arguments: argparse.Namespace) -> Path:
    return Path(getattr(arguments, "out", "torchfast-profile"))


def _look_at(path: Path, arguments: argparse.Namespace, folder: Path) -> int:
    lines = path.with_name(LINES)
    try:
        with_lines = path.name == TRACE and lines.is_file()
        report = analyse_trace(
            path, lines=lines if with_lines else None, progress=_progress_of(path)
        )
    except (TraceError, OSError) as error:
        return fail(str(error), DAMAGED)
    page = folder / PAGE if hasattr(arguments, "out") else path.with_name(f"{path.name}.html")
    return _deliver(report, arguments, page)


def _progress_of(path: Path) -> Callable[[float], None]:
    """Return what says now and then, on stderr, how far a large file has been read."""
    said = [time.monotonic()]

    def tell(part: float) -> None:
        if time.monotonic() - said[0] >= _SAID_EVERY_S:
            said[0] = time.monotonic()
            sys.stderr.write(f"reading {path.name}: {part:.0%}\n")

    return tell


def _deliver(report: ProfileReport, arguments: argparse.Namespace, page: Path) -> int:
    say(str(report))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        report.write_html(page)
        if hasattr(arguments, "json"):
            report.write_json(arguments.json)
    except OSError as error:
        return fail(str(error), DAMAGED)
    say(f"\nthe page is {page}")
    return 0


def _profile_script(
    script: str, rest: list[str], arguments: argparse.Namespace, folder: Path
) -> int:
    # A script may change where it is.
    folder = folder.absolute()
    if hasattr(arguments, "json"):
        arguments.json = os.path.abspath(arguments.json)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rank = os.environ.get("RANK", "0")
        folder = folder / f"rank{rank}"
        if rank != "0" and hasattr(arguments, "json"):
            del arguments.json  # one file cannot hold the reports of all ranks
    process, status = os.getpid(), 0
    profiling = Profile(
        folder,
        steps=arguments.steps,
        warmup=arguments.warmup,
        lines=not arguments.no_lines,
        memory=True,
        shapes=True,
        ceilings=arguments.ceilings,
    )
    try:
        with profiling, steps_counted(profiling, stop=arguments.stop):
            if status := _run_script(script, rest):
                raise _ScriptFailedError
    except _ScriptFailedError:
        pass  # for the profile to know
    if os.getpid() != process:
        return status  # a fork that came to its end here
    try:
        report = profiling.report
    except TraceError as error:
        if status and not profiling.num_steps:
            return fail(f"the script ended with status {status}, before its first step", status)
        return fail(str(error) if profiling.num_steps else _NO_STEPS, status or DAMAGED)
    return _deliver(report, arguments, folder / PAGE) if not status else _failed(report, status)


class _ScriptFailedError(Exception):
    """The script ended with a status."""


def _failed(report: ProfileReport, status: int) -> int:
    say(str(report))
    return fail(f"the script ended with status {status}", status)


def _run_script(script: str, rest: list[str]) -> int:
    """Run a script as ``python`` does, and return its exit status."""
    arguments, path = sys.argv, list(sys.path)
    sys.argv = [script, *rest]
    # With safe_path there is no place of ours to give to the script: the first is the library's.
    sys.path[: 0 if sys.flags.safe_path else 1] = [str(Path(script).resolve().parent)]
    try:
        with _main_module(script) as module:
            exec(_code_of(module.__file__), vars(module))
    except SystemExit as ended:
        return _status_of(ended)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException:
        _print_without_us()
        return 1
    finally:
        sys.argv, sys.path[:] = arguments, path
    return 0


@contextmanager
def _main_module(script: str) -> Iterator[Any]:
    """Have a new ``__main__``, as the script's own: runpy would change ``sys.argv[0]``.

    As Python has it, ``__file__`` holds wherever the script goes, and the first argument is what
    was typed. Processes that the script spawns find their way by ``__file__``.
    """
    module: Any = ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__builtins__ = builtins
    module.__cached__ = None
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        yield module
    finally:
        sys.modules["__main__"] = before


def _code_of(path: str) -> CodeType:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _status_of(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code
    return fail(str(ended.code), 1)


def _print_without_us() -> None:
    """Print the traceback of the exception at hand from the script's first frame on."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.stdout.flush()
    traceback.print_exception(kind, error, trace)

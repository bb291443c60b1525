"""``python -m torchfast env``: the shell line that sets torch's allocators before a program starts.

``backend`` needs that, since torch reads it before a line of the program runs. The lines go to the
output and all else to the errors, so that ``eval "$(python -m torchfast env ...)"`` works. It exits
with 0, or with 2 if a setting does not exist or has a value out of range.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any, Final

from torchfast._core.errors import TorchFastError
from torchfast._core.shell import WRONG, fail, say
from torchfast.memory.allocator_config import PRESETS, AllocatorConfig
from torchfast.memory.allocator_environment import AllocatorEnvironment

_TOLD: Final = 0
_SHELLS: Final[Mapping[str, tuple[str, str]]] = {
    "sh": ("export {name}={value}", "unset {name}"),
    "fish": ("set -gx {name} {value}", "set -e {name}"),
    "powershell": ("$env:{name} = {value}", "Remove-Item Env:{name}"),
}


def add_commands(commands: Any) -> None:
    """Add ``env`` to the subparsers of ``python -m torchfast``."""
    parser = commands.add_parser(
        "env",
        help="print the shell line that sets torch's memory allocators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="as in expandable_segments=True"
    )
    parser.add_argument("--preset", choices=PRESETS, help="settings for a kind of run")
    parser.add_argument(
        "--keep", action="store_true", help="start from what the environment says already"
    )
    parser.add_argument("--shell", choices=_SHELLS, default="sh", help="(default: sh)")
    parser.add_argument(
        "--torch", metavar="VERSION", help="the torch that will run, such as 2.12 (default: this)"
    )
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace) -> int:
    environment = AllocatorConfig.environment()
    try:
        AllocatorConfig().check_version(arguments.torch)
        if not (arguments.settings or arguments.preset or arguments.keep):
            return _show(environment)
        config = _config(arguments)
        [(name, text)] = config.to_env(version=arguments.torch).items()
    except (TorchFastError, ValueError, TypeError) as error:
        return fail(str(error), WRONG)
    assign, remove = _SHELLS[arguments.shell]
    beating = [n for n in (environment.winner, *environment.ignored) if n not in (None, name)]
    for other in beating:
        say(remove.format(name=other))
    say(assign.format(name=name, value=_quoted(text, arguments.shell)))
    why = _why(arguments)
    for line in (*why, *_notes(config, environment, name)):
        fail(f"# {line}", _TOLD)
    return 0


def _why(arguments: argparse.Namespace) -> list[str]:
    """Return why a preset sets what it does, and what of it this torch does not know yet."""
    if not arguments.preset:
        return []
    settings, reason = PRESETS[arguments.preset]
    written = AllocatorConfig.preset(arguments.preset, version=arguments.torch).settings
    missing = [name for name in settings if name not in written]
    left_out = f" ({', '.join(missing)} left out: a later torch knows it)" if missing else ""
    return [f"{arguments.preset}: {reason}{left_out}"]


def _config(arguments: argparse.Namespace) -> AllocatorConfig:
    config = AllocatorConfig.from_env() if arguments.keep else AllocatorConfig()
    if arguments.preset:
        config = config.merged(AllocatorConfig.preset(arguments.preset, version=arguments.torch))
    pairs = []
    for setting in arguments.settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not a setting; write it as KEY=VALUE")
        pairs.append(f"{key}:{value}")
    return config.merged(AllocatorConfig.parse(",".join(pairs), "the command"))


def _show(environment: AllocatorEnvironment) -> int:
    say(str(environment))
    config = AllocatorConfig.from_env()
    for name, value in config.settings.items():
        say(f"  {name} = {value}")
    for remark in config.remarks:
        say(f"  note: {remark}")
    return 0


def _notes(config: AllocatorConfig, environment: AllocatorEnvironment, name: str) -> list[str]:
    """Return what the line replaces, what that loses, and what is odd about it."""
    notes = [
        f"{variable} is taken away, since it would beat {name}"
        for variable in filter(None, (environment.winner, *environment.ignored))
        if variable != name
    ]
    if environment.winner is not None:
        try:
            before = AllocatorConfig.from_env().settings
        except ValueError as error:
            notes.append(f"what it replaces cannot be read: {error}")
            before = {}
        for key, value in before.items():
            now = config.settings.get(key)
            if now is None:
                notes.append(f"{key}={value} of {environment.winner} is dropped; --keep keeps it")
            elif now != value:
                notes.append(f"{key}={value} of {environment.winner} becomes {now}")
    if not environment.caching:
        notes.append("PYTORCH_NO_CUDA_MEMORY_CACHING is set, so no setting counts")
    return [*notes, *config.remarks]


def _quoted(text: str, shell: str) -> str:
    if shell == "powershell":
        return "'" + text.replace("'", "''") + "'"
    return shlex.quote(text) if shell == "sh" else "'" + text + "'"

"""``python -m torchfast``: what can be done from a shell.

``checkpoint {list,verify,show,export}`` looks at folders of checkpoints, ``cache
{list,show,prune,clear}`` at folders of compiled artifacts, ``env`` prints the shell line for
torch's memory allocators, and ``profile`` runs a script and says where the time of its steps goes.
Exit status: 0 if all is well, 1 if something is damaged or could not be done, 2 if the arguments
are wrong; after a script, its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torchfast
from torchfast.checkpoint.commands import add_commands as add_checkpoint_commands
from torchfast.compiler.commands import add_commands as add_cache_commands
from torchfast.memory.commands import add_commands as add_memory_commands
from torchfast.profiling.commands import add_commands as add_profile_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A path need not be text in the terminal's encoding; better shown escaped than not.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(prog="python -m torchfast", description=torchfast.__doc__)
    parser.add_argument("--version", action="version", version=torchfast.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_checkpoint_commands(commands)
    add_cache_commands(commands)
    add_memory_commands(commands)
    add_profile_commands(commands)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`); Python would complain of it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())

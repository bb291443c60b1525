"""``python -m torchfast checkpoint``: look at checkpoints without loading them into a program.

None of the commands changes a folder of checkpoints. They exit with 0 if all is well, with 1 if a
checkpoint is damaged or a file could not be written, and with 2 if the arguments are wrong or what
they name is not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from torchfast._core.errors import TorchFastError
from torchfast._core.shell import DAMAGED, WRONG, fail, one_line, say, size
from torchfast.checkpoint.folder import CheckpointFolder, folder_path
from torchfast.checkpoint.loading import read_checkpoint, read_tree, verify_folder
from torchfast.checkpoint.manifest import METADATA, Manifest, parse_json, read_manifest, read_named
from torchfast.checkpoint.sharing import TAG
from torchfast.checkpoint.state_file import export_state_dict
from torchfast.checkpoint.tree import stored_tensors

_SHOWN: Final = 72


def add_commands(commands: Any) -> None:
    """Add ``checkpoint`` and what is under it to the subparsers of ``python -m torchfast``."""
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify, show or export checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("directory", metavar="DIR", help="the folder that holds step-N")
    step = argparse.ArgumentParser(add_help=False)
    step.add_argument("--step", type=int, metavar="N", help="which one; the newest if left out")

    _add(actions, "list", _list, "one line for each checkpoint", [one])
    _add(
        actions,
        "verify",
        _verify,
        "compare checkpoints with their hashes; all, or one",
        [one, step],
    )
    show = _add(actions, "show", _show, "what a checkpoint holds", [one, step])
    show.add_argument("--tensors", action="store_true", help="name every tensor too")
    export = _add(actions, "export", _export, "one part as one file of torch.save", [one, step])
    export.add_argument("output", metavar="OUT", help="the file; one that is there is replaced")
    export.add_argument("--part", default="model", help="a key of the state (default: model)")


def _add(
    actions: Any,
    name: str,
    run: Callable[[CheckpointFolder, argparse.Namespace], int],
    text: str,
    parents: list[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, parents=parents)
    parser.set_defaults(run=lambda arguments: _guarded(run, arguments))
    return parser


def _guarded(
    run: Callable[[CheckpointFolder, argparse.Namespace], int], arguments: argparse.Namespace
) -> int:
    try:
        path = folder_path(arguments.directory)
        if not path.is_dir():
            return fail(f"{path} is not there", WRONG)
        return run(CheckpointFolder(path), arguments)
    except TorchFastError as error:
        return fail(str(error), DAMAGED)
    except (ValueError, TypeError) as error:
        return fail(str(error), WRONG)


def _list(folder: CheckpointFolder, arguments: argparse.Namespace) -> int:
    del arguments
    status = 0
    for step in folder.steps():
        try:
            manifest = read_manifest(folder.of(step))
        except TorchFastError as error:
            status = fail(str(error), DAMAGED)
            continue
        metrics = " ".join(f"{name}={value:.6g}" for name, value in manifest.metrics.items())
        about = one_line(f"{manifest.saved_at}  {metrics}")
        say(f"step-{step}  {size(manifest.num_bytes):>9}  {about}".rstrip())
    return status


def _verify(folder: CheckpointFolder, arguments: argparse.Namespace) -> int:
    steps = folder.steps() if arguments.step is None else [folder.existing(arguments.step)]
    status = 0
    for step in steps:
        try:
            manifest = verify_folder(folder.of(step))
        except TorchFastError as error:
            status = fail(str(error), DAMAGED)
        else:
            say(f"step-{step}  {size(manifest.num_bytes):>9}  whole")
    return status if steps else fail(f"{folder.path} has no checkpoint", WRONG)


def _show(folder: CheckpointFolder, arguments: argparse.Namespace) -> int:
    path = folder.of(folder.existing(_step(arguments)))
    manifest = read_manifest(path)
    sizes = _tensor_sizes(path, manifest)
    say(f"{path}")
    say(
        f"step {manifest.step}, {size(manifest.num_bytes)} in {len(manifest.files)} files, "
        + one_line(f"{manifest.saved_at}, torch {manifest.torch}, ranks: {manifest.world_size}")
    )
    for name, value in manifest.metrics.items():
        say(f"  metric {one_line(name)} = {value:.6g}")
    tree = read_tree(path, manifest)
    for key, node in tree["items"] if TAG in tree else tree.items():
        keys = list(stored_tensors(node))
        if not keys:
            say(one_line(f"{key}: {_short(node)}"))
            continue
        num_bytes = sum(sizes[k][0] for k in keys)
        say(f"{one_line(key)}: {len(keys)} tensors, {size(num_bytes)}")
        if arguments.tensors:
            for k in keys:
                say(f"  {one_line(k)}  {one_line(sizes[k][1])}")
    return 0


def _export(folder: CheckpointFolder, arguments: argparse.Namespace) -> int:
    step = folder.existing(_step(arguments))
    _, state = read_checkpoint(folder.of(step), arguments.part)
    export_state_dict(state, arguments.output)
    say(f"{arguments.part} of step-{step}: {len(state)} entries in {arguments.output}")
    return 0


def _step(arguments: argparse.Namespace) -> Any:
    return "latest" if arguments.step is None else arguments.step


def _tensor_sizes(path: Path, manifest: Manifest) -> dict[str, tuple[int, str]]:
    """Return the bytes and the description of each stored tensor, without reading any."""
    file = path / METADATA

    def described(body: Any) -> Iterator[tuple[str, tuple[int, str]]]:
        for key, tensor in body["tensors"].items():
            num_bytes = sum(chunk["num_bytes"] for chunk in tensor["chunks"])
            yield key, (num_bytes, f"{tensor['dtype']} {tuple(tensor['size'])}")

    return parse_json(
        file, read_named(path, manifest, METADATA), lambda body: dict(described(body))
    )


def _short(node: Any) -> str:
    text = str(node)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."

"""Sphinx configuration; `python3 tools/dev.py docs` builds with every warning an error."""

from __future__ import annotations

import contextlib
import inspect
import re
import typing
from typing import TYPE_CHECKING, Any

import torchfast
import torchfast.compiler.compiled_module
import torchfast.compiler.receipts
import torchfast.plan
import torchfast.reporting

if TYPE_CHECKING:
    from docutils.nodes import Element, Node
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

# Names of annotations that are imported for type checkers only, or the others beside them would not
# be resolved either.
vars(torchfast.plan)["AllocatorConfig"] = torchfast.AllocatorConfig
vars(torchfast.trainer)["CheckpointManager"] = torchfast.CheckpointManager
vars(torchfast.compiler.compiled_module)["Receipt"] = torchfast.compiler.receipts.Receipt
_ = torchfast.reporting.plot_lines  # imported when it is asked for, which autodoc does too late

project = "torchfast"
author = "the torchfast authors"
copyright = f"2026, {author}"
version = release = torchfast.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"torchfast {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# `Trainer` in single backticks is a link, and an error where there is no such name.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Numerics", "Synchronizes"]
python_use_unqualified_type_names = True

# Other projects cannot be linked to, since their inventories would have to be downloaded. Each
# pattern names what is theirs; a name of torchfast that leads nowhere stays an error.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"torch\..+"),
    (r"py:.*", r"(collections|contextlib|os|pathlib)\..+"),
    # Made and passed on by torchfast.
    (r"py:class", r"torchfast\._core\.rank_group\.RankGroup"),
    (r"py:class", r"torchfast\.parallel\.last_words\.LastWords"),
    (r"py:class", r"T|torchfast\..+\.T"),  # type variables
    (r"py:class", r"PathLike"),  # of the standard library, in signatures with a name of ours
    # Parts of results that are printed, and not asked for.
    (r"py:class", r"torchfast\.profiling\.(trace\.Trace|figures\.(Row|Copies))"),
    (r"py:class", r"torchfast\.memory\.expert_buffers\.Places"),
    (r"py:class", r"torchfast\.compiler\.receipts\.Receipt"),
    (r"py:obj", r"log_y|mode|path|text|total_steps"),  # arguments, in torchfast.reporting
]


def begin_property_with_text(
    _app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Keep napoleon from taking what stands before a colon in its first line for a type."""
    if what == "property" and lines:
        lines[0] = f": {lines[0]}"


def expand_inline_sections(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Give ``Numerics: Exact.`` the lines of its own by which napoleon knows a section."""
    section = rf"^( *)(.+\. )?({'|'.join(napoleon_custom_sections)}): (?=\S)"

    def expanded(match: re.Match[str]) -> str:
        indent, before, name = match.groups()
        summary = f"{indent}{before}\n\n" if before else ""
        return f"{summary}{indent}{name}:\n{indent}    "

    lines[:] = re.sub(section, expanded, "\n".join(lines), flags=re.MULTILINE).split("\n")


def evaluate_annotations(_app: Sphinx, function: Any, _bound_method: bool) -> None:
    """Turn annotations from strings into types, which Sphinx does for functions but no classes."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    with contextlib.suppress(NameError, TypeError):  # a name for type checkers only; a builtin
        function.__annotations__ = typing.get_type_hints(function)


def resolve_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element
) -> Node | None:
    """Link ``torchfast.step.TrainStep``, where an object is defined, to ``torchfast.TrainStep``.

    Annotations name the module of a definition; the API page documents the public name. A field,
    such as ``CompileOptions.regions``, is explained with its class.
    """
    owner, _, name = node.get("reftarget", "").rpartition(".")
    owner = owner.rpartition(".")[2]
    if owner in torchfast.__all__:
        is_field = name in getattr(getattr(torchfast, owner), "__dataclass_fields__", ())
        name = owner if is_field else name
    if node.get("refdomain") != "py" or name not in torchfast.__all__:
        return None
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"torchfast.{name}", node, contnode
    )


def setup(app: Sphinx) -> None:
    """Connect the handlers above; Sphinx calls this."""
    before_napoleon = 400
    app.connect("autodoc-process-docstring", begin_property_with_text, priority=before_napoleon)
    app.connect("autodoc-process-docstring", expand_inline_sections, priority=before_napoleon)
    app.connect("autodoc-before-process-signature", evaluate_annotations)
    app.connect("missing-reference", resolve_public_name)

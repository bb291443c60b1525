"""The documentation is true: its code runs, and its error messages are those of the library."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchfast

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [page for page in PAGES if "_build" not in page.parts]
RUN = [page for page in (ROOT / "README.md", *PAGES) if page.exists()]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"

BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n\s*)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MOST_NOT_RUN = 5
# A message needs a piece of this length, or it says too little to be told from another.
SHORTEST = 8


def blocks(page):
    """Yield the line, the code and the reason not to run it, of every Python block."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start("code")), match["code"], match["reason"]


def page_id(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [p for p in RUN if any(blocks(p))], ids=page_id)
def test_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("docs")
    monkeypatch.setitem(sys.modules, "docs", module)  # where torch looks for what functions name
    for line, code, reason in blocks(page):
        if reason is None:
            # Empty lines above the block, so that a traceback names the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), vars(module))


def test_hardly_a_block_is_left_out():
    assert sum(reason is not None for page in RUN for *_, reason in blocks(page)) <= MOST_NOT_RUN


def test_blocks_are_found():
    assert sum(1 for page in RUN for _ in blocks(page)) >= 30


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in torchfast.__all__
        if isinstance(value := getattr(torchfast, name), type) and issubclass(value, Exception)
    ],
)
def test_every_error_is_explained(name):
    assert re.search(rf"\b{name}\b", TROUBLESHOOTING.read_text(encoding="utf-8"))


# --- the messages in troubleshooting.md are the library's, and all of them ----------------------


def documented():
    """Return the messages of the page's tables: their first cells, cut at what varies."""
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    cells = re.findall(r"^\| ``(.+?)`` \|", text, re.MULTILINE)
    return [[piece.strip() for piece in cell.split("…") if piece.strip()] for cell in cells]


def messages():
    """Yield where the library raises or warns, and the fixed pieces of what it says."""
    for path in sorted((ROOT / "torchfast").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (call := said(node)) is not None:
                values = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant)]
                strings = [value for value in values if isinstance(value, str)]
                if any(len(s) >= SHORTEST for s in strings):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", strings


def said(node):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return node.exc
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("warning", "warn")
    ):
        return node
    return None


def source_strings():
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in (ROOT / "torchfast").rglob("*.py")]
    return {n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant)} - {None}


def test_every_documented_message_exists():
    strings = [s for s in source_strings() if isinstance(s, str)]
    missing = [p for pieces in documented() for p in pieces if not any(p in s for s in strings)]
    assert missing == []


def test_every_message_is_documented():
    known = [pieces for pieces in documented() if any(len(p) >= SHORTEST for p in pieces)]

    def is_known(strings):
        return any(all(any(p in s for s in strings) for p in pieces) for pieces in known)

    assert [(place, strings) for place, strings in messages() if not is_known(strings)] == []


def test_the_messages_are_found():
    assert len(list(messages())) >= 60

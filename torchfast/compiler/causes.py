"""Why a compile failed, in words, and what to do about it."""

from __future__ import annotations

import re

from torchfast._core.user_code import is_users
from torchfast.compiler.breaks import CANNOT_FOLLOW, read_break, without_fake
from torchfast.compiler.timeout import CallTimeoutError

# What stands in the class name or message of an error, and the remedy.
_REMEDIES = (
    (("No space left on device",), "make room where the compiler writes, TORCHINDUCTOR_CACHE_DIR"),
    (("Failed to find C compiler",), "install a C compiler (gcc) or name one in CC"),
    (("InvalidBackend",), "take one of torch._dynamo.list_backends()"),
    (
        ("InvalidCxxCompiler", "No working C++ compiler", "CppCompileError"),
        "install a C++ compiler (g++) or name a working one in the environment variable CXX",
    ),
    (("TritonMissing", "triton"), "install the triton that your version of PyTorch names"),
    (
        ("FailOnRecompileLimitHit",),
        "give it fewer different sizes and values, or dynamic=True",
    ),
    (
        ("OutOfMemoryError",),
        "mode='default' autotunes nothing and needs less memory while it compiles",
    ),
)
OTHERWISE = "on_failure='raise' shows the whole error; compile other regions to leave this one out"
# What makes a break one that was asked for, which fullgraph allows as little.
_ON_PURPOSE = re.compile(r"(?:,? or |; )?[^;,]*torch\.compiler\.disable[^;,]*")
# What a machine lacks at the moment, and another day may have.
_OF_THE_MACHINE = (
    "InvalidCxxCompiler",
    "No working C++ compiler",
    "TritonMissing",
    "No space left on device",
    "Too many open files",
    "Cannot allocate memory",
    "Failed to find C compiler",
)


def explained(error: BaseException, timeout_s: float) -> tuple[str, str]:
    """Return the cause of a failed compile in one line, and its remedy.

    Args:
        error: What the compiler raised, or what ended it.
        timeout_s: The limit that it was under.
    """
    if isinstance(error, CallTimeoutError):
        return (
            f"compiling took longer than timeout_s={timeout_s:g}",
            "give a longer timeout_s, or smaller regions (regions='blocks')",
        )
    inner = getattr(error, "inner_exception", None) or error
    lacks_fake = without_fake(str(inner)) is not None
    if lacks_fake or type(inner).__name__ in CANNOT_FOLLOW:
        reading = read_break(str(inner))
        remedy = _ON_PURPOSE.sub("", _unstopped(reading.remedy)) or "take it out of the forward"
        cause = f"{_unstopped(reading.reason)}{_place(str(inner))}"
        return cause, remedy if lacks_fake else f"{remedy}; or leave fullgraph out"
    words = f"{type(error).__name__} {type(inner).__name__} {inner}"
    remedy = next((r for signs, r in _REMEDIES if any(s in words for s in signs)), OTHERWISE)
    # The machine's failure may stand below the compiler's.
    lines = [line for line in str(inner).splitlines() if is_of_the_machine(line)]
    return f"{type(inner).__name__}: {_unstopped(first_line((lines or [str(inner)])[0]))}", remedy


def is_of_the_machine(words: str) -> bool:
    """Whether a failure is the machine's as it is now, and not the model's."""
    return any(sign in words for sign in _OF_THE_MACHINE)


def _unstopped(text: str) -> str:
    """Return a sentence as a part of another one."""
    return text[:-1] if text.endswith(".") and not text.endswith("...") else text


def _place(text: str) -> str:
    """Return the user's innermost line in torch's stack of an error, behind a comma."""
    stack = text.partition("from user code:")[2]
    lines = [
        found for found in re.findall(r'File "(.*?)", line (\d+)', stack) if is_users(found[0])
    ]
    return f", at {':'.join(lines[-1])}" if lines else ""


def first_line(text: str) -> str:
    """Return the first line with words in it, shortened."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= 200 else f"{line[:197]}..."

"""Why a compile failed, in words, and what to do about it."""

from __future__ import annotations

from torchfast.compiler.timeout import CallTimeoutError

# What stands in the class name or message of an error, and the remedy.
_REMEDIES = (
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
        ("Unsupported", "UserError"),
        "take what is named out of the forward, or leave fullgraph out",
    ),
    (
        ("OutOfMemoryError",),
        "mode='default' autotunes nothing and needs less memory while it compiles",
    ),
)
_OTHERWISE = "on_failure='raise' shows the whole error; compile other regions to leave this one out"


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
    words = f"{type(error).__name__} {type(inner).__name__} {inner}"
    remedy = next((r for signs, r in _REMEDIES if any(s in words for s in signs)), _OTHERWISE)
    return f"{type(inner).__name__}: {first_line(str(inner))}", remedy


def first_line(text: str) -> str:
    """Return the first line with words in it, shortened."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= 200 else f"{line[:197]}..."

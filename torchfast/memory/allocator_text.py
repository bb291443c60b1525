"""The text that torch reads its allocators' settings from: ``key:value,key:[a:1,b:2]``.

Torch's own reader is lenient where that hurts: of ``20.5`` it takes 20, of ``-1`` a number beyond
all memory, and a forgotten colon is an internal error. So texts are read here first, strictly.
"""

from __future__ import annotations

import re
from typing import Any, Final

from torchfast.memory.allocator_keys import known_name

_ITEM: Final = re.compile(r"(?P<key>[^,:\[\]]+):(?P<value>\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_WORDS: Final = {"True": True, "False": False}


def read_settings(text: str, place: str) -> dict[str, Any]:
    """Return the settings of a text by torch's names, unchecked; of a repeated one the last.

    Args:
        text: As in the environment variable. White space means nothing.
        place: Where it comes from, for errors.

    Raises:
        ValueError: It is not such a text, or names a key that does not exist.
    """
    packed = re.sub(r"\s", "", text)
    settings: dict[str, Any] = {}
    position = 0
    while position < len(packed):
        item = _ITEM.match(packed, position)
        if item is None:
            raise ValueError(
                f"{place} cannot be read from {packed[position:]!r} on; settings are written as "
                "key:value, with commas between them, and lists in brackets: key:[256:1,512:2]"
            )
        name = known_name(item["key"], place)
        settings[name] = _value(item["value"], name, place)
        position = item.end()
    return settings


def write_settings(settings: dict[str, Any]) -> str:
    """Return the text of settings that are checked."""
    return ",".join(f"{name}:{_written(value)}" for name, value in settings.items())


def _value(text: str, name: str, place: str) -> Any:
    if not text.startswith("["):
        return _scalar(text, name, place)
    pairs: list[tuple[Any, Any]] = []
    for entry in filter(None, text[1:-1].split(",")):
        key, colon, value = entry.partition(":")
        if not colon or not key or not value:
            raise ValueError(
                f"{place}: {name} has {entry!r} in its list; entries are written as 256:2"
            )
        interval = name == "roundup_power2_divisions" and key.isdecimal()
        pairs.append((int(key) if interval else key, _scalar(value, name, place)))
    return tuple(pairs)


def _scalar(text: str, name: str, place: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text.capitalize() in _WORDS:
        raise ValueError(f"{place}: {name}:{text} must be spelled {text.capitalize()}")
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(f'{key}:{_written(each)}' for key, each in value)}]"
    return str(value)

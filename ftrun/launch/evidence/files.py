"""How a post-mortem's files are written: whole or not at all for who reads them now, without ``fsync``."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def put(path: Path, text: str, writer: str = "") -> None:
    """Write or replace a file; after a power loss it may be missing.

    Args:
        path: of the file.
        text: what it holds from now on.
        writer: tells this one from others that write the same file at once, on other nodes: a process id does not.

    Raises:
        OSError: it can't be written, and is as it was before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{writer and f'.{writer}'}.tmp")
    try:
        temporary.write_bytes(encoded(text))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def encoded(text: str) -> bytes:
    """A text, whatever a script has put into it."""
    return text.encode(errors="backslashreplace")


def to_json(facts: Mapping[str, Any]) -> str:
    """A document of dataclasses and what JSON has."""
    return json.dumps(plain(facts), indent=1, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses become objects, enums their values, what is no number null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, int) else plain(value.value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)

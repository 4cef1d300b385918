"""A job file's text, and why there is none."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

from ftrun.config import messages, yaml
from ftrun.config.findings import Finding, config_error, position

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.errors import ConfigError


def read(path: Path) -> yaml.Document:
    """Read a job file that holds keys and values.

    Raises:
        ConfigError: there is no such file, it can't be read or parsed, or it holds no keys and values.
    """
    source = str(path)
    document = yaml.parse(_text(path), source)
    if document.value is None:
        raise _refused(path, "the job file is empty; a job needs at least 'script: train.py'")
    if not isinstance(document.value, dict):
        found = f"expects keys such as 'script: train.py', not {messages.shown(document.value)}"
        raise config_error([Finding(source, document.marks[()].value, found)], document.text)
    return document


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _refused(path, f"no such file; {_near(path)}") from None
    except IsADirectoryError:
        example = path / "job.yaml"
        raise _refused(path, f"is a directory; give the job file, for example {example}") from None
    except OSError as error:
        raise _refused(path, f"can't be read ({os.strerror(error.errno or 0)}); check the path") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Offsets of this error count from behind a byte order mark.
        before = error.object[: error.start].decode("utf-8")
        found = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise config_error([Finding(str(path), position(before, len(before)), found)]) from None


def _refused(path: Path, text: str) -> ConfigError:
    return config_error([Finding(str(path), None, text)])


def _near(path: Path) -> str:
    """The job file beside the missing one that was probably meant."""
    try:
        names = [other.name for other in path.parent.iterdir() if other.suffix in (".yaml", ".yml")]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean '{path.with_name(near[0])}'?" if near else "check the path of the job file"

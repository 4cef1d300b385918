"""The header of a safetensors file, built and read. Without torch.

Dtypes that the format lacks (complex and the rarer 8-bit floats) lie in a file as raw bytes (U8); the true dtype and
shape stand in the rank's record.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGN = 64
MAX_HEADER = 100_000_000
"""Bytes that the library takes for a header at most."""

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
"""The format's names of dtypes by torch's."""


@dataclass(frozen=True)
class Content:
    """A tensor to be written.

    Attributes:
        key: its name in the file, unique.
        dtype: torch's name of its dtype.
        shape: its shape.
        size: in bytes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def header(contents: Sequence[Content]) -> bytes:
    """What stands before the tensors, which follow it without a gap in the order given. Its length is aligned.

    Raises:
        CheckpointError: more tensors than the library reads the names of.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in contents:
        stored = NAMES.get(each.dtype)
        shape = list(each.shape) if stored else [each.size]
        entries[each.key] = {"dtype": stored or "U8", "shape": shape, "data_offsets": [offset, offset + each.size]}
        offset += each.size
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"{len(contents)} tensors don't fit one safetensors header ({len(text)} bytes): track fewer, larger tensors"
        )
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Span:
    """A tensor in a file.

    Attributes:
        dtype: torch's name of its dtype.
        shape: its shape.
        start: its first byte, counted from the end of the header.
        end: the first byte behind it.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


_DTYPES = {stored: name for name, stored in NAMES.items()}
_BITS = {"BOOL": 8, "BF16": 16, "F8_E5M2": 8, "F8_E4M3": 8}


def parse(text: bytes, size: int) -> dict[str, Span]:
    """The tensors that a header lists, without the eight bytes of its length.

    Args:
        text: the header.
        size: bytes that follow it in the file.

    Raises:
        ValueError: it is malformed, or its tensors don't fill those bytes exactly.
        RecursionError: it is nested without end.
    """
    entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    entries.pop("__metadata__", None)
    spans = {name: _span(name, entry) for name, entry in entries.items()}
    _check_layout(spans, size)
    return spans


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("its header has a key twice")
    return document


def _span(name: str, entry: Any) -> Span:
    known = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    if not known or not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ValueError(f"the entry of {name!r} is malformed")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or offsets of {name!r} are malformed")
    if 8 * (offsets[1] - offsets[0]) != math.prod(shape) * _bits(entry["dtype"]):
        raise ValueError(f"the offsets of {name!r} don't fit its shape")
    return Span(_DTYPES[entry["dtype"]], tuple(shape), offsets[0], offsets[1])


def _bits(stored: str) -> int:
    return _BITS.get(stored) or int(stored.lstrip("UIF"))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_layout(spans: dict[str, Span], size: int) -> None:
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
        if span.start != end:
            raise ValueError(f"the data of {name!r} begins at {span.start}, not at {end}")
        end = span.end
    if end != size:
        raise ValueError(f"its tensors end at {end}, its data at {size}")

"""A rank's tensors as one safetensors file: written as a stream with its checksums, read back verified.

The safetensors library opens the files. Dtypes that it lacks (complex and the rarer 8-bit floats) lie in them
as raw bytes (U8); the true dtype and shape stand in the rank's JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.checksums import Checksums, FileRecord, read_verified
from ftrun.errors import CheckpointError, CorruptCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

_ALIGN = 64
_MAX_HEADER = 100_000_000  # the library's limit
_SLICE = 4 * 2**20  # written while its checksum has left it in the cache

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def digest(tensor: torch.Tensor) -> str:
    """BLAKE2b-128 of a CPU tensor's bytes: equal digests mean equal content."""
    return hashlib.blake2b(_bytes(tensor), digest_size=16).hexdigest()


def write(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write contiguous CPU tensors and return the file's size and checksums.

    Raises:
        CheckpointError: more tensors than a safetensors header can name.
        OSError: writing failed.
    """
    # Widest first, as the library does it: every tensor then lies at a multiple of its own element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    sums = Checksums()
    for piece in _pieces(names, tensors):
        sums.update(piece)
        file.write(piece)
    return sums.record()


def read(file: BinaryIO, record: FileRecord, *, attempt: str, name: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a file, every chunk verified. They share one buffer of the file's size.

    Raises:
        CorruptCheckpoint: the bytes differ from the record, or are no safetensors file.
        OSError: reading failed.
    """
    buffer = read_verified(file, record, attempt=attempt, name=name)
    try:
        return _parse(buffer)
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpoint(f"checkpoint {attempt}: {name} is no safetensors file: {error}", attempt) from error


def view_as(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The same bytes under their true dtype and shape.

    Raises:
        RuntimeError: they don't fit.
    """
    if tensor.dtype == dtype and tuple(tensor.shape) == shape:
        return tensor
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _pieces(names: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield _header(names, tensors)
    for name in names:
        data = _bytes(tensors[name])
        for start in range(0, len(data), _SLICE):
            yield data[start : start + _SLICE]


def _header(names: list[str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        size = tensor.numel() * tensor.dtype.itemsize
        stored = _NAMES.get(tensor.dtype)
        shape = list(tensor.shape) if stored else [size]
        entries[name] = {"dtype": stored or "U8", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > _MAX_HEADER:
        raise CheckpointError(
            f"{len(names)} tensors don't fit one safetensors header ({len(text)} bytes): track fewer, larger tensors"
        )
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class _Span:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _parse(buffer: bytearray) -> dict[str, torch.Tensor]:
    length = int.from_bytes(buffer[:8], "little")
    if len(buffer) < 8 or length > min(_MAX_HEADER, len(buffer) - 8):
        raise ValueError(f"its header claims {length} bytes, the file has {len(buffer)}")
    entries = json.loads(buffer[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    entries.pop("__metadata__", None)
    spans = {name: _span(name, entry) for name, entry in entries.items()}
    _check_layout(spans, len(buffer) - 8 - length)
    return {name: _tensor(buffer, 8 + length, span) for name, span in spans.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("its header has a key twice")
    return document


def _span(name: str, entry: Any) -> _Span:
    known = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    if not known or entry["dtype"] not in _DTYPES:
        raise ValueError(f"the entry of {name!r} is malformed")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or offsets of {name!r} are malformed")
    dtype = _DTYPES[entry["dtype"]]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"the offsets of {name!r} don't fit its shape")
    return _Span(dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_layout(spans: dict[str, _Span], size: int) -> None:
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
        if span.start != end:
            raise ValueError(f"the data of {name!r} begins at {span.start}, not at {end}")
        end = span.end
    if end != size:
        raise ValueError(f"its tensors end at {end}, its data at {size}")


def _tensor(buffer: bytearray, base: int, span: _Span) -> torch.Tensor:
    if span.start == span.end:
        return torch.empty(span.shape, dtype=span.dtype)
    count = (span.end - span.start) // span.dtype.itemsize
    return torch.frombuffer(buffer, dtype=span.dtype, count=count, offset=base + span.start).reshape(span.shape)

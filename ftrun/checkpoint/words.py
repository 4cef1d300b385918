"""Single values to JSON and back: everything that a state may hold and that holds nothing itself."""

from __future__ import annotations

import base64
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

TAG = "$"
"""The reserved key: an object that has it says by its value what it is."""

UNKNOWN = object()
"""What :func:`encode_word` answers to a value that it has no word for."""

_JSON_INT = 2**63
_NUMPY_KINDS = frozenset("biufcSUMm")


def is_plain_text(text: str) -> bool:
    """Whether JSON brings the text back as it is: two lone surrogates would come back as one character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_plain_list(values: Collection[Any]) -> bool:
    """Whether JSON brings some values back as they are: all of them texts, or all of them whole numbers."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return "".join(values).isascii()
    return kinds == {int} and min(values) >= -_JSON_INT and max(values) < _JSON_INT


def is_numpy_dtype(dtype: Any) -> bool:
    """Whether arrays of this dtype are bytes and nothing else: no objects, no records."""
    return dtype.kind in _NUMPY_KINDS


def numpy_dtype(name: str) -> Any:
    """The dtype of a name that :func:`is_numpy_dtype` accepts.

    Raises:
        ValueError: any other.
    """
    dtype = np.dtype(name)
    if not is_numpy_dtype(dtype):
        raise ValueError(f"{name!r} is no storable NumPy dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def encode_word(value: Any) -> Any:
    """A single value as JSON, or :data:`UNKNOWN`."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.generic) and is_numpy_dtype(value.dtype):
        return {TAG: "numpy", "dtype": value.dtype.str, "base64": _to_base64(value.tobytes())}
    return UNKNOWN


def decode_word(node: dict[str, Any]) -> Any:
    """A single value from a tagged object.

    Raises:
        ValueError: the tag is unknown, or what stands beside it doesn't fit.
        KeyError: something is missing beside it.
    """
    decoder = _DECODERS.get(node[TAG])
    if decoder is None:
        raise ValueError(f"a {node[TAG]!r} is unknown to this version of ftrun")
    return decoder(node)


def _int(value: int) -> Any:
    return value if -_JSON_INT <= value < _JSON_INT else {TAG: "int", "hex": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}


def _complex(value: complex) -> Any:
    return {TAG: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}


def _text(value: str) -> Any:
    if is_plain_text(value):
        return value
    return {TAG: "str", "base64": _to_base64(value.encode("utf-8", "surrogatepass"))}


def _numpy_scalar(node: dict[str, Any]) -> Any:
    return np.ndarray((), numpy_dtype(node["dtype"]), buffer=_from_base64(node["base64"]))[()]


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _int,
    float: _float,
    complex: _complex,
    str: _text,
    bytes: lambda value: {TAG: "bytes", "base64": _to_base64(value)},
    bytearray: lambda value: {TAG: "bytearray", "base64": _to_base64(value)},
    torch.Size: lambda value: {TAG: "torch.Size", "of": list(value)},
    torch.dtype: lambda value: {TAG: "torch.dtype", "name": dtype_name(value)},
    torch.device: lambda value: {TAG: "torch.device", "name": str(value)},
}

_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda node: int(node["hex"], 16),
    "float": lambda node: struct.unpack(">d", bytes.fromhex(node["bits"]))[0],
    "complex": lambda node: complex(*struct.unpack(">dd", bytes.fromhex(node["bits"]))),
    "str": lambda node: _from_base64(node["base64"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda node: _from_base64(node["base64"]),
    "bytearray": lambda node: bytearray(_from_base64(node["base64"])),
    "numpy": _numpy_scalar,
    "torch.Size": lambda node: torch.Size(node["of"]),
    "torch.dtype": lambda node: dtype_of(node["name"]),
    "torch.device": lambda node: torch.device(node["name"]),
}

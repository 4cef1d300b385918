"""Samples as values that stay what they are and can be compared, to see whether two readings gave the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, str, bytes)


def frozen(value: Any) -> Any:
    """What equals that of another sample if and only if both are the same, bit for bit. Large arrays by their digest.

    Args:
        value: tensors in CPU memory, NumPy arrays, numbers and text, in lists, tuples, dicts and dataclasses.

    Raises:
        TypeError: it holds something else, of which nobody here knows when two of them are the same.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()  # so that not-a-number equals itself, and zero not minus zero
    if kind is torch.Tensor and value.layout == torch.strided and value.device.type == "cpu":
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return kind, value.dtype, tuple(value.shape), value.requires_grad, _digest(plain)
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        if not value.dtype.hasobject:
            return kind, value.dtype, value.shape, _digest(np.ascontiguousarray(value))
    elif kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return kind, tuple(map(frozen, value))
    elif kind in (dict, OrderedDict):
        return kind, tuple((frozen(key), frozen(each)) for key, each in value.items())
    elif dataclasses.is_dataclass(kind):
        return kind, tuple(frozen(getattr(value, field.name)) for field in dataclasses.fields(kind))
    raise TypeError(f"a {kind.__name__} can't be compared bit for bit")


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    # A quick sample may be as large as a mapped file.
    return (
        array.tobytes() if array.nbytes <= 64 else hashlib.blake2b(array.view(np.uint8).data, digest_size=16).digest()
    )

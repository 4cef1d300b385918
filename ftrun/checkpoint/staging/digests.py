"""CRC32C of tensors that ranks hold in common on trust, taken in the same save as their bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from crc32c import crc32c

from ftrun.checkpoint.checksums import to_hex
from ftrun.checkpoint.staging.moves import DEVICE_SLICE, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def tasks(tensors: Mapping[str, torch.Tensor], found: dict[str, str]) -> dict[str, Callable[[], None]]:
    """Work that puts the digest of each tensor into ``found``.

    What only torch can read is done here and now, on the training thread: another thread would not see what that one's
    stream is about to write.
    """
    work: dict[str, Callable[[], None]] = {}
    for name, tensor in tensors.items():
        task = partial(_digest, name, tensor, found)
        if is_plain(tensor):
            work[name] = task
        else:
            task()
    return work


def digest(tensor: torch.Tensor) -> str:
    """CRC32C of a tensor's bytes, in the order of its elements, in hexadecimal."""
    if is_plain(tensor) and tensor.is_contiguous():
        return to_hex(crc32c(_bytes(tensor)))
    crc = 0
    flat = tensor.contiguous().reshape(-1)
    for part in torch.split(flat, max(1, DEVICE_SLICE // tensor.dtype.itemsize)):
        crc = crc32c(_bytes(part.cpu().resolve_conj().resolve_neg()), crc)
    return to_hex(crc)


def _digest(name: str, tensor: torch.Tensor, found: dict[str, str]) -> None:
    found[name] = digest(tensor)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data

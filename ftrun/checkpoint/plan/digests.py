"""What a tensor holds, in short: a checksum of all of it, or of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from crc32c import crc32c

from ftrun.checkpoint.checksums import to_hex

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLES = 64
"""Elements that stand for a whole tensor where it is known to be the same on all ranks."""

_PART = 16 * 2**20  # bytes brought from a device at a time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content(tensor: torch.Tensor) -> str:
    """CRC32C of a tensor's bytes, row by row, in hexadecimal. A contiguous tensor of the host is not copied for it."""
    if tensor.numel() < 2:  # whose strides may be any, and it would still count as contiguous
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    crc = 0
    flat = tensor.contiguous().view(-1)
    for part in torch.split(flat, max(1, _PART // tensor.dtype.itemsize)):
        plain = part.cpu().resolve_conj().resolve_neg()
        crc = crc32c(plain.view(torch.uint8).numpy().data, crc)
    return to_hex(crc)


def sampled(tensors: Sequence[torch.Tensor]) -> list[str]:
    """For each tensor CRC32C of some of its elements, evenly spread, the first and the last among them."""
    samples = [_sample(tensor) for tensor in tensors]
    # One way back from each device for all of them.
    for device in {each.device for each in samples if not each.is_cpu}:
        numbers = [number for number, each in enumerate(samples) if each.device == device]
        together = torch.cat([samples[number] for number in numbers]).cpu()
        parts = torch.split(together, [len(samples[number]) for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            samples[number] = part
    return [to_hex(crc32c(each.numpy().tobytes())) for each in samples]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of some elements."""
    words = _as_words(tensor.resolve_conj().resolve_neg())
    count = min(SAMPLES, words.numel())
    if not count:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    places = torch.linspace(0, words.numel() - 1, count, dtype=torch.float64, device=tensor.device).round().long()
    # Takes elements row by row whatever the strides, without a copy of the whole.
    return torch.take(words, places).view(torch.uint8)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.itemsize > 8:  # complex128
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.dtype.itemsize])

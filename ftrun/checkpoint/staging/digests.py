"""CRC32C of tensors that ranks hold in common on trust, taken in the same save as their bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ftrun.checkpoint.plan.digests import content
from ftrun.checkpoint.staging.moves import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


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


def _digest(name: str, tensor: torch.Tensor, found: dict[str, str]) -> None:
    found[name] = content(tensor)

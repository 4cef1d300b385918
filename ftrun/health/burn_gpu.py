"""A load on every GPU and its memory, with results that are known to the last bit. Imports torch when it is called."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.health.burn import Load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, device

SIDE = 2048
"""Sums of so many products of numbers up to 8 are exact in 32-bit floats, and on tensor cores with TF32, too."""
_MOST_MEMORY = 4 << 30
_AT_ONCE = 8
_CHOICE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpus(seconds: float, devices: Sequence[device] = (), side: int = SIDE) -> Load:
    """Load GPUs and compare.

    Args:
        seconds: for how long.
        devices: which; empty for all.
        side: rows and columns of what is multiplied.
    """
    import torch

    if not devices:
        if torch.version.cuda is None and torch.version.hip is None:
            return Load("GPUs", "", "this torch uses no GPUs")
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if missing := gone(len(list(Path("/dev").glob("nvidia[0-9]*"))), len(devices), os.environ):
            return Load("GPUs", missing, "")
    try:
        return _loaded(seconds, devices, side)
    except torch.OutOfMemoryError:
        raise  # somebody else uses them: that is no fault of theirs
    except RuntimeError as error:
        return Load("GPUs", f"a GPU failed: {str(error).partition(chr(10))[0]}", "")


def gone(there: int, usable: int, environment: Mapping[str, str]) -> str:
    """What is wrong where the driver has more GPUs than can be used; empty for nothing. Pure.

    Args:
        there: device files of GPUs; that of one which has fallen off the bus stays.
        usable: how many torch finds.
        environment: it may say that only some are to be used.
    """
    chosen = any(environment.get(name) is not None for name in _CHOICE)
    return "" if chosen or usable >= there else f"{there - usable} of {there} GPUs can't be used"


def _loaded(seconds: float, devices: Sequence[device], side: int) -> Load:
    import torch

    random = torch.Generator().manual_seed(17)
    left, right = (torch.randint(-8, 9, (side, side), generator=random).float() for _ in range(2))
    # 64-bit floats on the processor: another path than the one under test, and exact as well.
    expected = (left.double() @ right.double()).float()
    loads = [_Device(each, (left, right, expected)) for each in devices]
    deadline = time.monotonic() + seconds
    while True:
        for each in loads:  # a few products for each in turn: none waits for another
            each.queue()
        for each in loads:
            each.compare()
        if time.monotonic() >= deadline:
            break
    troubles = [f"{each.device}: {trouble}" for each in loads if (trouble := each.trouble or each.held_wrong())]
    products = sum(each.products for each in loads)
    return Load("GPUs", "; ".join(troubles), f"{len(loads)} GPUs, {products:,} products")


class _Device:
    """The load on one GPU."""

    def __init__(self, which: device, factors: tuple[Tensor, Tensor, Tensor]) -> None:
        import torch

        self.device = which
        self.products = 0
        self.trouble = ""
        self._left, self._right, self._expected = (each.to(which) for each in factors)
        self._wrong = torch.zeros((), dtype=torch.int64, device=which)
        free = torch.cuda.mem_get_info(which)[0] if which.type == "cuda" else 64 << 20
        count = min(free // 4, _MOST_MEMORY) // 16
        self._pattern = torch.arange(count, device=which) * 0x9E3779B97F4A7C1
        self._held = self._pattern.clone()

    def queue(self) -> None:
        """Have some products made and compared; nothing is waited for."""
        for _ in range(_AT_ONCE):
            self._wrong += (self._left @ self._right != self._expected).sum()
        self.products += _AT_ONCE

    def compare(self) -> None:
        """Wait for them."""
        wrong = int(self._wrong.item())
        if wrong and not self.trouble:
            self.trouble = f"{wrong:,} numbers wrong in {self.products:,} products"

    def held_wrong(self) -> str:
        """What the load has done to memory."""
        wrong = int((self._held != self._pattern).sum().item())
        return f"{wrong:,} words of memory changed under load" if wrong else ""

"""Copies from a CUDA device: issued by the training thread, done by the device, waited for by others.

What can't wait goes into the training's own stream, so it is copied before anything that is issued later runs. What may
overlap goes into a stream of its own. At the fence the training's stream waits for that one; the processor waits for
neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.checkpoint.staging.moves import Whole


class DeviceCopies:
    """The copies of one snapshot from one device.

    Args:
        device: the device.
        stream: for what may overlap.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._differ: list[tuple[str, torch.Tensor]] = []

    def issue(self, now: Sequence[Whole], later: Sequence[Whole], probes: Sequence[Whole]) -> None:
        """Have everything copied, and then the probes, which are part of ``now``, compared with their copies."""
        for move in now:
            move.target.copy_(move.source, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for move in later:
                move.target.copy_(move.source, non_blocking=True)
            self._differ = [(move.name, _differs(move)) for move in probes]
            self._done.record(self._stream)

    def fence(self) -> None:
        """What the training issues from now on runs after the copies."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> set[str]:
        """Wait for the device; names of probes that differ, which changed while the rest was copied."""
        self._done.synchronize()
        return {name for name, differs in self._differ if bool(differs)}


def _differs(move: Whole) -> torch.Tensor:
    copy = move.target.to(move.source.device, non_blocking=True).reshape(-1).view(torch.uint8)
    return torch.ne(copy, move.source.reshape(-1).view(torch.uint8)).any()

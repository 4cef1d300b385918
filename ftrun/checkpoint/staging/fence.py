"""The fence: torch calls it when any optimizer is about to step, which is when parameters change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle


class Fence:
    """Calls a function before every step of every optimizer in this process, tracked or not, on its thread.

    Args:
        reached: the function. It is quick when there is nothing to wait for.
    """

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached
        self._handle: RemovableHandle | None = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Begin. A second time does nothing."""
        if self._handle is None:
            # A step that is compiled leaves its graph for this.
            hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._handle = register_optimizer_step_pre_hook(hook)

    def remove(self) -> None:
        """End."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() == self._pid:  # a forked child has the memory of the slots, and none of their threads
            self._reached()

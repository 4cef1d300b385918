"""Word that a checkpoint root keeps a start waiting: one that hangs would otherwise look like a launcher that does."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ftrun.config.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun.checkpoint.layout import Root

_AFTER = (5.0, 60.0)


@contextlib.contextmanager
def told_if_slow(say: Callable[[str], object], root: Root, after: tuple[float, ...] = _AFTER) -> Iterator[None]:
    """Say, on a thread of its own, that the block still waits for a root.

    Args:
        say: takes the text.
        root: what is asked in the block.
        after: seconds after which it is said, each time.
    """
    timers = [threading.Timer(seconds, say, (_text(root, seconds),)) for seconds in after]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _text(root: Root, seconds: float) -> str:
    what = "check the network to it" if root.remote else "is its filesystem away? `stat` it from another shell"
    return f"the checkpoint root {root.url} has kept this start waiting for {format_duration(seconds)}: {what}"

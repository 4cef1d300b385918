"""Programs that are killed at every operation, and others that go on from what they find."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LIMIT = 500


def killed_at_each_operation(
    directory: Path,
    prepare: Callable[[Path], None],
    first: Callable[[Path], None],
    second: Callable[[Path], None],
    *,
    step: int = 1,
) -> None:
    """Kill ``first`` after its first operation, its second one, and so on until it ends by itself; then run ``second``.

    Each of these pairs of lives has its own directory beside the given one, and its own section of the log:
    ``NAME-1``, ``NAME-2``... A kill loses nothing that the program has done. Only a power loss does, and it may
    come later: what the first life didn't sync is still not synced, unless the second one sees to it.
    """
    for number in range(1, _LIMIT, step):
        place = directory.with_name(f"{directory.name}-{number}")
        place.mkdir()
        prepare(place)
        ended = _live(first, place, number)
        _live(second, place, None)
        if ended:
            return
    raise AssertionError(f"the first life does not end within {_LIMIT} operations")


def _live(life: Callable[[Path], None], place: Path, kill: int | None) -> bool:
    """Run a life in a process of its own; whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            if kill is not None:
                os.environ["POWER_LOSS_KILL"] = str(kill)  # in this process alone, which has nothing else to do
            life(place)
            os._exit(0)
        except BaseException:  # the parent's stack must not be unwound here
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or (kill is not None and os.WIFSIGNALED(status)), f"{life.__name__}: status {status}"
    return status == 0

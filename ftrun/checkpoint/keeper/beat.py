"""A keeper's sign of life, ``keeper.beat``: its launcher sees when it is stopped or hangs."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from os import getpid
from typing import TYPE_CHECKING

from ftrun.checkpoint.memory.files import put, read

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.tier import Tier


@dataclass(frozen=True)
class Beat:
    """Writes and reads it.

    Attributes:
        tier: the memory tier.
    """

    tier: Tier

    def write(self, now: float) -> None:
        """Live. ``now`` is ``time.monotonic()``, which all processes of a machine share.

        Raises:
            OSError: the tier is gone.
        """
        try:
            put(self.tier.path / "keeper.beat", f"{getpid()} {now:.3f}".encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # those pass
                raise

    def read(self) -> tuple[int, float] | None:
        """Process and time of the last sign; None where there is none."""
        try:
            pid, now = read(self.tier.path / "keeper.beat").split()
            return int(pid), float(now)
        except (OSError, ValueError):
            return None

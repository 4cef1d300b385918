"""``scripts/bench detect``: hangs told from slow phases, and causes named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import causes
import hangs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings
    from figures import Figure

_PARTS = (
    (("detect.hang",), hangs.hang),
    (("detect.cause",), causes.cause),
)


def measure(settings: Settings) -> Iterator[Figure]:
    """All figures that were asked for."""
    for ids, part in _PARTS:
        if settings.wants(*ids):
            yield from part(settings)

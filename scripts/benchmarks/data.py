"""``scripts/bench data``: what loading costs, whether it goes on exactly, and what the cache withstands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import data_exact
import data_fetch
import data_files
import data_resume
import data_storm
import data_throughput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings
    from figures import Figure

_PARTS = (
    (("data.throughput", "data.throughput.1ms"), data_throughput.throughput),
    (("data.wait",), data_files.wait),
    (("data.warm",), data_files.warm),
    (("data.resume",), data_resume.resume),
    (("data.exact",), data_exact.exact),
    (("data.fetch_factor",), data_fetch.fetch_factor),
    (("data.kill_storm",), data_storm.kill_storm),
)


def measure(settings: Settings) -> Iterator[Figure]:
    """All figures that were asked for."""
    for ids, part in _PARTS:
        if settings.wants(*ids):
            yield from part(settings)

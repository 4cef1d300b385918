"""``scripts/bench nodes``: losing a node, the store's host, half of the net; gaining one; and many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nodes_bed
import nodes_lost
import nodes_many
import nodes_replace
import nodes_worlds
from common import say
from figures import Figure, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings

_PARTS = (
    ("nodes.lost", 2.0, nodes_lost.lost),
    ("nodes.store_host", 2.0, nodes_lost.store_host),
    ("nodes.partition", 1.0, nodes_worlds.partition),
    ("nodes.join", 2.0, nodes_worlds.join),
    ("nodes.many", 4.0, nodes_many.many),
    ("detect.replace", 5.0, nodes_replace.replace),
)


def measure(settings: Settings) -> Iterator[Figure]:
    """All figures that were asked for; without network namespaces, none of them."""
    wanted = [(name, limit, part) for name, limit, part in _PARTS if settings.wants(name)]
    why = str(nodes_bed.tests("").why_not()) if wanted else ""
    if why:
        say(why)
    for name, limit, part in wanted:
        if why:
            yield Figure(name, None, Target("<=", limit), notes=[why])
        else:
            yield from part(settings)

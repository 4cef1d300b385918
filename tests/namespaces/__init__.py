"""A few machines on one: nodes in namespaces of their own, joined by a bridge that can be cut.

    with Net(3) as net:
        net.node(1).start(sys.executable, "agent.py")
        net.node(3).power_off()     # all that runs there is killed at once
        net.cut(2)                  # nothing passes to or from node 2, and nobody is told
        net.heal(2)

Nodes are called ``node1``, ``node2`` and so on; they know each other by those names. The bridge and each node live in
namespaces that have no name and no file: they last as long as the process that holds them, and that one dies with the
process that made the net, however that ends. Nets don't see each other, so tests that use them can run in parallel.

``why_not()`` says why there can be no such net on this machine; :mod:`namespaces.skipping` has the mark for tests.
"""

from __future__ import annotations

from namespaces.net import Net, why_not
from namespaces.node import Node
from namespaces.processes import Process

__all__ = ["Net", "Node", "Process", "why_not"]

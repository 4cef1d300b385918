"""What a keeper knows of the others for copies in memory: ``peers.json`` in the memory tier.

Each node's snapshots are copied to the memory of the next one, so that the loss of a node loses none of them. What was
copied lies in a tier of its own beside the node's, laid out like any other: to drain it, a keeper is started on it.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.memory.files import put, read
from ftrun.checkpoint.sealed import seal, unseal

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.memory.tier import Tier

_MOST = 8


@dataclass(frozen=True)
class Peers:
    """Who gets the copies, and what proves that a copy comes from this run.

    Attributes:
        secret: random text that all nodes of the round know.
        own: random text by which the others call this node.
        target: that of the node that gets this one's copies; empty where there is no other.
        addresses: at which it may be reached.
        port: its port.
    """

    secret: str
    own: str
    target: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0

    @property
    def key(self) -> bytes:
        """For signatures."""
        return hashlib.blake2b(f"ftrun peers {self.secret}".encode(), digest_size=32).digest()

    @staticmethod
    def path(tier: Tier) -> Path:
        """Where it lies."""
        return tier.path / "peers.json"

    def write(self, tier: Tier) -> None:
        """Put it where the keeper looks; only this user can read it.

        Raises:
            OSError: the tier can't be written.
        """
        put(self.path(tier), seal(asdict(self)))

    @classmethod
    def read(cls, tier: Tier) -> Peers | None:
        """Read it back; None where there is none."""
        try:
            document = unseal(read(cls.path(tier)))
            return cls(**(document | {"addresses": tuple(document["addresses"])}))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def listener() -> socket.socket:
    """A socket at which a node's keepers are reached, one after the other: the launcher keeps it.

    Raises:
        OSError: there can be none.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def own_addresses() -> list[str]:
    """Addresses of this machine at which others may reach it, IPv4 first. Some may mean another machine elsewhere.

    The last one is for launchers on one machine.
    """
    import psutil  # takes a while, and launchers have it

    found = [
        (entry.family, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and name != "lo"
    ]
    usable = [(family, address) for family, address in found if "%" not in address and not address.startswith("127.")]
    ordered = [address for _, address in sorted(usable, key=lambda each: each[0] != socket.AF_INET)]
    return [*ordered[:_MOST], "127.0.0.1"]

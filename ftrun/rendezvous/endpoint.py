"""The endpoint of a rendezvous: whose address it is, who listens there, and how this node is reached.

Names and interfaces of real machines are a mess: a host's own name may not resolve, or resolve to ``127.0.1.1``; an
endpoint may be given by a name that only others know, or as an address, of either family. What is asked here is only
what the kernel knows for sure: whether an address can be bound, and from which address another one is reached.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_PORT = 29400
"""As torchrun's."""

_BACKLOG = 1024


@dataclass(frozen=True)
class Endpoint:
    """Where nodes meet.

    Attributes:
        host: name or address.
        port: 0 for any free one, which makes sense for one node only.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read ``host``, ``host:port``, an IPv6 address, or ``[IPv6 address]:port``.

        Raises:
            UsageError: it is none of these.
        """
        text = text.strip()
        host, port = text, ""
        if text.startswith("["):
            host, closed, port = text[1:].partition("]")
            if not closed or (port and not port.startswith(":")):
                raise _unreadable(text)
            port = port[1:]
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if not host or (port and not (port.isdecimal() and int(port) < 2**16)):
            raise _unreadable(text)
        return cls(host, int(port) if port else DEFAULT_PORT)


def parse_list(text: str) -> tuple[Endpoint, ...]:
    """Read one endpoint, or several with commas between them.

    Raises:
        UsageError: one of them is none.
    """
    found = tuple(dict.fromkeys(Endpoint.parse(each) for each in text.split(",")))
    if len(found) > 1 and any(not each.port for each in found):
        raise UsageError(f"--rdzv-endpoint {text!r}: each address in a list needs a port other than 0.")
    return found


def _unreadable(text: str) -> UsageError:
    return UsageError(f"--rdzv-endpoint {text!r} is no address: give HOST or HOST:PORT, and [ADDRESS]:PORT for IPv6.")


def resolve(host: str) -> list[str]:
    """Addresses of a host, numeric, in the system's order. Can take as long as the system's resolver does.

    Raises:
        OSError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except UnicodeError as error:  # an empty part, or one that is too long
        raise OSError(errno.EINVAL, f"{host!r} is no host name") from error
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_mine(address: str) -> bool:
    """Whether an address, or a name, belongs to this machine (more exactly, to this network namespace)."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            bound = str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return False
    return not ipaddress.ip_address(bound.partition("%")[0]).is_unspecified


def address_towards(address: str) -> str:
    """This node's own address on the way to another one.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def address_among(own: str, others: Iterable[str]) -> str:
    """How others reach this node that may know itself by an address only that means nothing elsewhere.

    Args:
        own: the address by which it knows itself.
        others: addresses of other nodes; what counts is the way to them.
    """
    for each in others if is_loopback(own) else ():
        with contextlib.suppress(OSError, ValueError):
            if not is_loopback(each):
                return address_towards(each)
    return own


def is_loopback(address: str) -> bool:
    """Whether a numeric address means the machine itself, wherever it is used; a name doesn't."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def listen(port: int) -> socket.socket | None:
    """A socket that listens on all of this machine's addresses; None where somebody else listens there.

    Raises:
        OSError: anything else is wrong.
    """
    try:
        return _listen(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
    try:  # a machine without IPv6
        return _listen(socket.AF_INET, "0.0.0.0", port)  # noqa: S104 - other nodes have to reach it
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an agent that has just ended don't keep the next one from the port.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((address, port))
        # At once: two that have bound the same port both succeed as long as neither listens.
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def probe(address: str, port: int, seconds: float) -> None:
    """Connect and hang up.

    Raises:
        OSError: nobody listens there, or it can't be reached in time.
    """
    socket.create_connection((address, port), seconds).close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

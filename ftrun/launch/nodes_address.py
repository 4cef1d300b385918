"""Under which address other nodes and their workers reach this one.

Where a host's own name means something else than the address that others use (``127.0.1.1``, another network, or
nothing at all), gloo would have the workers listen there. It is told the right interface instead.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import psutil

from ftrun.errors import UsageError
from ftrun.rendezvous import endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.rendezvous.model import Who

VARIABLE = "FTRUN_INTERFACE"
_WORKERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def of_interface(environment: Mapping[str, str]) -> str | None:
    """This node's address on the interface that the environment names; None where it names none.

    Raises:
        UsageError: there is no such interface, or it has no address.
    """
    name = environment.get(VARIABLE)
    if not name:
        return None
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise UsageError(f"{VARIABLE}={name}: this node has no such interface; it has {', '.join(sorted(interfaces))}.")
    for family in _FAMILIES:
        for each in interfaces[name]:
            if each.family == family and not each.address.startswith("fe80:"):
                return each.address.partition("%")[0]
    raise UsageError(f"{VARIABLE}={name}: this interface has no address. Name another, or give --local-addr.")


def for_workers(environment: Mapping[str, str], own: str | None, others: list[Who]) -> dict[str, str]:
    """What workers have to be told so that those of other nodes reach them; nothing where they find it themselves.

    Args:
        environment: what it says already stands.
        own: this node's address as far as it was given.
        others: the other nodes of the round.
    """
    if chosen := environment.get(VARIABLE):
        return {name: chosen for name in _WORKERS if name not in environment}
    name = _WORKERS[0]  # the others look at the interfaces themselves
    if name in environment or not others:
        return {}
    address = own if own is not None and _is_mine(own) else _towards(others)
    interface = _interface(address) if address and address not in _own_name() else ""
    return {name: interface} if interface else {}


def _is_mine(address: str) -> bool:
    return not endpoint.is_loopback(address) and bool(_interface(address))


def _towards(others: list[Who]) -> str:
    for each in others:
        with contextlib.suppress(OSError, ValueError):
            if each.address and not endpoint.is_loopback(each.address):
                return endpoint.address_towards(each.address)
    return ""


def _interface(address: str) -> str:
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in held):
            return name
    return ""


def _own_name() -> list[str]:
    """What this host's name stands for; gloo takes the first of these."""
    with contextlib.suppress(OSError):
        return endpoint.resolve(socket.gethostname())[:1]
    return []

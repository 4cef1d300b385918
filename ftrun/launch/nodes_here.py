"""Several nodes of one run on one machine, as people try it on a laptop: when that is meant, and their names."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ftrun.errors import UsageError
from ftrun.launch import nodes_choice
from ftrun.rendezvous import endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.config.origins import Resolved

MOST = 64
"""Launchers of one run on a machine."""


def all_here(launch: Mapping[str, Resolved]) -> bool:
    """Whether no other machine can take part: the nodes meet at an address that means this one.

    A second launcher of the run is another node then, where otherwise it would be a mistake.

    Args:
        launch: torchrun's options with the origins of their values.
    """
    if not (nodes_choice.is_ours(launch) and nodes_choice.may_be_several(launch)):
        return False
    try:
        return all(endpoint.is_loopback(each.host) for each in endpoint.parse_list(str(launch["rdzv_endpoint"].value)))
    except UsageError:
        return False  # the rendezvous says what is wrong with it


def name(number: int) -> str:
    """What a node is called: as its machine is, if it is the only or the first one there.

    Args:
        number: of the launcher among those of the run on this machine, from 1.
    """
    host = socket.gethostname()
    return host if number == 1 else f"{host}#{number}"

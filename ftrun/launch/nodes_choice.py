"""Which rendezvous a run of several nodes uses, and the name that all its nodes know it by. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftrun.errors import UsageError
from ftrun.rendezvous import endpoint, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftrun.config.origins import Resolved

BACKEND = "ftrun"
"""The name of ftrun's own rendezvous, as ``--rdzv-backend`` takes it."""

_STATIC = ("node_rank", "master_addr", "master_port")
"""Options that only torch's static rendezvous has a use for."""


def is_ours(launch: Mapping[str, Resolved]) -> bool:
    """Whether nodes meet through ftrun's own rendezvous.

    They do where it is asked for by name; and where nothing is asked for, several nodes may take part and an endpoint
    is given. (Torch's default would be its static rendezvous, which has no use for these three together.)

    Args:
        launch: torchrun's options with the origins of their values.
    """
    backend = launch["rdzv_backend"]
    if backend.origin != "default":
        return str(backend.value) == BACKEND
    static = any(launch[name].origin != "default" for name in _STATIC if name in launch)
    met = bool(launch["rdzv_endpoint"].value) and not launch["standalone"].value
    return may_be_several(launch) and met and not static


def may_be_several(launch: Mapping[str, Resolved]) -> bool:
    """Whether more than one node can take part."""
    return str(launch["nnodes"].value) not in ("1", "1:1")


def number_of_nodes(nnodes: str) -> tuple[int, int]:
    """The least and the most nodes, of ``--nnodes``.

    Raises:
        UsageError: it is no number of nodes.
    """
    given = re.fullmatch(r"0*([1-9][0-9]{0,8})(?::0*([1-9][0-9]{0,8}))?", nnodes.strip())
    least, most = (int(given[1]), int(given[2] or given[1])) if given else (0, 0)
    if not 0 < least <= most:
        raise UsageError(
            f"--nnodes {nnodes}: write a number of nodes such as 4, or the least and the most such as 2:4."
        )
    return least, most


def require_usable(launch: Mapping[str, Resolved]) -> None:
    """See that what says how nodes meet can be used, before anything is started.

    Raises:
        UsageError: it can't; the message says what to change.
    """
    for name, problem in unusable(launch).items():
        origin = launch[name].origin
        raise UsageError(problem if origin == "command line" else f"{origin}: {problem}")


def unusable(launch: Mapping[str, Resolved]) -> dict[str, str]:
    """What is wrong with options that say how nodes meet, by their names; of another rendezvous only their number."""
    problems = {}
    checks: dict[str, Callable[[str], object]] = {"nnodes": number_of_nodes}
    if is_ours(launch) and not launch["standalone"].value:
        checks |= {"rdzv_endpoint": endpoint.parse_list, "rdzv_conf": settings.check}
    for name, check in checks.items():
        try:
            if (value := launch[name].value) or name == "nnodes":
                check(str(value))
        except UsageError as error:
            problems[name] = str(error)
    return problems


def common_name(launch: Mapping[str, Resolved]) -> str:
    """What an unnamed run is called on all its nodes, as a plain directory name.

    Raises:
        UsageError: nothing was given that is the same on all of them.
    """
    given = launch["rdzv_id"]
    name = re.sub(r"[^\w.-]+", "_", str(given.value)).strip("._") if given.origin != "default" else ""
    if not name:
        raise UsageError(
            "several nodes work in one run directory, and have to know it by the same name: give --name NAME (or "
            "--rdzv-id ID, or --run-dir PATH on storage that all of them reach), the same on all nodes."
        )
    return name

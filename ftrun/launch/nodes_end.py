"""What a node says and leaves with when it can't go on with the others, or the rendezvous is over for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.markup import escape
from torch.distributed import DistError, DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from ftrun.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from ftrun.launch.console import Console
    from ftrun.launch.nodes_group import Group

_AWAITED = re.compile(r"(?P<key>ftrun/\w+|torchelastic/[\w.]+|MASTER_\w+)(?:/(?P<node>\d+))?(?=[\s,)]|$)")
_TIMEOUT = re.compile(r"after (\d+) ?ms")
_NOBODY = re.compile(r"trying to connect to \((\S+), (\d+)\)")
_WORDS = {
    "torchelastic/role_info": "how many workers it has",
    "ftrun/past": "what it has been through",
    "ftrun/held": "what lies in its memory",
    "ftrun/moved": "how far its keeper is",
    "ftrun/card": "where its keeper is",
    "ftrun/part": "what it saw of the attempt before",
}
"""What a node tells the others at the beginning of a round. Everything else is what the first node decides."""
_OF_THE_FIRST = "how the attempt begins"
_SAME_COMMAND = "The same command tries again."


def after(error: RendezvousError, group: Group, console: Console) -> tuple[str, int]:
    """Say how it ended.

    Returns:
        The outcome, as :class:`ftrun.events.RunEnded` has it, and the exit code.
    """
    if isinstance(error, RendezvousClosedError):
        console.say(f"[red]■[/] the run was ended by {escape(str(error))}")
        code = group.exit_code()
        return "stopped" if code == ExitCode.TRY_AGAIN else "gave_up" if code == ExitCode.GAVE_UP else "failed", code
    if isinstance(error, RendezvousTimeoutError):
        console.warn(f"too few nodes: {error}. The same command goes on when there are enough.")
        return "stopped", ExitCode.TRY_AGAIN
    console.warn(f"the nodes did not meet: {error or type(error).__name__}. Check --rdzv-endpoint and --nnodes.")
    return "failed", ExitCode.FAILED


def unanswered(error: DistError, group: Group | None, console: Console) -> tuple[str, int]:
    """Say which node was waited for in vain at the beginning of a round, or that the store is lost; for all nodes.

    Args:
        error: what torch makes of it.
        group: the nodes, where they meet through ftrun's own rendezvous.
        console: for people.

    Returns:
        The outcome and the exit code: a new try may help where somebody was there once.
    """
    nobody = _NOBODY.search(str(error))
    may_pass = nobody is None and isinstance(error, DistStoreError | DistNetworkError)
    code = ExitCode.TRY_AGAIN if may_pass else ExitCode.FAILED
    if nobody is not None:
        where, port = nobody.groups()
        cause, advice = f"nobody answers at {where}, port {port}", "Is ftrun running on the node with that address?"
    elif may_pass:
        cause, advice = in_vain(str(error), group.names if group is not None else ())
    else:
        cause, advice = f"torch.distributed failed: {in_short(error)}", ""
    console.warn(f"{cause}. {advice}".rstrip())
    if group is not None:
        group.close(cause, code)
    return "stopped" if may_pass else "failed", code


def in_vain(text: str, hosts: Sequence[str]) -> tuple[str, str]:
    """What was waited for in vain, and what to do about it.

    Args:
        text: torch's words, with the keys that were waited for.
        hosts: what the round's nodes are called, in order; none where that isn't known.
    """
    seconds = _TIMEOUT.search(text)
    within = f" within {int(seconds[1]) / 1000:g} s" if seconds else ""
    awaited = _AWAITED.search(text)
    if awaited is None:
        line = text.partition("\n")[0]
        return f"the store of the round is lost ({line})", f"Is the first node well, and the network? {_SAME_COMMAND}"
    told = _WORDS.get(awaited["key"]) if awaited["node"] else None
    node = int(awaited["node"]) if told is not None else 0
    who = f"{hosts[node]} (node {node})" if node < len(hosts) else f"node {node}"
    cause = f"{who} has not said{within} {told or _OF_THE_FIRST}"
    return cause, f"Its launcher or its storage hangs, or it is gone: look into its output. {_SAME_COMMAND}"


def is_in_vain(text: str) -> bool:
    """Whether torch's words tell of a wait for something that didn't come."""
    return _TIMEOUT.search(text) is not None and _AWAITED.search(text) is not None


def in_short(error: BaseException) -> str:
    """An error in a line for the other nodes: its kind where that says something, and its first line."""
    line = str(error).partition("\n")[0]
    kind = type(error).__name__
    return f"{kind}: {line}" if line else kind

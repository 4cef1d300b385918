"""What a node says and leaves with when the rendezvous is over for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from ftrun.contract import ExitCode

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from ftrun.launch.console import Console
    from ftrun.launch.nodes_group import Group


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

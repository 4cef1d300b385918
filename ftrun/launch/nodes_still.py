"""What a node whose main thread stands still owes the others: a word, no workers once they went on, and its leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.contract import ExitCode
from ftrun.launch import family
from ftrun.rendezvous.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ftrun.launch.nodes_group import Group


class OtherNodes:
    """The other nodes, as :class:`ftrun.launch.main_thread.Watchdog` sees them. Called on its thread.

    Args:
        group: the nodes of the run.
        workers: process ids of this node's workers, each of which leads a session.
        idle: those of processes beside them that wait for something to do, and have nothing to lose.
    """

    def __init__(
        self, group: Group, workers: Callable[[], Collection[int]], idle: Callable[[], Collection[int]]
    ) -> None:
        self._group = group
        self._workers = workers
        self._idle = idle

    def stands_still(self, where: str) -> None:
        """Tell them. They go on without this node, unless most of them stand still as well."""
        self._group.stand_still(where)

    def left_behind(self) -> str:
        """Why nobody waits for this node any more, in words; empty while they do."""
        return self._group.left_behind

    def end_workers(self) -> None:
        """Kill the workers and their sessions: they are of a round that is over. The main thread will reap them."""
        leaders = set(self._workers())
        family.kill(leaders)
        theirs = {pid for pid, each in family.table().items() if each.session in leaders} - leaders
        # What removes the workers' shared memory ends by itself then.
        family.kill(pid for pid in theirs if not family.tidies_up(pid))

    def code(self) -> int:
        """What the launcher leaves with."""
        ending = self._group.ending
        failed = ending is not None and ending.outcome is not Outcome.FINISHED
        # Of a run that has finished nobody knows here whether all that was saved is committed: the next start sees.
        return self._group.exit_code() if failed else ExitCode.TRY_AGAIN

    def leave(self, where: str) -> None:
        """Say goodbye, and hand the rendezvous over if it is led here."""
        # A process with a thread that the kernel doesn't let go hasn't ended for those that would end with it.
        family.kill(self._idle())
        if self._group.ending is None:
            self._group.leave(f"its launcher stands still in {where}")

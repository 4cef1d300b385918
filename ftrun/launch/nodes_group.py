"""A node's part in a run of several nodes, as the agent sees it: beside torch's interface what ftrun's own offers.

Whoever fails decides for all. The others learn of it as of any other change of membership: the node that failed is
ready for another round, or has ended the run. That takes a moment, in which their own workers may have fallen with it:
:meth:`Group.await_word` waits for it, and :meth:`Group.claim` makes sure that of several nodes one alone decides.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING

from ftrun.contract import ExitCode
from ftrun.rendezvous.model import Outcome
from ftrun.rendezvous.round_store import RoundBroken

if TYPE_CHECKING:
    from torch.distributed import Store

    from ftrun.launch.remembering import Remembering
    from ftrun.rendezvous.handler import Handler
    from ftrun.rendezvous.model import Ending, Round, Who

_FALL, _LEAVING = "ftrun/fall", "ftrun/leaving"
_SLICE = 0.2


class Group:
    """The nodes of one run. Main thread of the agent.

    Args:
        handler: of the rendezvous.

    Attributes:
        alarm: a descriptor that is readable when :meth:`disturbance` may have something new to say.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._store: Store | None = None
        self._me = ""
        self._rank = 0
        self._memory: Remembering | None = None
        self.alarm = handler.alarm

    @property
    def name(self) -> str:
        """What this node is called."""
        return self._handler.name

    @property
    def round(self) -> Round:
        """The round that this node is in."""
        formed = self._handler.round
        if formed is None:
            raise AssertionError("a node is in a round before it has workers")
        return formed

    @property
    def names(self) -> tuple[str, ...]:
        """What the nodes of the latest round are called, in order; none before the first."""
        formed = self._handler.round
        return tuple(each.name for each in formed.members) if formed is not None else ()

    @property
    def others(self) -> list[Who]:
        """The round's other nodes."""
        return [each for rank, each in enumerate(self.round.members) if rank != self._rank]

    @property
    def ending(self) -> Ending | None:
        """How the run ended, as far as this node knows."""
        return self._handler.ending

    @property
    def not_needed(self) -> bool:
        """The run has finished without this node."""
        return self.ending is not None and self.ending.outcome is Outcome.FINISHED

    @property
    def spare(self) -> bool:
        """The others are at work, and this node waits. Any thread."""
        return self._handler.spare

    @property
    def grows(self) -> bool:
        """A new round is called only because nodes join: all members live."""
        return self._handler.growth

    @property
    def hosts(self) -> bool:
        """Whether the rendezvous is led on this node."""
        return self._handler.hosts

    def remember(self, memory: Remembering, grace: float, *, shared: bool) -> None:
        """Have the leader keep out whom the memory of nodes excludes, wherever the leader is.

        Args:
            memory: of this launcher.
            grace: seconds that workers get to leave in order.
            shared: all nodes of the run have this memory.
        """
        self._memory = memory
        memory.start(self._handler.exclude, lambda: self._handler.members, grace, shared=shared)

    @property
    def left_out(self) -> str:
        """Why this node is to leave, by the memory of nodes; empty while it isn't."""
        return self._memory.left_out if self._memory is not None else ""

    def hold_growth(self, *, hold: bool) -> None:
        """Let nodes that would make the world larger wait."""
        self._handler.hold_growth(hold=hold)

    def entered(self, store: Store, rank: int) -> None:
        """A round has begun.

        Args:
            store: its store.
            rank: of this node.
        """
        self._store, self._rank, self._me = store, rank, f"{rank} {self.name}"

    def disturbance(self) -> str:
        """Why this node's workers can't go on, in words; empty while they can."""
        return self._handler.disturbance

    def finished(self) -> bool:
        """All workers of this node have ended well; whether those of all others have, too."""
        return self._handler.finished()

    def absent(self) -> contextlib.AbstractContextManager[None]:
        """While the main thread is busy for long."""
        return self._handler.absent()

    def await_word(self, seconds: float) -> str:
        """Wait for a disturbance, :meth:`absent`. Returns it, or an empty text where none came in time."""
        deadline = time.monotonic() + seconds
        while not (word := self.disturbance()) and (left := deadline - time.monotonic()) > 0:
            select.select([self.alarm], [], [], min(left, _SLICE))
            self._handler.quiet()  # and no more: evidence, a kill and a long pause may follow
        return word

    def claim(self) -> bool:
        """Be the node that decides what follows from the fall of this round's workers; whether it is."""
        if self._store is None:
            return True
        try:
            return self._store.compare_set(_FALL, "", self._me).decode() == self._me
        except RoundBroken:
            return False

    def announce_leaving(self, reason: str) -> None:
        """Tell the others that this node's workers are about to leave in order, so that theirs leave with them."""
        if self._store is not None:
            with contextlib.suppress(RoundBroken):
                self._store.set(_LEAVING, reason)

    def somebody_leaves(self) -> bool:
        """Whether another node has said that its workers leave in order."""
        try:
            return self._store is not None and self._store.check([_LEAVING])
        except RoundBroken:
            return True

    @property
    def stall_timeout(self) -> float:
        """Seconds after which a main thread that isn't seen stands still; 0 for never."""
        return self._handler.stall_timeout

    def stand_still(self, where: str) -> None:
        """Tell the others where this process's main thread stands still; nowhere, once it goes on. Any other thread."""
        self._handler.stand_still(where)

    @property
    def left_behind(self) -> str:
        """Why the others wait for this node no more, in words; empty while they do. Any thread."""
        return self._handler.left_behind

    def leave(self, reason: str) -> None:
        """Take this node out of the run, and let the others go on."""
        self._handler.leave(reason)

    def close(self, cause: str, code: int) -> None:
        """End the run for all nodes.

        Args:
            cause: in words; what the others report.
            code: what this node leaves with.
        """
        if self.ending is None:
            self._handler.close(Outcome.FAILED, f"{self.name}: {cause}", code)

    def exit_code(self) -> int:
        """What to leave with after another node has ended the run."""
        return (self.ending.code if self.ending is not None else 0) or ExitCode.FAILED

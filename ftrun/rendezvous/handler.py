"""What torch's agent calls: :class:`Handler`, registered with torch as the backend ``ftrun``.

All methods are called on the agent's main thread, and none of them waits for the network without a deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler

from ftrun.rendezvous import settings as reading
from ftrun.rendezvous.entry import Entry
from ftrun.rendezvous.hosting import Hosting
from ftrun.rendezvous.line import settle
from ftrun.rendezvous.model import Ending, Outcome, Phase
from ftrun.rendezvous.pulse import Pulse
from ftrun.rendezvous.reach import Reach
from ftrun.rendezvous.round_store import RoundBroken
from ftrun.rendezvous.waiting import Excluded, await_round, is_spare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed.elastic.rendezvous.api import RendezvousHandlerRegistry, RendezvousInfo

    from ftrun.rendezvous.model import Round
    from ftrun.rendezvous.settings import Settings

__all__ = ["BACKEND", "Excluded", "Handler", "register"]

BACKEND = "ftrun"

_SLICE = 0.25
_LINGER_SECONDS = 10.0
_GOODBYE_SECONDS = 2.0
_SETTLE_SECONDS = 10.0


class Handler(RendezvousHandler):
    """This node's part in a run of many nodes.

    Nothing happens before the first :meth:`next_rendezvous`. :meth:`shutdown` ends all that was started; where it isn't
    called, the end of the process does that.

    Attributes:
        alarm: a descriptor that becomes readable when :meth:`num_nodes_waiting` has something new to say; for a main
            loop that waits for other things, too. :meth:`num_nodes_waiting` makes it quiet again.
        last_words: why this node ends, in words, should it end the run by that; set before :meth:`shutdown`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hosting = Hosting(settings, secrets.token_hex(8))
        self._pulse: Pulse | None = None
        self._entry: Entry | None = None
        self._left = False
        self._ended = False
        self.last_words = ""
        self.alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # What torch asks for

    def get_backend(self) -> str:
        """The name that the handler is registered with."""
        return BACKEND

    def get_run_id(self) -> str:
        """The run's id."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share the agent's store; torch's switch for that is honoured."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round. This node's workers are dead by now.

        Raises:
            RendezvousGracefulExitError: the run has finished, and this node wasn't needed.
            RendezvousClosedError: the run has failed elsewhere; the message says why.
            RendezvousTimeoutError: too few nodes came in time; the message says who is there.
            RendezvousConnectionError: the endpoint, or the round's first node, can't be reached.
            NotAdmitted: this node doesn't fit the others.
            Excluded: this node was excluded.
        """
        pulse, entry = self._start()
        while True:
            entry.leave()
            pulse.meet()
            self._quiet()
            formed = await_round(pulse, self._settings, lambda: self._ended)
            with contextlib.suppress(RoundBroken):
                info = entry.enter(formed)
                pulse.tick(watched=False)  # what follows until workers are watched takes its time
                return info

    def num_nodes_waiting(self) -> int:
        """How many good reasons there are to meet again, 0 or 1: a new round is called, or this node is cut off."""
        self._quiet()
        if self._pulse is None:
            return 0
        self._pulse.tick()
        return 1 if self._pulse.disturbed() else 0

    def is_closed(self) -> bool:
        """Whether the run is over, as far as this node knows."""
        return self._ended or (self._pulse is not None and self._pulse.known.ending is not None)

    def set_closed(self) -> None:
        """End the run for all nodes."""
        words = f": {self.last_words}" if self.last_words else " ended the run"
        self.close(Outcome.FAILED, f"{self.name}{words}")

    def shutdown(self) -> bool:
        """End this node's part. A member of a round that still stands ends the run with it, as under torchrun."""
        pulse = self._pulse
        if pulse is not None and not self._left:
            taking_part = pulse.phase in (Phase.RUNNING, Phase.FINISHED)
            if taking_part and not self.is_closed():
                self.set_closed()
        self._stop()
        return True

    # What ftrun's agent asks for beyond that

    @property
    def round(self) -> Round | None:
        """The last round that this node was in; its generation is the same on all nodes."""
        return self._pulse.known.round if self._pulse is not None else None

    @property
    def disturbance(self) -> str:
        """Why :meth:`num_nodes_waiting` says so, in words."""
        return self._pulse.disturbed() if self._pulse is not None else ""

    @property
    def growth(self) -> bool:
        """A new round is called, and only because nodes join: all members live, and workers can leave in order."""
        if self._pulse is None or not self._pulse.disturbed():
            return False
        known = self._pulse.known
        return known.call is not None and known.call.growth and not known.trouble and known.ending is None

    @property
    def members(self) -> tuple[str, ...]:
        """Host names of the round that stands. Any thread.

        None once the run is over, and while nodes meet for another reason than growth, in which workers leave in order.
        """
        known = self._pulse.known if self._pulse is not None else None
        if known is None or known.round is None or known.state is None or known.ending is not None:
            return ()
        in_order = known.call is not None and known.call.growth
        stands = known.round.generation == known.state.generation and (in_order or not known.state.called)
        return tuple(each.name for each in known.round.members) if stands else ()

    @property
    def name(self) -> str:
        """What this node is called."""
        return self._hosting.who.name

    @property
    def stall_timeout(self) -> float:
        """Seconds after which a main thread that isn't seen stands still; 0 for never."""
        return self._settings.timing.stall

    @property
    def spare(self) -> bool:
        """Whether the others are at work, and this node waits. Any thread."""
        return self._pulse is not None and self._pulse.phase is Phase.READY and is_spare(self._pulse.known)

    @property
    def hosts(self) -> bool:
        """Whether the rendezvous lives in this process."""
        return self._hosting.leads

    @property
    def ending(self) -> Ending | None:
        """How the run ended, as far as this node knows."""
        return self._pulse.known.ending if self._pulse is not None else None

    def finished(self) -> bool:
        """All workers of this node have ended well. Returns whether those of all others have, too.

        To be asked again and again instead of torch's exit barrier, with :meth:`num_nodes_waiting` beside it: when a
        member is lost before all have finished, this node's workers are needed once more.
        """
        pulse = self._pulse
        if pulse is None:
            return True
        if pulse.phase is Phase.RUNNING:
            pulse.finish()
        pulse.tick()
        ending = pulse.known.ending
        return ending is not None and ending.outcome is Outcome.FINISHED

    def quiet(self) -> None:
        """Make :attr:`alarm` quiet. Unlike :meth:`num_nodes_waiting`, it doesn't say that the main thread is back."""
        self._quiet()

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """While the main thread is busy for long (evidence, back-off), it isn't taken for stuck."""
        if self._pulse is not None:
            self._pulse.tick(watched=False)
        try:
            yield
        finally:
            if self._pulse is not None:
                self._pulse.tick()

    def close(self, outcome: Outcome, reason: str, code: int = 0) -> None:
        """End the run for all nodes. The first who does so is right.

        Args:
            outcome: finished or failed.
            reason: in words; what the other nodes report.
            code: exit code of this node, for the others to leave with.
        """
        self._ended = True
        if self._pulse is not None:
            self._pulse.end(Ending(outcome, reason, code))
            self._pulse.flush(_GOODBYE_SECONDS)

    def leave(self, reason: str) -> None:
        """Take this node out of the run, and let the others go on.

        Where it hosts the rendezvous, another node takes over; without that (``failover=0``) the run ends.

        Args:
            reason: in words.
        """
        pulse = self._pulse
        self._left = True
        if pulse is not None and self.hosts and not self.is_closed():
            if self._settings.failover:
                self._hand_over(pulse)
            else:
                self.close(Outcome.FAILED, f"{self.name}, which hosts the rendezvous, left: {reason}")
        self._stop()

    @staticmethod
    def _hand_over(pulse: Pulse) -> None:
        """Let the others learn that this node leaves on purpose, before they find its store gone."""
        pulse.depart()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while time.monotonic() < deadline:
            known, me = pulse.known, pulse.who.node
            member = known.round is not None and known.round.rank_of(me) is not None
            told = known.call is not None and (me in known.call.left or not member)
            if known.state is not None and known.state.called and told:
                break
            pulse.wait(_SLICE / 5)
        time.sleep(_SLICE)  # they look several times in that time

    def exclude(self, hosts: dict[str, str]) -> None:
        """Refuse nodes; those that take part leave. It counts where the leader is, now or later.

        Args:
            hosts: host names, and why. All of them: who was in it before and is no longer may come again.
        """
        self._hosting.exclude(hosts)

    def stand_still(self, where: str) -> None:
        """Tell the others that this process's main thread stands still. Any other thread.

        Args:
            where: in words; empty where it goes on.
        """
        if self._pulse is not None:
            self._pulse.stand_still(where)

    @property
    def left_behind(self) -> str:
        """Why the others wait for this node no more, in words; empty while they do. Any thread."""
        if self._pulse is None:
            return ""
        standing, known = self._pulse.look()
        if known.ending is not None:
            return "the run is over"
        if standing.phase is Phase.GONE:
            return "this node has left"
        if standing.phase is Phase.READY:
            return "the others went on without this node" if is_spare(known) else ""
        return standing.disturbance(known)

    def hold_growth(self, *, hold: bool) -> None:
        """Let nodes that would make the world larger wait for a moment at which little is lost.

        It counts where the leader is, now or later.
        """
        self._hosting.hold_growth(hold=hold)

    # Starting and ending

    def _start(self) -> tuple[Pulse, Entry]:
        if self._pulse is not None and self._entry is not None:
            return self._pulse, self._entry
        atexit.register(self._stop)  # a thread inside a call to a store aborts a process that ends
        settings, hosting = self._settings, self._hosting
        try:
            hosting.start()
        except RuntimeError as error:
            raise RendezvousConnectionError(f"this node can't serve a store: {error}") from error
        patience = settings.timing.patience
        reach = Reach(hosting.endpoints, settings.run_id, patience, hosting, hosting.board, failover=settings.failover)
        if hosting.leads:
            reach.move(f"127.0.0.1 {hosting.who.port} 0")
        self._pulse = Pulse(reach, hosting.who, settings.timing, self._ring)
        self._entry = Entry(self._pulse, settings.local_addr, shared=self.use_agent_store)
        self._pulse.start()
        return self._pulse, self._entry

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        over, self._ended = self.is_closed(), True
        if self._entry is not None:
            self._entry.leave()
        if self._pulse is not None:
            self._pulse.close(_GOODBYE_SECONDS)
        self._hosting.close(_LINGER_SECONDS if over else 0.0)
        settle(_SETTLE_SECONDS)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.alarm, 1)

    def _quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.alarm)


def register(
    registry: RendezvousHandlerRegistry,
    traits: dict[str, str],
    report: Callable[[str], None],
    notes: Path | None = None,
    name: str = "",
) -> None:
    """Make torch find the handler under its name.

    Args:
        registry: torch's.
        traits: what must be the same on all nodes, by name.
        report: is told in words what the leader decides, on a thread of its own, and what this node waits for.
        notes: a directory shared by all nodes, in which the leader writes where it is; None where there is none.
        name: of this node; its host's name where it is empty.
    """
    registry.register(BACKEND, lambda parameters: Handler(reading.read(parameters, traits, report, notes, name)))

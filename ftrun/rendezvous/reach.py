"""How a node reaches the leader of the run, wherever he is by now.

The leader is at the endpoint until its host is lost. Then the members of the last round take over in the order of their
ranks: all ask the same ones in the same order, so that they come together at the first one that lives, and that one
leads in the store that it has served idly until then. Nobody passes over a member that answers; a member that can't be
reached by some, but by others, makes two leaders at worst, of whom one at most has most members of the last round (see
:meth:`ftrun.rendezvous.leader.Leader.inherit`) and the other gives way (:mod:`ftrun.rendezvous.scout`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.line import Line, LineDown
from ftrun.rendezvous.look import announce
from ftrun.rendezvous.member import Inheritance, Known, heirs
from ftrun.rendezvous.model import PROTOCOL, Job, Outcome, Refusal, State, Who

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.rendezvous.endpoint import Endpoint

_SHORT_PATIENCE = 0.6
"""For one that may well be dead, while others wait for their turn."""
_HEIR_LOOK_SECONDS = 0.1


class NobodyLeads(LineDown):
    """A store answers there, and no run is led in it."""


class Moved(LineDown):
    """A store answers there, and says that another one is to be asked."""


class NotWelcome(LineDown):
    """This node has no business there.

    Attributes:
        refusal: why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.refusal = Refusal(excluded=False, reason=reason)


@dataclass(frozen=True)
class Visitor:
    """A node that looks for the leader.

    Attributes:
        who: how it introduces itself; an empty address is filled in.
        beat: its record.
        known: what it knows.
        takes_over: it may become the leader.
    """

    who: Who
    beat: str
    known: Known
    takes_over: bool


@dataclass(frozen=True)
class Reached:
    """A connection to the leader's store.

    Attributes:
        line: the connection.
        who: the node with the address under which it introduced itself.
        is_new: the leader is another one than before.
    """

    line: Line
    who: Who
    is_new: bool


class Reach:
    """Finds the leader. Used by the pulse's thread.

    Args:
        where: the endpoint.
        addresses: numeric addresses to try instead of those that the endpoint's name stands for; of the host itself.
        run_id: the run that this node belongs to.
        patience: seconds within which a host that is well answers.
        lead: has this node take over as the leader, and returns the port of its store; None where nobody takes over.
    """

    def __init__(
        self,
        where: Endpoint,
        addresses: list[str],
        run_id: str,
        patience: float,
        lead: Callable[[Who, Inheritance], int] | None,
    ) -> None:
        self._where = where
        self._addresses = addresses
        self._given = bool(addresses)
        self._run_id = run_id
        self._patience = patience
        self._lead = lead
        self._place: tuple[str, int] | None = None  # where the leader was last
        self._lost: tuple[str, int] | None = None  # where one was that is lost
        self._silent = False  # its store was silent, rather than away
        self._leader = ""  # the one that this node has introduced itself to
        self._host = ""  # the node that it is on
        self._succession = 0
        self._stopped = False

    def stop(self) -> None:
        """Look no further. Any thread."""
        self._stopped = True

    def lose(self, *, silent: bool) -> None:
        """Note that the leader's store is lost.

        Args:
            silent: it doesn't answer; otherwise the connection was closed.
        """
        self._lost, self._silent = self._place, silent

    def move(self, moved: str) -> None:
        """Note that the leader is elsewhere: ``address port generation``."""
        self._place, self._silent = _place(moved), False

    def connect(self, visitor: Visitor) -> Reached:
        """Reach the store of the run's leader, and introduce this node if it is new to it.

        Raises:
            NotWelcome: this node has no business there.
            LineDown: nobody leads the run that can be reached.
        """
        ways = [self._at_the_endpoint]
        if self._lead is not None and visitor.takes_over and heirs(visitor.known, self._host):
            ways.insert(0, self._at_an_heir)
        if self._place is not None:  # to ask a host again that has just been silent takes time
            ways.insert(1 if self._silent else 0, self._where_it_was)
        troubles = []
        for way in ways:
            try:
                reached = way(visitor)
            except NotWelcome:
                raise
            except LineDown as error:
                troubles.append(str(error))
            else:
                self._silent = False
                return reached
        raise LineDown("; ".join(dict.fromkeys(troubles)))

    # Places

    def _where_it_was(self, visitor: Visitor) -> Reached:
        if self._place is None:
            raise LineDown("it was nowhere")
        return self._reach(visitor, *self._place, _SHORT_PATIENCE if self._place == self._lost else self._patience)

    def _at_the_endpoint(self, visitor: Visitor) -> Reached:
        trouble = f"the name {self._where.host} doesn't resolve"
        for address in self._resolve():
            try:
                return self._reach(visitor, address, self._where.port, self._patience)
            except NotWelcome:
                raise
            except LineDown as error:
                trouble = str(error)
        raise LineDown(trouble)

    def _resolve(self) -> list[str]:
        if not self._given:
            # A resolver that is away for a while doesn't take away what it said before.
            with contextlib.suppress(OSError):
                self._addresses = endpoint.resolve(self._where.host)
        return self._addresses

    def _at_an_heir(self, visitor: Visitor) -> Reached:
        """At the first of the heirs that lives, which may be this node."""
        for who in heirs(visitor.known, self._host):
            if who.node == visitor.who.node:
                return self._reach(visitor, "127.0.0.1", self._take_over(visitor), self._patience)
            try:
                return self._await_heir(visitor, who)
            except (NobodyLeads, Moved):
                raise  # it lives
            except LineDown:
                continue
        raise LineDown("nobody of the last round can be reached")

    def _take_over(self, visitor: Visitor) -> int:
        """Lead from here on. Returns the port of this node's store."""
        known = visitor.known
        if self._lead is None or known.round is None:
            raise LineDown("there is nothing to take over")
        left = known.call.left if known.call is not None else ()
        try:
            return self._lead(visitor.who, Inheritance(known.round, self._host, left, self._succession + 1))
        except (OSError, RuntimeError) as error:
            raise LineDown(f"this node can't take over: {error}") from error

    def _await_heir(self, visitor: Visitor, who: Who) -> Reached:
        """Reach one that lives; it may take some time to notice that it is its turn.

        Raises:
            NobodyLeads: it doesn't take over, as it may well hear from the host itself.
            LineDown: it can't be reached.
        """
        deadline = time.monotonic() + 2 * self._patience
        while True:
            try:
                return self._reach(visitor, who.address, who.port, _SHORT_PATIENCE)
            except NobodyLeads:
                if time.monotonic() >= deadline or self._stopped:
                    raise
                time.sleep(_HEIR_LOOK_SECONDS)

    # One place

    def _reach(self, visitor: Visitor, address: str, port: int, patience: float) -> Reached:
        if self._stopped:
            raise LineDown("this node ends its part")
        line = Line(address, port, "ftrun-pulse-line", patience)
        try:
            line.open()
            reached = self._introduce(line, address, visitor)
        except BaseException:
            line.close()
            raise
        self._place = (address, port)
        line.patience = self._patience
        return reached

    def _introduce(self, line: Line, address: str, visitor: Visitor) -> Reached:
        if not line.call(lambda store: store.check([Keys.JOB])):
            raise NobodyLeads(f"there is no rendezvous of ftrun at {address}")
        job = Job.decode(line.call(lambda store: store.get(Keys.JOB)).decode())
        self._require_ours(job)
        self._follow(line.call(lambda store: store.get(Keys.MOVED)).decode(), address, visitor.known)
        state = State.decode(line.call(lambda store: store.get(Keys.STATE)).decode())
        if self._leader == job.leader:
            return Reached(line, visitor.who, is_new=False)
        if state.outcome is not Outcome.OPEN:
            raise LineDown(f"the run at {address} is over")  # its host is about to end; another one may follow
        if 0 < state.generation < _latest(visitor.known):
            raise LineDown(f"the rendezvous at {address} is behind: another one has gone on")
        who = self._with_address(visitor.who, address)
        line.call(lambda store: announce(store, who, visitor.beat, visitor.known.round))
        self._leader, self._host, self._succession = job.leader, job.node, job.succession
        return Reached(line, who, is_new=True)

    def _require_ours(self, job: Job) -> None:
        if job.protocol != PROTOCOL:
            raise NotWelcome(f"{job.host}, which hosts the rendezvous, has another version of ftrun: install the same.")
        if job.run_id != self._run_id:
            raise NotWelcome(
                f"{self._where} is the endpoint of another run, {job.run_id!r}, and this is {self._run_id!r}: "
                "give each run an endpoint of its own, or all its nodes the same --rdzv-id."
            )

    def _follow(self, moved: str, address: str, known: Known) -> None:
        """Go where a store points to that was led once, if that is news: one that has just been lost is none."""
        if not moved:
            return
        if _place(moved) == self._lost or int(moved.split()[2]) < _latest(known):
            raise NobodyLeads(f"the rendezvous has long moved from {address}")
        self.move(moved)
        raise Moved(f"the rendezvous has moved from {address} to {moved}")

    @staticmethod
    def _with_address(who: Who, address: str) -> Who:
        if who.address and (endpoint.is_loopback(address) or not endpoint.is_loopback(who.address)):
            return who
        try:
            return dataclasses.replace(who, address=endpoint.address_towards(address))
        except OSError as error:
            raise LineDown(f"this node has no address on the way to {address}: {error}") from error


def _latest(known: Known) -> int:
    return known.round.generation if known.round is not None else 0


def _place(text: str) -> tuple[str, int]:
    """Read the beginning of ``address port generation``."""
    address, port = text.split()[:2]
    return address, int(port)

"""How a node reaches the leader of the run, wherever he is by now.

The leader is at the endpoint until its host is lost. Then the members of the last round take over in the order of their
ranks: all ask the same ones in the same order, so that they come together at the first one that lives, and that one
leads in the store that it has served idly until then. Nobody passes over a member that answers; a member that can't be
reached by some, but by others, makes two leaders at worst, of whom one at most has most members of the last round (see
:meth:`ftrun.rendezvous.leader.Leader.inherit`) and the other gives way (:mod:`ftrun.rendezvous.scout`).

A new agent looks at all endpoints and where the run's note points to (:mod:`~ftrun.rendezvous.note`); any agent that
serves a store there tells it where the leader is. Only when nobody is found, a node at an endpoint begins a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.look import announce
from ftrun.rendezvous.member import Inheritance, Known, heirs
from ftrun.rendezvous.model import PROTOCOL, Job, Outcome, State, Who, machine
from ftrun.rendezvous.visiting import AnotherRun, Home, Moved, NobodyLeads, NotWelcome, Reached, Visitor
from ftrun.rendezvous.wire import Deserted, LineDown, Wire

if TYPE_CHECKING:
    from ftrun.rendezvous.endpoint import Endpoint
    from ftrun.rendezvous.note import Board, Note

_SHORT_PATIENCE = 0.6
"""For one that may well be dead, while others wait for their turn."""
_HEIR_LOOK_SECONDS = 0.1
_NOTE_SECONDS = 2.0
"""For those that a note names, at one attempt; the next one asks the others."""


class Reach:
    """Finds the leader. Used by the pulse's thread.

    Args:
        endpoints: where to look.
        run_id: the run that this node belongs to.
        patience: seconds within which a host that is well answers.
        home: the store that this node serves itself.
        board: where notes are; None where there are none.
        failover: another node takes over where the leader is lost.
    """

    def __init__(
        self,
        endpoints: tuple[Endpoint, ...],
        run_id: str,
        patience: float,
        home: Home,
        board: Board | None = None,
        *,
        failover: bool = True,
    ) -> None:
        self._endpoints = endpoints
        self._resolved: dict[str, list[str]] = {}
        self._run_id = run_id
        self._patience = patience
        self._home = home
        self._board = board
        self._failover = failover
        self._note: Note | None = None
        self._noted_at = 0.0  # when it was read
        self._unread = False  # the note couldn't be read
        self._deserted = False  # all that the note names say that nobody is there
        self._asked = 0  # how many of them were asked so far
        self._guided = ""
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
        ways = [self._at_the_endpoints]
        if self._board is not None:
            ways.append(self._at_the_note)
        if visitor.takes_over and visitor.known.round is None:
            ways.append(self._at_home)
        if self._failover and visitor.takes_over and heirs(visitor.known, self._host):
            ways.insert(0, self._at_an_heir)
        if self._place is not None:  # to ask a host again that has just been silent takes time
            ways.insert(1 if self._silent else 0, self._where_it_was)
        troubles: list[str] = []
        strange: NotWelcome | None = None
        told = False
        for way in ways:
            if way == self._at_home and (told or strange is not None):
                break  # somebody leads elsewhere
            try:
                reached = way(visitor)
            except NotWelcome as error:
                # Where this run was led, another one may be led by now: this one may go on elsewhere.
                if visitor.known.round is None and not isinstance(error, AnotherRun):
                    raise
                strange = strange or error
                troubles.append(str(error))
            except LineDown as error:
                troubles.append(str(error))
                told = told or isinstance(error, Moved)
            else:
                self._silent = False
                self._tell_way(visitor.known)
                return reached
        if strange is not None and visitor.known.round is None:
            raise strange
        raise LineDown("; ".join(dict.fromkeys(filter(None, troubles))))

    def _tell_way(self, known: Known) -> None:
        """Let others who ask here know where the leader is."""
        if self._place is None or self._home.owns(*self._place):
            return
        address, port = self._place
        if f"{address} {port}" != self._guided:
            self._guided = f"{address} {port}"
            self._home.guide(f"{self._guided} {_latest(known)}")

    # Places

    def _where_it_was(self, visitor: Visitor) -> Reached:
        if self._place is None:
            raise LineDown("it was nowhere")
        return self._reach(visitor, *self._place, _SHORT_PATIENCE if self._place == self._lost else self._patience)

    def _at_the_endpoints(self, visitor: Visitor) -> Reached:
        troubles = []
        for where in self._endpoints:
            addresses = self._resolve(where.host)
            if not addresses:
                troubles.append(f"the name {where.host} doesn't resolve")
            for address in addresses:
                if self._home.owns(address, where.port):
                    continue
                try:
                    return self._reach(visitor, address, where.port, self._patience)
                except (NotWelcome, Moved):
                    raise
                except LineDown as error:
                    troubles.append(str(error))
        raise LineDown("; ".join(troubles))

    def _resolve(self, host: str) -> list[str]:
        # A resolver that is away for a while doesn't take away what it said before.
        with contextlib.suppress(OSError):
            self._resolved[host] = endpoint.resolve(host)
        return self._resolved.get(host, [])

    def _at_the_note(self, visitor: Visitor) -> Reached:
        """At the leader that the run's note names, or where one of its members has met the one after it."""
        self._unread, self._noted_at = True, time.monotonic()
        try:
            self._note = self._board.read() if self._board is not None else None
        except OSError as error:
            raise LineDown(f"the run directory doesn't say where the run is led: {error.strerror or error}") from error
        self._unread = False
        if self._note is None:
            raise LineDown("")
        places = [place for place in self._note.places if not self._home.owns(*place)]
        if machine(self._note.name) != visitor.who.machine:  # what a machine calls itself means something else here
            places = [place for place in places if not endpoint.is_loopback(place[0])]
        deserted, began = 0, time.monotonic()
        for _ in places:
            place = places[self._asked % len(places)]
            self._asked += 1
            try:
                return self._reach(visitor, *place, _SHORT_PATIENCE)
            except LineDown as error:
                if isinstance(error, Moved | NotWelcome) and not isinstance(error, AnotherRun):
                    raise
                # What was noted may be long ago: a machine at which another run is led by now is none of this one.
                deserted += isinstance(error, Deserted | AnotherRun)
            if time.monotonic() - began >= _NOTE_SECONDS:
                break
        self._deserted = deserted == len(places) > 0
        raise LineDown("")  # what there is to say of it, home says

    def _at_home(self, visitor: Visitor) -> Reached:
        """Here, in a run that begins."""
        if self._unread:
            raise LineDown("")  # there may be a run
        seen = self._noted_at if self._board is not None else time.monotonic()
        port = self._home.begin(visitor.who, self._note, seen=seen, deserted=self._deserted)
        return self._reach(visitor, "127.0.0.1", port, self._patience)

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
        if known.round is None:
            raise LineDown("there is nothing to take over")
        left = known.call.left if known.call is not None else ()
        try:
            return self._home.take_over(
                visitor.who, Inheritance(known.round, self._host, left, self._succession + 1, self._silent)
            )
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
        wire = Wire(address, port, patience)
        wire.open()
        try:
            reached = self._introduce(wire, address, visitor)
        except BaseException:
            wire.close()
            raise
        self._place = (address, port)
        wire.patience = self._patience
        return reached

    def _introduce(self, wire: Wire, address: str, visitor: Visitor) -> Reached:
        led, guide, moved, said = wire.exchange((), (Keys.JOB, Keys.GUIDE, Keys.MOVED, Keys.STATE))
        if not led or not said:
            self._follow(guide or "", address, visitor.known)
            raise NobodyLeads(f"nobody leads a rendezvous at {address} yet")
        job = Job.decode(led)
        self._require_ours(job)
        self._follow(moved or "", address, visitor.known)
        state = State.decode(said)
        if self._leader == job.leader:
            return Reached(wire, visitor.who, is_new=False)
        if state.outcome is not Outcome.OPEN:
            raise LineDown(f"the run at {address} is over")  # its host is about to end; another one may follow
        if 0 < state.generation < _latest(visitor.known):
            raise LineDown(f"the rendezvous at {address} is behind: another one has gone on")
        who = self._with_address(visitor.who, address)
        announce(wire, who, visitor.beat, visitor.known.round)
        self._leader, self._host, self._succession = job.leader, job.node, job.succession
        return Reached(wire, who, is_new=True)

    def _require_ours(self, job: Job) -> None:
        if job.protocol != PROTOCOL:
            kind = NotWelcome if job.run_id == self._run_id else AnotherRun
            raise kind(f"{job.host}, which hosts the rendezvous, has another version of ftrun: install the same.")
        if job.run_id != self._run_id:
            raise AnotherRun(
                f"{self._endpoints[0]} is the endpoint of another run, {job.run_id!r}, and this is {self._run_id!r}: "
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

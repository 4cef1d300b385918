"""A node's own record and what it learns of the run: one thread in each agent, the host's included.

The thread writes the record a few times a second, reads what the leader says, and connects again when the connection
is lost. The main thread says what it does (:meth:`Pulse.meet`, :meth:`Pulse.finish`, ...) and reads what is known;
nothing that it calls here waits for the network.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.look import Errand, look
from ftrun.rendezvous.member import Known, Standing
from ftrun.rendezvous.model import Beat, Phase, Who
from ftrun.rendezvous.trying import Trying
from ftrun.rendezvous.visiting import NotWelcome, Visitor
from ftrun.rendezvous.wire import LineDown, Silent, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.rendezvous.member import Timing
    from ftrun.rendezvous.model import Ending
    from ftrun.rendezvous.reach import Reach

_BEAT_SECONDS = 0.2
_MEETING_SECONDS = 0.025
_STEADY_SECONDS = 0.1
_SECONDS_A_NODE = 0.001
_RETRY_SECONDS = 0.25
_LOBBY_SECONDS = 0.2
_LEADER_SECONDS = 10.0
"""A leader that says nothing for so long, while its store answers, is as good as a store that doesn't answer."""
_LONGEST_LOOK = 0.25
_STOPPED_SECONDS = 1.0
"""Who wakes up after so long may find at once that the others have gone on, and looks more often for as long."""


class Pulse:
    """One node's part in the rendezvous.

    Args:
        reach: finds the leader.
        who: this node; an empty address is filled in when it has reached the store.
        timing: how patient it is.
        alarm: called, on the thread, when what is known changes such that the main thread should look.

    Attributes:
        known: what this node knows.
    """

    def __init__(self, reach: Reach, who: Who, timing: Timing, alarm: Callable[[], None]) -> None:
        self._reach = reach
        self._timing = timing
        self._alarm = alarm
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ftrun-pulse", daemon=True)
        self._wire: Wire | None = None
        self._standing = Standing()
        self._count = 0
        self._outbox: list[tuple[str, str]] = []
        self._stopping = False
        self._said = 0  # how often the main thread had something to say
        self._taken = 0  # up to which of that a look has taken it along
        self._written = 0  # up to which of that it is in the store
        self._beat_at = self._lobby_at = 0.0
        self._idle = 0.0
        self._watched = False
        self._where = ""  # the main thread stands still there
        self._leader_silent = 0.0
        self._trying = Trying(who.node, lambda found: self.publish(Keys.reach(who.node), found.encode()))
        self.who = who
        self.known = Known()

    # The main thread's side

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Say goodbye, and end the thread.

        Args:
            seconds: how long the goodbye may take.
        """
        if not self._thread.is_alive():
            return
        self._say(Phase.GONE)
        if not self.known.trouble:
            self.flush(seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._reach.stop()
        self._trying.close()
        # Nothing it does takes longer than a call, a connection and hanging up.
        self._thread.join(6 * self._timing.patience + 5.0)

    def depart(self) -> None:
        """This node leaves, and stays to see that it is known."""
        self._say(Phase.GONE)

    def meet(self) -> None:
        """This node has no workers, and is ready for a round."""
        self._say(Phase.READY)

    def finish(self) -> None:
        """All workers of this node have ended well."""
        self._say(Phase.FINISHED)

    def end(self, ending: Ending) -> None:
        """Ask for the end of the run."""
        with self._changed:
            self._outbox.append((Keys.END, ending.encode()))
            self._wake()

    def publish(self, key: str, value: str) -> None:
        """Write something into the store, with the next look at it."""
        with self._changed:
            self._outbox.append((key, value))
            self._wake()

    def flush(self, seconds: float) -> bool:
        """Wait until all that this node had to say is written. Returns whether it is."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._written < self._said:
                over = self.known.ending is not None and self.known.trouble
                if over or time.monotonic() >= deadline or not self._thread.is_alive():
                    return False
                self._changed.wait(0.05)
        return True

    def tick(self, *, watched: bool = True) -> None:
        """The main thread is alive.

        Args:
            watched: it will be back soon; otherwise it may stay away for long.
        """
        self._idle, self._watched = 0.0, watched

    def stand_still(self, where: str) -> None:
        """The main thread stands still, in words where; it goes on where they are empty. Any other thread."""
        with self._changed:
            self._where = " ".join(where.split())
            self._wake()

    def wait(self, seconds: float) -> None:
        """Wait for news, or for so long."""
        with self._changed:
            self._changed.wait(seconds)

    def look(self) -> tuple[Standing, Known]:
        """Where this node stands and what it knows, of one and the same moment."""
        with self._changed:
            return self._standing, self.known

    @property
    def phase(self) -> Phase:
        """What this node does."""
        return self._standing.phase

    def disturbed(self) -> str:
        """Why this node's workers can't go on, in words; empty while they can, or where there are none."""
        with self._changed:
            return self._standing.disturbance(self.known)

    def _say(self, phase: Phase) -> None:
        with self._changed:
            self._standing = dataclasses.replace(self._standing, phase=phase)
            self._idle = 0.0
            self._wake()

    def _wake(self) -> None:
        self._said += 1
        self._changed.notify_all()

    # The pulse's thread

    def _run(self) -> None:
        last = time.monotonic()
        woke = last - _STOPPED_SECONDS
        while not self._stopping:
            gap, last = time.monotonic() - last, time.monotonic()
            woke = last if gap > _STOPPED_SECONDS else woke
            pause = self._turn(min(gap, _LONGEST_LOOK))
            if last - woke < _STOPPED_SECONDS:
                pause = min(pause, _MEETING_SECONDS)
            with self._changed:
                if pause and self._taken == self._said and not self._stopping:
                    self._changed.wait(pause)
        self._hang_up()

    def _turn(self, passed: float) -> float:
        """Look once. Returns how long to wait before the next look."""
        connected = self._wire is not None
        try:
            wire = self._wire or self._connect()
            errand = self._errand(passed)
            self._learn(look(wire, errand), errand, passed)
        except LineDown as error:
            # A connection that was closed may only be that; one look whether the host is still there.
            silent = isinstance(error, Silent)
            self._lose(str(error), silent=silent, told=silent or not connected)
            return 0.0 if connected else _RETRY_SECONDS
        except Exception as error:  # the thread has to live: the node would be lost with it
            self._lose(f"{type(error).__name__}: {error}", silent=False, told=True)
            return _RETRY_SECONDS
        if self.known.moved:
            self._hang_up()
            self._reach.move(self.known.moved)
            self._know(dataclasses.replace(self.known, moved=""))
            return 0.0
        return self._pause()

    def _pause(self) -> float:
        """Between two looks: short while a round comes about, but not so that many nodes keep the store busy."""
        state, formed = self.known.state, self.known.round
        meeting = self._standing.phase is Phase.READY and (state is None or state.called or not state.generation)
        entering = self._standing.phase is Phase.RUNNING and not self.known.store
        many = (len(formed.members) if formed is not None else 0) * _SECONDS_A_NODE
        if not (meeting or entering):
            return min(max(_STEADY_SECONDS, 1.5 * many), _BEAT_SECONDS)
        return min(max(_MEETING_SECONDS, many), _STEADY_SECONDS)

    def _connect(self) -> Wire:
        with self._changed:
            over = self.known.ending is not None or self._standing.phase is Phase.GONE or self._stopping
            visitor = Visitor(self.who, self._beat(), self.known, takes_over=not over)
        try:
            reached = self._reach.connect(visitor)
        except NotWelcome as error:
            self._know(dataclasses.replace(self.known, refusal=error.refusal))
            raise
        self._wire, self.who, self._leader_silent = reached.wire, reached.who, 0.0
        if reached.is_new:
            self._know(dataclasses.replace(self.known, state=None, call=None, lobby="", trial=None))
        return self._wire

    def _beat(self) -> str:
        with self._changed:
            self._count += 1
            standing = self._standing
            idle = self._watched and standing.phase is Phase.RUNNING and 0 < self._timing.stall < self._idle
            stuck = idle or bool(self._where)
            informed = self.known.ending is not None
            return Beat(self._count, standing.phase, standing.generation, stuck, informed, self._where).encode()

    def _errand(self, passed: float) -> Errand:
        with self._changed:
            now = time.monotonic()
            self._idle += passed
            beat = self._beat() if self._taken < self._said or now >= self._beat_at else ""
            if beat:
                self._beat_at = now + _BEAT_SECONDS
            lobby = self._standing.phase is Phase.READY and now >= self._lobby_at
            if lobby:
                self._lobby_at = now + _LOBBY_SECONDS
            self._taken = self._said
            return Errand(self.who.node, self.known, beat, lobby, tuple(self._outbox), self._said)

    def _learn(self, known: Known, errand: Errand, passed: float) -> None:
        before = errand.known.state
        silent = before is not None and known.state is not None and before.count == known.state.count
        self._leader_silent = self._leader_silent + passed if silent else 0.0
        with self._changed:
            del self._outbox[: len(errand.outbox)]
            self._written = errand.said
        if known.trial is not None and known.trial != errand.known.trial:
            self._trying.ask(known.trial)
        self._know(known)
        if self._leader_silent > _LEADER_SECONDS and known.ending is None:
            self._leader_silent = 0.0
            raise Silent("the leader of the rendezvous says nothing")  # another node takes over

    def _know(self, known: Known) -> None:
        with self._changed:
            before = (self._standing.disturbance(self.known), self.known.ending)
            standing = self._standing.take_up(self.who.node, known)
            if standing != self._standing:
                self._idle = 0.0
                self._said += 1  # the leader is told at once
            if (standing, known) != (self._standing, self.known):
                self._standing, self.known = standing, known
                self._changed.notify_all()
            alarming = (standing.disturbance(known), known.ending) != before
        if alarming:
            self._alarm()

    def _lose(self, trouble: str, *, silent: bool, told: bool) -> None:
        if self._wire is not None:
            self._reach.lose(silent=silent)
        self._hang_up()
        if told:
            self._know(dataclasses.replace(self.known, trouble=trouble))
        with self._changed:
            self._taken = self._said

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

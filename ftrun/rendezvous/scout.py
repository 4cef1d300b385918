"""Two leaders of one run find each other, and one of them gives way.

When a store's host is cut off, those who can't reach it take over; it may live on behind the cut, with some nodes or
alone, and a host that is started anew at the endpoint knows of nothing. A leader that has taken over looks for such
others now and then, where they can be: at an endpoint, where a note says, and at the nodes it doesn't hear from. The
one with the later round goes on (at most one has formed any since they parted), otherwise the earlier leader; nodes of
the other follow.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.model import Job, Outcome, State
from ftrun.rendezvous.wire import LineDown, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.rendezvous.endpoint import Endpoint
    from ftrun.rendezvous.note import Board
    from ftrun.rendezvous.serving import Serving

_EVERY_SECONDS = 1.0
_PATIENCE = 0.5
_MOST = 16
"""Nodes that are asked in one go."""


@dataclass(frozen=True)
class Precedence:
    """By what one leader goes before another.

    Attributes:
        generation: its latest round.
        succession: how many leaders there were before it.
        leader: its identity.
    """

    generation: int
    succession: int
    leader: str

    def goes_before(self, other: Precedence) -> bool:
        """Whether it is the one that goes on."""
        mine = (self.generation, -self.succession, self.leader)
        return mine > (other.generation, -other.succession, other.leader)


class Scout:
    """Looks for other leaders of the run, on a thread of its own.

    Args:
        serving: the leader that it looks out for.
        endpoints: all of them.
        address: ``address port`` where others find that leader.
        board: where notes are, another leader's among them; None where there are none.
    """

    def __init__(
        self, serving: Serving, endpoints: tuple[Endpoint, ...], address: str, board: Board | None = None
    ) -> None:
        self._serving = serving
        self._endpoints = endpoints
        self._address = address
        self._board = board
        self._asked = 0  # how many of the missing so far
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-scout", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(8 * _PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS) and self._serving.leads:
            for address, port in self._places():
                if self._stop.is_set():
                    return
                wire = Wire(address, port, _PATIENCE)
                # Nor may a store of another version, or what else answers there, end the thread.
                with contextlib.suppress(LineDown, ValueError, TypeError, KeyError, AttributeError):
                    wire.open()
                    self._meet(f"{address} {port}", wire)
                wire.close()

    def _places(self) -> Iterator[tuple[str, int]]:
        missing = self._serving.missing  # those of the whole run: the first few may long be dead
        first = self._asked % len(missing) if missing else 0
        turn = (*missing[first:], *missing[:first])[:_MOST]
        self._asked += len(turn)
        places = [(who.address, who.port) for who in turn if who.port]
        for where in self._endpoints:
            with contextlib.suppress(OSError):
                places = [*((address, where.port) for address in endpoint.resolve(where.host)), *places]
        with contextlib.suppress(OSError):
            note = self._board.read() if self._board is not None else None
            if note is not None and note.leader != self._serving.job.leader:
                places.append((note.address, note.port))
        for address, port in dict.fromkeys(places):
            if port != self._serving.port or not endpoint.is_mine(address):
                yield address, port

    def _meet(self, place: str, wire: Wire) -> None:
        """Another store: if somebody leads the same run there, one of the two gives way."""
        led, moved, said = wire.exchange((), (Keys.JOB, Keys.MOVED, Keys.STATE))
        if not led or moved or not said:
            return
        job, state = Job.decode(led), State.decode(said)
        ours = self._serving.job
        if (job.run_id, job.protocol) != (ours.run_id, ours.protocol) or state.outcome is not Outcome.OPEN:
            return
        mine = Precedence(self._serving.generation, ours.succession, ours.leader)
        theirs = Precedence(state.generation, job.succession, job.leader)
        if mine.goes_before(theirs):
            wire.exchange((("set", Keys.MOVED, f"{self._address} {mine.generation}"),), ())
        else:
            self._serving.move_to = f"{place} {theirs.generation}"

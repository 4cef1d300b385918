"""The leader keeps the note of its run, on a thread of its own: a shared filesystem may stand still for minutes.

What else it has to do in the shared directory, it does there, too: claim a round of which half is left, and look who
has claimed it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.note import Note
from ftrun.rendezvous.tie import Findings

if TYPE_CHECKING:
    from ftrun.rendezvous.note import Board
    from ftrun.rendezvous.serving import Serving
    from ftrun.rendezvous.tie import Wish

_EVERY_SECONDS = 1.0
_OF_A_CLAIM = 1 / 8
"""Of the time that a claim lasts: how often it is renewed at least."""
_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 2.0


class Noting:
    """Writes where a leader is, as long as it leads; takes the note away when the run is over.

    Args:
        board: where notes are.
        serving: the leader.
        address: where others reach its store.
        lasts: seconds that a claim lasts; 0 for ever.
    """

    def __init__(self, board: Board, serving: Serving, address: str, lasts: float = 0.0) -> None:
        self._board = board
        self._serving = serving
        self._address = address
        self._every = min(_EVERY_SECONDS, _OF_A_CLAIM * lasts) if lasts else _EVERY_SECONDS
        self._count = 0
        self._noted = 0.0
        self._other: Note | None = None  # of another leader, as it was last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-noting", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        serving, due, written = self._serving, 0.0, -1
        while serving.leads and not self._stop.is_set():
            now, unheard = time.monotonic(), serving.unheard
            is_due = serving.latest != written or now >= due or unheard
            if is_due:
                written, due = serving.latest, now + self._every
                with contextlib.suppress(OSError):  # it is tried again; without a note all goes on as it would anyway
                    self._write(written, now)
            # After that: whoever would claim the round before this one sees that it is long over.
            if wish := serving.wish:
                with contextlib.suppress(OSError):  # it is tried again, and without an answer nobody goes on
                    self._claim(wish)
            if serving.asked and (is_due or wish):
                with contextlib.suppress(OSError):  # what can't be looked at says nothing
                    serving.findings = self._look()
            self._stop.wait(_LOOK_SECONDS)
        if serving.over:
            self._board.clear(serving.job.leader)

    def _look(self) -> Findings:
        serving, now = self._serving, time.monotonic()
        claims = tuple(self._board.claimed(key, serving.job.node) for key in serving.asked)
        note = self._rival()
        rival, latest = (_mark(note), note.generation) if note is not None else ("", 0)
        return Findings(now, claims, self._noted, rival, latest)

    def _rival(self) -> Note | None:
        """The last note of another leader; None once the directory has none at all, as after the end of a run."""
        found = self._board.read()
        if found is None or found.leader != self._serving.job.leader:
            self._other = found
        return self._other

    def _claim(self, wish: Wish) -> None:
        serving, rival = self._serving, self._rival()
        if wish.number == 1 and rival is not None and rival.generation > serving.generation:
            return  # most have gone on from that round: they needed no claim
        if wish.number > 1 and (rival is None or _mark(rival) != wish.rival):
            return  # it lives, or its run is over
        self._board.claim(wish.key, serving.job.node, wish.number)

    def _write(self, generation: int, now: float) -> None:
        found, job = self._rival(), self._serving.job
        if found is not None and found.generation > generation:
            return  # another leader has gone on; one of the two will give way
        self._count += 1
        formed = self._serving.formed
        members = formed.members if formed is not None else ()
        own = endpoint.address_among(self._address, [each.address for each in members])
        port = self._serving.port
        self._board.write(Note(job.run_id, job.leader, job.host, own, port, generation, self._count, members))
        self._noted = now


def _mark(note: Note) -> str:
    return f"{note.leader} {note.count}"

"""The leader keeps the note of its run, on a thread of its own: a shared filesystem may stand still for minutes.

What else it has to do in the shared directory, it does there, too: claim a round of which half is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.note import Note
from ftrun.rendezvous.tie import Claim

if TYPE_CHECKING:
    from ftrun.rendezvous.note import Board
    from ftrun.rendezvous.serving import Serving

_EVERY_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 2.0


class Noting:
    """Writes where a leader is, as long as it leads; takes the note away when the run is over.

    Args:
        board: where notes are.
        serving: the leader.
        address: where others reach its store.
    """

    def __init__(self, board: Board, serving: Serving, address: str) -> None:
        self._board = board
        self._serving = serving
        self._address = address
        self._count = 0
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
            if serving.latest != written or time.monotonic() >= due:
                written, due = serving.latest, time.monotonic() + _EVERY_SECONDS
                with contextlib.suppress(OSError):  # it is tried again; without a note all goes on as it would anyway
                    self._write(written)
            # After that: whoever would claim the round before this one sees that it is long over.
            if key := serving.wanted:
                with contextlib.suppress(OSError):  # it is tried again, and without an answer nobody goes on
                    serving.claim = Claim(key, won=self._claim(key))
            self._stop.wait(_LOOK_SECONDS)
        if serving.over:
            self._board.clear(serving.job.leader)

    def _claim(self, key: str) -> bool:
        found, serving = self._board.read(), self._serving
        if found is not None and found.leader != serving.job.leader and found.generation > serving.generation:
            return False  # most have gone on from that round: they needed no claim
        return self._board.claim(key, serving.job.node)

    def _write(self, generation: int) -> None:
        found = self._board.read()
        job = self._serving.job
        if found is not None and found.leader != job.leader and found.generation > generation:
            return  # another leader has gone on; one of the two will give way
        self._count += 1
        formed = self._serving.formed
        members = formed.members if formed is not None else ()
        own = endpoint.address_among(self._address, [each.address for each in members])
        port = self._serving.port
        self._board.write(Note(job.run_id, job.leader, job.host, own, port, generation, self._count, members))

"""Whether a node begins a new run, or goes on looking for the one that may be there. No input or output.

An endpoint can be a list: all nodes look at each of its addresses, and any agent that serves its store there tells them
where the leader is. The first of the list begins the run; the next one does where nobody before it has come for long.
A note that still changes (:mod:`~ftrun.rendezvous.note`) means that the run is led by somebody, reached or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrun.rendezvous.note import Note

SILENT_SECONDS = 5.0
"""A note that hasn't changed for so long was left behind: its leader writes every second."""
TURN_SECONDS = 30.0
"""What each place in the list of endpoints waits for the one before it."""


@dataclass
class Founding:
    """One node's patience, from its start.

    Args:
        place: of this node's address in the list of endpoints, from 0.

    Attributes:
        reason: why it begins no run yet, in words; empty when it may.
    """

    place: int
    reason: str = "nobody was asked yet"
    _began: float | None = None
    _changed: float = 0.0
    _note: Note | None = None
    _lives: bool = False

    @property
    def generation(self) -> int:
        """The latest round that the note knows of: a new run counts on from there."""
        return self._note.generation if self._note is not None else 0

    def look(self, now: float, note: Note | None, *, deserted: bool) -> bool:
        """Look once, after nobody was found anywhere. Returns whether this node may begin a run.

        Args:
            now: a monotonic clock, from just before the note was read. What a process was stopped for after that says
                nothing of a note that may have changed meanwhile.
            note: as it is now.
            deserted: all that the note names have said that nobody is there: their machines answer, no agent does.
        """
        if self._began is None:
            self._began = now
        if note is not None and (
            self._note is None or (note.leader, note.count) != (self._note.leader, self._note.count)
        ):
            self._lives = self._note is not None
            self._changed = now
        self._note = note
        self.reason = self._why_not(now, deserted=deserted)
        return not self.reason

    def _why_not(self, now: float, *, deserted: bool) -> str:
        note, began = self._note, self._began or 0.0
        if note is not None and (self._lives or not deserted) and now - self._changed < SILENT_SECONDS:
            if self._lives:
                return (
                    f"the run goes on: {note.name} leads it at {note.address}:{note.port}, as its run directory says, "
                    "and can't be reached from here"
                )
            return f"the run may go on at {note.name}, which led it last and can't be reached from here"
        if now - began < self.place * TURN_SECONDS:
            return "nobody answers at the endpoints before this node's own"
        return ""

"""Exit codes of a keeper. None is 1, with which Python itself ends after an error that nobody expected."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """How a keeper ended."""

    DONE = 0
    """The newest that was sealed is committed, or another keeper goes on."""
    USAGE = 2
    """Nobody told it what to do."""
    LOCKED_OUT = 3
    """Another keeper has held the tier for too long."""
    HUNG = 4
    """A step hung beyond all patience: another keeper should go on."""
    LOST = 5
    """Something that was sealed isn't committed, nor is anything newer, and it never will be."""

"""Names in the store in which a run is led."""

from __future__ import annotations


class Keys:
    """Where things are; the records themselves are in :mod:`ftrun.rendezvous.model`."""

    JOB = "ftrun/job"
    """The :class:`Job`; not there where nobody leads."""
    STATE = "ftrun/state"
    NODES = "ftrun/nodes"
    """Identities in the order in which they came, each followed by a space."""
    END = "ftrun/end"
    """An :class:`Ending`, written by whoever ends the run first; empty before."""
    MOVED = "ftrun/moved"
    """``address port generation`` of the store to go to instead; empty while this one is led."""
    GUIDE = "ftrun/guide"
    """As :attr:`MOVED`, in a store that stands by: where its agent has met the leader last."""
    LOBBY = "ftrun/lobby"
    """What the leader waits for, in words, for those who have waited too long."""

    TRIAL = "ftrun/trial"
    """The :class:`Trial` that the leader has asked for last."""
    CLOCK = "ftrun/clock"
    """The wall clock of the process that serves the store, in seconds since 1970. It is shown, nothing goes by it."""

    @staticmethod
    def reach(node: str) -> str:
        """A node's :class:`Report`; not there before it was asked."""
        return f"ftrun/reach/{node}"

    @staticmethod
    def who(node: str) -> str:
        """A node's :class:`Who`."""
        return f"ftrun/who/{node}"

    @staticmethod
    def beat(node: str) -> str:
        """A node's :class:`Beat`."""
        return f"ftrun/beat/{node}"

    @staticmethod
    def last(node: str) -> str:
        """The latest :class:`Round` that a node knew of when it came; empty for none."""
        return f"ftrun/last/{node}"

    @staticmethod
    def refusal(node: str) -> str:
        """A node's :class:`Refusal`; not there for one that is welcome."""
        return f"ftrun/refusal/{node}"

    @staticmethod
    def call(generation: int) -> str:
        """The :class:`Call` that ends this round; not there before."""
        return f"ftrun/call/{generation}"

    @staticmethod
    def round(generation: int) -> str:
        """A :class:`Round`; not there before it is formed."""
        return f"ftrun/round/{generation}"

    @staticmethod
    def store(generation: int) -> str:
        """``address port`` of a round's own store; written by its first node."""
        return f"ftrun/store/{generation}"

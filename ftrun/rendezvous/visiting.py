"""What a node brings along to the leader's store, and what it meets there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ftrun.rendezvous.model import Refusal
from ftrun.rendezvous.wire import LineDown

if TYPE_CHECKING:
    from ftrun.rendezvous.member import Inheritance, Known
    from ftrun.rendezvous.model import Who
    from ftrun.rendezvous.note import Note
    from ftrun.rendezvous.wire import Wire


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


class AnotherRun(NotWelcome):
    """Another run is led there."""


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
        wire: the connection.
        who: the node with the address under which it introduced itself.
        is_new: the leader is another one than before.
    """

    wire: Wire
    who: Who
    is_new: bool


class Home(Protocol):
    """The store that this node serves itself."""

    def owns(self, address: str, port: int) -> bool:
        """Whether it is there."""
        ...

    def take_over(self, who: Who, inheritance: Inheritance) -> int:
        """Lead in it after a leader that is lost. Returns its port."""
        ...

    def begin(self, who: Who, note: Note | None, *, seen: float, deserted: bool) -> int:
        """Lead a new run in it, by a note that was looked at when the monotonic clock said ``seen``. Returns its port.

        Raises:
            LineDown: that isn't for this node, or not yet; the message says why.
        """
        ...

    def guide(self, text: str) -> None:
        """Write into it where the leader is: ``address port generation``."""
        ...

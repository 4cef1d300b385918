"""How a node waits for its next round, and what it says meanwhile. Main thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from ftrun.errors import UsageError
from ftrun.rendezvous.hosting import NotAdmitted
from ftrun.rendezvous.model import Outcome, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.rendezvous.member import Known
    from ftrun.rendezvous.model import Ending, Round
    from ftrun.rendezvous.pulse import Pulse
    from ftrun.rendezvous.settings import Settings

_SLICE = 0.25
_SILENT_SECONDS = 5.0
"""A wait that is shorter is nobody's business."""
_AGAIN_SECONDS = 30.0
SEATS_TAKEN = "the seats are taken: this node is a spare and waits"
HELD = "the others are at work: this node joins them when it costs them little"


class Excluded(UsageError):
    """This node was excluded and leaves; the others go on: exit code 86."""


def await_round(pulse: Pulse, settings: Settings, ended: Callable[[], bool]) -> Round:
    """Wait until this node is in a round that stands.

    Args:
        pulse: what this node knows.
        settings: of the handler.
        ended: whether this node has ended its part.

    Raises:
        RendezvousError, UsageError: as :meth:`ftrun.rendezvous.handler.Handler.next_rendezvous`.
    """
    deadline = time.monotonic() + settings.join_timeout
    teller = _Teller(settings.report)
    while True:
        standing, known = pulse.look()
        if known.refusal is not None:
            raise (Excluded if known.refusal.excluded else NotAdmitted)(known.refusal.reason)
        if known.ending is not None:
            over(known.ending)
        if ended():
            raise RendezvousClosedError("this node has ended its part")
        if standing.phase is Phase.RUNNING and known.round is not None:
            return known.round
        pulse.tick()
        spare = is_spare(known)
        if spare:  # that can take as long as the run
            deadline = time.monotonic() + settings.join_timeout
        if time.monotonic() >= deadline:
            _in_vain(known, settings)
        what = _why_not_needed(known, settings) if spare else _what_is_missing(known)
        teller.look(what, None if spare else deadline)
        pulse.wait(_SLICE)


def over(ending: Ending) -> NoReturn:
    """Say how the run ended.

    Raises:
        RendezvousGracefulExitError: well.
        RendezvousClosedError: not well.
    """
    if ending.outcome is Outcome.FINISHED:
        raise RendezvousGracefulExitError(f"{ending.reason}, and this node was not needed")
    raise RendezvousClosedError(ending.reason)


class _Teller:
    """Says what is waited for: after some seconds, when it changes, and now and then.

    Args:
        report: is told.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._due = time.monotonic() + _SILENT_SECONDS
        self._again = self._due
        self._said = ""

    def look(self, what: str, deadline: float | None) -> None:
        """Say it if it is time to."""
        now = time.monotonic()
        news = what != self._said and now >= self._due
        if not what or not (news or (deadline is not None and now >= self._again)) or now < self._due:
            return
        self._said, self._due, self._again = what, now + _SILENT_SECONDS, now + _AGAIN_SECONDS
        left = "" if deadline is None else f"; gives up in {_span(deadline - now)}"
        self._report(f"{what}{left}" if deadline is None else f"waits: {what}{left}")


def _span(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def is_spare(known: Known) -> bool:
    """Whether the others are at work, and this node is one too many."""
    state = known.state
    return state is not None and bool(state.generation) and not state.called and not known.trouble


def _why_not_needed(known: Known, settings: Settings) -> str:
    members = known.round.members if known.round is not None else ()
    if len(members) >= settings.terms.max_nodes:
        return SEATS_TAKEN
    parted = [each for each in known.lobby.split("; ") if " can't reach " in each]
    return f"the others are at work, and no node joins that can't be reached: {'; '.join(parted)}" if parted else HELD


def _what_is_missing(known: Known) -> str:
    return known.trouble or known.lobby or ("" if known.state is not None else "for an answer of the rendezvous")


def _in_vain(known: Known, settings: Settings) -> NoReturn:
    waited = f"within {settings.join_timeout:g} s"
    if known.trouble and (known.state is not None or known.round is not None):
        raise RendezvousTimeoutError(f"none of the others has been reached {waited}: {known.trouble}")
    if known.state is None or known.trouble:
        raise RendezvousConnectionError(
            f"no rendezvous was reached at {settings.where} {waited}: {known.trouble or 'no answer'}. Is ftrun "
            "running on the node that has this address? --rdzv-conf is_host=1 makes a node the host."
        )
    raise RendezvousTimeoutError(f"{known.lobby or 'too few nodes came'} {waited}")

"""One look at the store: what a node writes into it and reads from it, in one go, or two where there is news."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.model import Call, Ending, Outcome, Refusal, Round, State
from ftrun.rendezvous.preflight import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.rendezvous.member import Known
    from ftrun.rendezvous.model import Who
    from ftrun.rendezvous.shelf import Write


class Texts(Protocol):
    """A shelf, near or far."""

    def exchange(self, writes: Sequence[Write], reads: Sequence[str]) -> list[str | None]:
        """Write some texts, then read some."""
        ...


@dataclass(frozen=True)
class Errand:
    """What one look writes, and what it asks for.

    Attributes:
        node: whose errand it is.
        known: what the node knows so far.
        beat: its record; empty where it isn't time to write it.
        lobby: whether it asks what the round waits for.
        outbox: keys and values to write.
        said: number of the last thing that the main thread said, which this look takes along.
    """

    node: str
    known: Known
    beat: str
    lobby: bool
    outbox: tuple[tuple[str, str], ...]
    said: int

    @property
    def writes(self) -> list[Write]:
        """What it writes."""
        # The first one who says how the run ended is right.
        found: list[Write] = [("first" if key == Keys.END else "set", key, value) for key, value in self.outbox]
        return [*found, ("set", Keys.beat(self.node), self.beat)] if self.beat else found


def announce(texts: Texts, who: Who, beat: str, last: Round | None) -> None:
    """Introduce a node: first what it has to say, then its name in the list, where the leader finds it."""
    texts.exchange(
        [
            ("set", Keys.last(who.node), last.encode() if last is not None else ""),
            ("set", Keys.who(who.node), who.encode()),
            ("set", Keys.beat(who.node), beat),
            ("append", Keys.NODES, f"{who.node} "),
        ],
        (),
    )


def look(texts: Texts, errand: Errand) -> Known:
    """Write and read. Nothing waits: what isn't there is looked for at the next look."""
    known, writes = errand.known, errand.writes
    reads = [Keys.STATE, Keys.MOVED, Keys.END]
    reads += [Keys.refusal(errand.node)] if errand.beat else []
    reads += [Keys.LOBBY] if errand.lobby else []
    generation = known.state.generation if known.state is not None else 0
    reads += _about(known, generation)
    found = dict(zip(reads, texts.exchange(writes, reads), strict=True))
    state = State.decode(found[Keys.STATE] or "")
    new = state.called and known.call is None and Keys.call(generation) not in found
    if state.generation != generation or new:
        more = [*_about(known, state.generation), Keys.call(state.generation)]
        found.update(zip(more, texts.exchange((), more), strict=True))
    if state.trial and (known.trial is None or known.trial.number != state.trial):
        known = dataclasses.replace(known, trial=Trial.decode(texts.exchange((), (Keys.TRIAL,))[0] or Trial().encode()))
    known = dataclasses.replace(known, state=state, moved=found[Keys.MOVED] or "", trouble="")
    known = _round(known, found, state.generation)
    known = dataclasses.replace(known, call=_call(known, found, state))
    if state.outcome is not Outcome.OPEN and known.ending is None:
        known = dataclasses.replace(known, ending=Ending.decode(found[Keys.END] or ""))
    if refusal := found.get(Keys.refusal(errand.node)):
        known = dataclasses.replace(known, refusal=Refusal.decode(refusal))
    if errand.lobby:
        known = dataclasses.replace(known, lobby=found[Keys.LOBBY] or "")
    return known


def _about(known: Known, generation: int) -> list[str]:
    """What is to be read of a round: what isn't known of it yet."""
    if not generation:
        return []
    new = known.round is None or known.round.generation != generation
    reads = [Keys.round(generation)] if new else []
    reads += [Keys.store(generation)] if new or not known.store else []
    # It may yet become one of another kind, and others may leave on purpose.
    called = known.state is not None and known.state.called
    return [*reads, Keys.call(generation)] if called else reads


def _round(known: Known, found: dict[str, str | None], generation: int) -> Known:
    if not generation:
        return dataclasses.replace(known, round=None, store="")  # of a leader before this one
    if text := found.get(Keys.round(generation)):
        known = dataclasses.replace(known, round=Round.decode(text), store="")
    if text := found.get(Keys.store(generation)):
        known = dataclasses.replace(known, store=text)
    return known


def _call(known: Known, found: dict[str, str | None], state: State) -> Call | None:
    if not state.called:
        return None
    text = found.get(Keys.call(state.generation))
    return Call.decode(text) if text else known.call

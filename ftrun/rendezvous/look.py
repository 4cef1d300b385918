"""One look at the store: what a node writes into it and reads from it, in one go. On a line's thread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.model import Call, Ending, Outcome, Refusal, Round, State

if TYPE_CHECKING:
    from torch.distributed import Store

    from ftrun.rendezvous.member import Known
    from ftrun.rendezvous.model import Who


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


def announce(store: Store, who: Who, beat: str, last: Round | None) -> None:
    """Introduce a node: first what it has to say, then its name in the list, where the leader finds it."""
    store.set(Keys.last(who.node), last.encode() if last is not None else "")
    store.set(Keys.who(who.node), who.encode())
    store.set(Keys.beat(who.node), beat)
    store.append(Keys.NODES, f"{who.node} ")  # type: ignore[attr-defined]


def look(store: Store, errand: Errand) -> Known:
    """Write and read. Nothing waits: what is asked for is there, or is looked for first."""
    for key, value in errand.outbox:
        if key == Keys.END:
            store.compare_set(key, "", value)  # the first one who says how the run ended is right
        else:
            store.set(key, value)
    if errand.beat:
        store.set(Keys.beat(errand.node), errand.beat)
    said, moved = (text.decode() for text in store.multi_get([Keys.STATE, Keys.MOVED]))
    state = State.decode(said)
    known = dataclasses.replace(errand.known, state=state, moved=moved, trouble="")
    known = _look_at_round(store, known, state.generation)
    known = dataclasses.replace(known, call=_look_at_call(store, known, state))
    if state.outcome is not Outcome.OPEN and known.ending is None:
        known = dataclasses.replace(known, ending=Ending.decode(_text(store, Keys.END)))
    if errand.beat and (refusal := _text_if_there(store, Keys.refusal(errand.node))):
        known = dataclasses.replace(known, refusal=Refusal.decode(refusal))
    if errand.lobby:
        known = dataclasses.replace(known, lobby=_text(store, Keys.LOBBY))
    return known


def _look_at_call(store: Store, known: Known, state: State) -> Call | None:
    if not state.called or known.call is not None:
        return known.call if state.called else None
    text = _text_if_there(store, Keys.call(state.generation))
    return Call.decode(text) if text else None


def _look_at_round(store: Store, known: Known, generation: int) -> Known:
    if not generation:
        return dataclasses.replace(known, round=None, store="")  # of a leader before this one
    if known.round is None or known.round.generation != generation:
        formed = Round.decode(_text(store, Keys.round(generation)))
        known = dataclasses.replace(known, round=formed, store="")
    if not known.store:
        known = dataclasses.replace(known, store=_text_if_there(store, Keys.store(generation)))
    return known


def _text(store: Store, key: str) -> str:
    return store.get(key).decode()


def _text_if_there(store: Store, key: str) -> str:
    return _text(store, key) if store.check([key]) else ""

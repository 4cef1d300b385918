"""The agent that hosts the rendezvous: its store, and the thread that leads."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import TYPE_CHECKING

from ftrun.rendezvous.actions import Asked, Called, Ended, Formed, Observation, Parted, Refused
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.model import Beat, Call, Ending, Job, Outcome, Round, State, Who
from ftrun.rendezvous.preflight import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.rendezvous.actions import Action
    from ftrun.rendezvous.member import Inheritance
    from ftrun.rendezvous.model import Terms
    from ftrun.rendezvous.shelf import Server, Shelf
    from ftrun.rendezvous.tie import Findings, Wish

_LOOK_SECONDS = 0.05
_STEADY_SECONDS = 0.1
_SAY_SECONDS = 0.2
_START_SECONDS = 10.0
_KEPT_ROUNDS = 3


class Serving:
    """The leader of a run at work in a store of its own process. One agent of a run has it.

    Args:
        server: where it serves what it says.
        run_id: whose rendezvous it is.
        terms: what the leader goes by.
        host: the node that it runs on.
        report: is told in words what the leader decides; called on the leader's thread.
        inheritance: what it takes over; None for the first leader.
        remembered: the latest round of a run that nobody lives of: this one counts on from there.

    Attributes:
        job: whose store it is.
        formed: the latest round; None before the first.
        missing: nodes that it has heard of and doesn't hear from.
    """

    def __init__(
        self,
        server: Server,
        run_id: str,
        terms: Terms,
        host: Who,
        report: Callable[[str], None],
        inheritance: Inheritance | None = None,
        remembered: int = 0,
    ) -> None:
        self._server = server
        self._host = host
        self._report = report
        succession = inheritance.succession if inheritance is not None else 0
        self.job = Job(run_id, secrets.token_hex(8), host.name, host.node, succession)
        self._leader = Leader(terms, host)
        self._inheritance = inheritance
        self._leader.remember(remembered)
        self.formed: Round | None = inheritance.last if inheritance is not None else None
        if inheritance is not None:
            self._leader.inherit(inheritance.last, inheritance.host, inheritance.left, silent=inheritance.silent)
        self._thread = threading.Thread(target=self._run, name="ftrun-leader", daemon=True)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._told = threading.Event()
        self._seen: set[str] = set()
        self._heard: dict[str, tuple[str, Report]] = {}
        self._count = 0
        self._said = ""
        self._lobby = ""
        self._say_at = 0.0
        self.missing: tuple[Who, ...] = ()
        # Set by other threads, each by one assignment.
        self.excluded: dict[str, str] = {}
        self.hold_growth = False
        self.move_to = ""
        self.findings: Findings | None = None

    @property
    def port(self) -> int:
        """Where its store is."""
        return self._server.port

    @property
    def generation(self) -> int:
        """The latest round."""
        return self._leader.generation

    @property
    def latest(self) -> int:
        """The latest round that it knows of, one of a run before this one included."""
        return self._leader.latest

    @property
    def wish(self) -> Wish | None:
        """The claim on a round that it would make."""
        return self._leader.wish

    @property
    def asked(self) -> tuple[str, ...]:
        """Keys of the rounds of which it has to know who has claimed them."""
        return self._leader.asked

    @property
    def unheard(self) -> bool:
        """Whether it waits for that."""
        return self._leader.unheard

    @property
    def over(self) -> bool:
        """Whether the run is over."""
        return self._leader.ending is not None

    @property
    def leads(self) -> bool:
        """Whether it still does."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Lead.

        Raises:
            RuntimeError: its own store doesn't answer.
        """
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise RuntimeError(f"the store of the rendezvous could not be furnished within {_START_SECONDS:g} s")

    def close(self, linger: float) -> None:
        """End, at best after all nodes know that the run is over.

        Args:
            linger: seconds to wait for that.
        """
        if self._thread.is_alive():
            self._told.wait(linger)
            self._stop.set()
            self._thread.join(_START_SECONDS)

    def _furnish(self, store: Shelf) -> None:
        for key in (Keys.NODES, Keys.END, Keys.LOBBY, Keys.MOVED):
            store.set(key, "")  # what an earlier leader here has left
        store.set(Keys.STATE, self._state().encode())
        if self._inheritance is not None:
            last = self._inheritance.last
            store.set(Keys.round(last.generation), last.encode())
        # Last: whoever reads it finds the rest.
        store.set(Keys.JOB, self.job.encode())

    # The leader's thread

    def _run(self) -> None:
        store = self._server.shelf
        try:
            self._furnish(store)
            self._ready.set()
            while not self._stop.is_set() and self._look(store):
                self._stop.wait(_LOOK_SECONDS if self._leader.busy else _STEADY_SECONDS)
        except Exception as error:  # without a leader the others would wait for nothing
            self._give_up(store, error)
        finally:
            self._told.set()

    def _give_up(self, store: Shelf, error: Exception) -> None:
        reason = f"the leader of the rendezvous, on {self._host.name}, failed: {error!r}"
        self._report(reason)
        ending = Ending(Outcome.FAILED, reason)
        state = State(self.job.leader, self._count + 1, self._leader.generation, called=False, outcome=ending.outcome)
        with contextlib.suppress(Exception):  # it is tried, and nobody is left to be told
            store.set(Keys.END, ending.encode())
            store.set(Keys.STATE, state.encode())

    def _look(self, store: Shelf) -> bool:
        """Look once, and act. Returns whether it still leads."""
        nodes = [node for node in self._leader.nodes if node in self._seen]
        if self.move_to:
            store.set(Keys.MOVED, self.move_to)
        keys = [Keys.NODES, Keys.END, Keys.MOVED, *map(Keys.beat, nodes), *map(Keys.reach, nodes)]
        announced, ending, moved, *found = store.exchange((), keys)
        records, reports = found[: len(nodes)], found[len(nodes) :]
        if moved and not self.move_to and int(moved.split()[2]) < self._leader.generation:
            store.set(Keys.MOVED, moved := "")  # by one that looked here before the latest round was formed
        if moved:
            self._report(f"another leader goes on: the rendezvous has moved to {moved}")
            return False
        beats = {node: Beat.decode(text) for node, text in zip(nodes, records, strict=True) if text}
        newcomers, last = self._newcomers(store, (announced or "").split(), beats)
        seen = Observation(
            now=time.monotonic(),
            newcomers=newcomers,
            beats=beats,
            ending=Ending.decode(ending) if ending else None,
            excluded=self.excluded,
            hold_growth=self.hold_growth,
            last=last,
            reports=self._reports(nodes, reports),
            findings=self.findings,
        )
        if last is not None:
            store.set(Keys.round(last.generation), last.encode())  # it may be new to this store
            if self.formed is None or self.formed.generation < last.generation:
                self.formed = last
        for action in self._leader.step(seen):
            self._publish(store, action)
        self._say(store)
        self.missing = tuple(self._leader.missing)
        if self._leader.ending is not None and not set(self._leader.uninformed) - {self._host.node}:
            self._told.set()
        return True

    def _reports(self, nodes: list[str], texts: list[str | None]) -> dict[str, Report]:
        for node, text in zip(nodes, texts, strict=True):
            if text and (node not in self._heard or self._heard[node][0] != text):
                self._heard[node] = (text, Report.decode(text))
        return {node: self._heard[node][1] for node, text in zip(nodes, texts, strict=True) if text}

    def _newcomers(
        self, store: Shelf, announced: list[str], beats: dict[str, Beat]
    ) -> tuple[tuple[Who, ...], Round | None]:
        """Those that nobody has looked at yet, and the latest round they know of; their records come to ``beats``."""
        new = [node for node in announced if node not in self._seen]
        if not new:
            return (), None
        self._seen.update(new)
        keys = [*map(Keys.who, new), *map(Keys.beat, new), *map(Keys.last, new)]
        texts = [text or "" for text in store.exchange((), keys)]
        who, records, last = (texts[start : start + len(new)] for start in range(0, len(texts), len(new)))
        beats.update(zip(new, map(Beat.decode, records), strict=True))
        rounds = [Round.decode(text) for text in last if text]
        return tuple(map(Who.decode, who)), max(rounds, key=lambda each: each.generation, default=None)

    def _publish(self, store: Shelf, action: Action) -> None:
        if isinstance(action, Called):
            store.set(Keys.call(action.generation), Call(action.reason, action.left, action.growth).encode())
            self._report(f"a new round is called: {action.reason}")
        elif isinstance(action, Formed):
            generation = action.round.generation
            self.formed = action.round
            store.set(Keys.round(generation), action.round.encode())
            old = generation - _KEPT_ROUNDS
            store.exchange([("delete", key(old), "") for key in (Keys.round, Keys.store, Keys.call)], ())
            self._report(f"round {generation}: {', '.join(each.name for each in action.round.members)}")
        elif isinstance(action, Refused):
            store.set(Keys.refusal(action.who.node), action.refusal.encode())
            self._report(f"{action.who.name} is refused: {action.refusal.reason}")
        elif isinstance(action, Asked):
            store.set(Keys.TRIAL, action.trial.encode())
        elif isinstance(action, Parted):
            self._report(action.text)
        elif isinstance(action, Ended):
            store.set(Keys.END, action.ending.encode())
            self._report(f"the run is over: {action.ending.reason}")

    def _say(self, store: Shelf) -> None:
        lobby = self._leader.lobby()
        if lobby != self._lobby:
            self._lobby = lobby
            store.set(Keys.LOBBY, lobby)
        state = self._state()
        said = f"{state.generation} {state.called} {state.outcome} {state.trial}"
        if said == self._said and time.monotonic() < self._say_at:
            return
        self._said, self._say_at = said, time.monotonic() + _SAY_SECONDS
        self._count += 1
        store.set(Keys.STATE, state.encode())

    def _state(self) -> State:
        leader = self._leader
        called, trial = bool(leader.called), leader.trial.number
        return State(self.job.leader, self._count, leader.generation, called, leader.outcome, trial)

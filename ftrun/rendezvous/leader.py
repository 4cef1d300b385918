"""The leader's decisions: what it sees in, what it does out, nothing else. One life of the host's agent.

A run goes through rounds. Between two rounds the leader *calls*: whoever has workers stops them and reports ready. Then
the next round is formed of those that are ready, old members first and in their old order.

    a member is lost, stuck, gone or excluded ─┐
    a member is ready again (its workers fell) ├─► called ──► all live members ready ──► formed, generation + 1
    there is room, and somebody waits ─────────┘               (or out of time)          (min..max, last call)

Everything is judged by what the records say now, never by what changed since the last look: seeing the same thing
twice, or missing what was in between, does no harm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.rendezvous.actions import Asked, Called, Ended, Formed, Parted, Refused
from ftrun.rendezvous.model import Beat, Ending, Outcome, Phase, Refusal, Round
from ftrun.rendezvous.preflight import Preflight, brief
from ftrun.rendezvous.quorum import Quorum
from ftrun.rendezvous.seen import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ftrun.rendezvous.actions import Action, Observation
    from ftrun.rendezvous.model import Terms, Who
    from ftrun.rendezvous.preflight import Report, Trial
    from ftrun.rendezvous.tie import Wish

_LONGEST_LOOK = 0.25
"""A pause between two looks counts for no more: while the leader slept, it saw nobody's silence."""

_SECONDS_A_COMER = 0.02
_HANDS_OVER_SECONDS = 5.0
_OTHERS_FOLLOW = 2.0
"""Seconds in which all nodes say that they stand still whom the same storage holds up."""
_HOST_NOTICES = 0.4
"""Of the time after which a node is lost: how much later than a node that is cut off its host notices a cut."""


class Leader:
    """Decides about one run. Not thread-safe; the leader's thread owns it.

    Args:
        terms: what it goes by.
        host: the node that it runs on, whose traits the others must have.

    Attributes:
        generation: the latest round, 0 before the first.
        called: why a new round is called, in words; empty while none is.
        ending: how the run ended; None while it goes on.
    """

    def __init__(self, terms: Terms, host: Who) -> None:
        self._terms = terms
        self._host = host
        self._nodes: dict[str, Seen] = {}  # in the order in which they came
        self._members: list[str] = []
        self._refused: set[str] = set()
        self._seen_generation = 0
        self._clock = 0.0
        self._last_look: float | None = None
        self._called_at = self._not_before = 0.0
        self._enough_since: float | None = None
        self._waits: frozenset[str] = frozenset()  # who waits to join
        self._waits_since = self._changed_at = 0.0
        self._starved = True
        self._departed: list[str] = []  # in words, since the latest round
        self._gone: list[str] = []  # those of them that left on purpose
        self._told_gone = 0  # how many of these the call names
        self._quorum = Quorum(terms, host.node)
        self._new_host: list[str] = []  # what it has taken over, in words, until that is told
        self._host_left_at: float | None = None
        self._preflight = Preflight()
        self._parted = ""  # pairs that don't reach each other, as told last
        self._reports: Mapping[str, Report] = {}
        self._growing = False  # the call is for nothing but growth
        self._passed_over = 0  # numbers that another leader may have used, unseen
        self.generation = 0
        self.called = ""
        self.ending: Ending | None = None

    @property
    def outcome(self) -> Outcome:
        """Whether the run is over."""
        return self.ending.outcome if self.ending is not None else Outcome.OPEN

    @property
    def busy(self) -> bool:
        """Whether a round is coming about, or the run is ending."""
        return bool(self.called) or not self.generation or self.ending is not None

    def inherit(self, last: Round, host: str = "", left: Iterable[str] = (), *, silent: bool = False) -> None:
        """Take over a run whose leader is lost, or start one anew that others remember.

        The next round needs most members of this one, so that no two leaders, each on one side of a cut, form one.
        (A leader that has formed the latest round itself makes do with half of it, if its own node is in that half.
        Should a node be counted by two leaders at a moment, at most one of the two rounds begins: it waits for all its
        members, and the node takes up one.)

        Args:
            last: the latest round that is known.
            host: the node that hosted the rendezvous, known to be lost.
            left: members that left on purpose.
            silent: its host may live on where it can't be reached from here, and takes a moment longer than nodes do
                to notice that it is alone, and to stop its workers.
        """
        if last.generation <= self.generation:
            return
        gone = set(left)
        stay = [each for each in last.members if each.node not in gone]
        for each in stay:
            # Until it comes itself, for as long as a silent node has.
            known = self._nodes.setdefault(each.node, Seen(each, Beat(-1, Phase.RUNNING, last.generation)))
            known.lost = known.lost or each.node == host
        self.generation = last.generation
        self._members = [each.node for each in stay]
        self._quorum.begin(last, stay, incumbent=False)
        self._starved = False
        self._gone = [each.node for each in last.members if each.node in gone]
        words = [f"{each.name} left" for each in last.members if each.node in gone]
        self._new_host = ["the rendezvous has a new host", *words]
        self._not_before = self._clock + (_HOST_NOTICES * self._terms.lost_after if silent else 0.0)
        self.called = ""
        # A host that was stopped or cut off just then may have formed one more, which nobody here has seen: two rounds
        # of one number would pass for the same.
        self._passed_over = 1 if silent else 0

    def remember(self, generation: int) -> None:
        """Count on from a round of a run that nobody lives of."""
        self._seen_generation = max(self._seen_generation, generation)

    @property
    def latest(self) -> int:
        """The latest round that it knows of, one of a run before this one included."""
        return max(self.generation, self._seen_generation)

    def step(self, seen: Observation) -> list[Action]:
        """Look once. Returns what is to be published, in that order."""
        passed = self._wake(seen.now)
        if seen.last is not None:
            self.inherit(seen.last)
        self._reports = seen.reports
        self._quorum.hear(seen.findings, seen.now, passed)
        actions = [*self._admit(seen), *self._exclude(seen.excluded)]
        self._update(seen.beats, passed)
        if self.ending is None:
            actions += self._decide(seen)
        return actions

    @property
    def nodes(self) -> list[str]:
        """Nodes whose records it wants to see."""
        return list(self._nodes)

    @property
    def uninformed(self) -> list[str]:
        """Nodes that are alive and don't know yet that the run is over."""
        return [node for node, known in self._nodes.items() if known.lives and not known.beat.informed]

    @property
    def missing(self) -> list[Who]:
        """Nodes that it has heard of and doesn't hear from."""
        return [known.who for known in self._nodes.values() if known.lost]

    @property
    def trial(self) -> Trial:
        """What it has asked nodes to try."""
        return self._preflight.trial

    @property
    def wish(self) -> Wish | None:
        """The claim on a round that it would make."""
        return self._quorum.wish

    @property
    def asked(self) -> tuple[str, ...]:
        """Keys of the rounds of which it has to know who has claimed them."""
        return self._quorum.asked

    @property
    def unheard(self) -> bool:
        """Whether it waits for that."""
        return self._quorum.unheard

    def lobby(self) -> str:
        """What a round waits for, in words."""
        here = [each.who.name for each in self._candidates()]
        late = [each.who.name for each in self._stopping()]
        text = f"{len(here)} of at least {self._terms.min_nodes} nodes are here ({brief(here, 16, ', ') or 'none'})"
        if self._quorum.base and not self._quorate(self._candidates()):
            text += f", and {self._quorum.lacks([each.who for each in self._candidates()])}"
        if late:
            text += f"; {brief(late, 16, ', ')} still stop{'s' if len(late) == 1 else ''} workers"
        return "; ".join(
            [text, *self._departed[-4:], *([f"{self._parted} (preflight=0 doesn't ask)"] if self._parted else [])]
        )

    # What is seen

    def _wake(self, now: float) -> float:
        passed = 0.0 if self._last_look is None else min(max(now - self._last_look, 0.0), _LONGEST_LOOK)
        self._last_look = now
        self._clock += passed
        return passed

    def _admit(self, seen: Observation) -> Iterable[Action]:
        for who in seen.newcomers:
            if who.node in self._refused or self._is_expected(who, seen.beats):
                continue
            if difference := self._difference(who):
                self._refused.add(who.node)
                yield Refused(who, Refusal(excluded=False, reason=difference))
                continue
            self._nodes[who.node] = Seen(who, seen.beats.get(who.node, Beat(0, Phase.READY, 0)))

    def _is_expected(self, who: Who, beats: Mapping[str, Beat]) -> bool:
        """Note one that was known before it came."""
        known = self._nodes.get(who.node)
        if known is None:
            return False
        known.who = who
        known.silent, known.lost = 0.0, False
        known.beat = beats.get(who.node, known.beat)
        return True

    def _difference(self, who: Who) -> str:
        for name in {**self._host.traits, **who.traits}:
            theirs, ours = (traits.get(name, "none") for traits in (who.traits, self._host.traits))
            if theirs != ours:
                return (
                    f"{name} is {theirs} on {who.name} and {ours} on {self._host.name}, which hosts the rendezvous: "
                    "make them the same on all nodes."
                )
        return ""

    def _exclude(self, excluded: Mapping[str, str]) -> Iterable[Action]:
        for node, known in self._nodes.items():
            if (reason := excluded.get(known.who.name)) is not None and node not in self._refused:
                self._refused.add(node)
                yield Refused(known.who, Refusal(excluded=True, reason=reason))

    def _update(self, beats: Mapping[str, Beat], passed: float) -> None:
        for node, known in self._nodes.items():
            beat = beats.get(node, known.beat)
            if beat.count != known.beat.count:
                known.silent, known.lost = 0.0, False
            else:
                known.silent += passed
                patience = self._terms.lost_after
                if known.beat.count < 0:  # a new leader is found by all at once
                    patience += _SECONDS_A_COMER * len(self._members)
                known.lost = known.lost or known.silent >= patience
            if beat.phase is Phase.READY:
                known.late = False
            known.beat = beat
            known.still = known.still + passed if beat.stuck else 0.0
            self._seen_generation = max(self._seen_generation, beat.generation)
            if beat.generation >= self.generation:
                self._quorum.taken_up(node)
        self._judge_still()

    def _judge_still(self) -> None:
        """Note whose main thread stands still alone. Where most do, it is the storage, and all go on when that does."""
        here = [each for each in self._current() if not each.lost and each.beat.phase is not Phase.GONE]
        most = 2 * sum(each.beat.stuck for each in here) > len(here)
        for known in self._nodes.values():
            known.stands_still = known.still >= _OTHERS_FOLLOW and not (most and known in here)

    # What follows

    def _decide(self, seen: Observation) -> Iterable[Action]:
        if seen.ending is not None:
            yield self._end(seen.ending)
            return
        fallen = self._fallen()
        reasons = [*self._departures(seen.excluded), *self._lapsed(), *fallen]
        if self._new_host:
            reasons, self._new_host = [*self._new_host, *reasons], []
        if not self.called and not reasons and self._all_finished():
            yield self._end(Ending(Outcome.FINISHED, "all nodes have finished"))
            return
        if not self.called and self.generation and not reasons:
            self._gather()
            yield from self._ask([*self._current(), *self._waiting()])
        growing = not self.called and not reasons and not seen.hold_growth
        if growing:
            reasons = self._growth()
            yield from self._tell_parted()
        if reasons and not self.called:
            self.called, self._called_at, self._enough_since = brief(reasons, 8, ", "), self._clock, None
            self._quorum.doubt()
            self._growing, self._told_gone = growing, len(self._gone)
            if fallen == reasons:  # and nothing else explains it
                self._preflight.doubt()
            yield Called(self.generation, self.called, tuple(self._gone), growing)
        elif reasons and self._growing and self._departed:  # somebody is lost while workers leave in order
            self.called, self._growing = brief(self._departed, 8, ", "), False
            self._told_gone = len(self._gone)
            yield Called(self.generation, self.called, tuple(self._gone))
        elif self.called and len(self._gone) > self._told_gone:  # an heir must not count on them
            news = [each for each in reasons if each not in self.called]
            self.called, self._told_gone = brief([self.called, *news], 8, ", "), len(self._gone)
            yield Called(self.generation, self.called, tuple(self._gone))
        if self.called or not self.generation:
            yield from self._form()

    def _end(self, ending: Ending) -> Ended:
        self.ending = ending
        return Ended(ending)

    def _departures(self, excluded: Mapping[str, str]) -> list[str]:
        """Drop members that are out; the order of the others stays."""
        reasons = []
        for node in list(self._members):
            known = self._nodes[node]
            if known.lives and node not in self._refused:
                continue
            self._members.remove(node)
            if known.beat.phase is Phase.GONE or node in self._refused:  # whoever is excluded has to go
                self._quorum.without(node)
                self._host_left_at = self._clock if node == self._host.node else self._host_left_at
                self._gone.append(node)
            reasons.append(known.why_gone(excluded))
        for node in [node for node, known in self._nodes.items() if self._forgotten(node, known)]:
            del self._nodes[node]
        self._departed += reasons
        return reasons

    def _lapsed(self) -> list[str]:
        """Why workers that run have no right to any more: at once, also where they were about to leave in order."""
        reason = self._quorum.lapsed() if self.generation and (not self.called or self._growing) else ""
        self._departed += [reason] if reason else []
        return [reason] if reason else []

    def _forgotten(self, node: str, known: Seen) -> bool:
        return node not in self._members and (known.beat.phase is Phase.GONE or node in self._refused)

    def _fallen(self) -> list[str]:
        """Members that are ready for a round after this one."""
        return [f"{known.who.name} starts again" for known in self._current() if self._is_ready_again(known)]

    def _growth(self) -> list[str]:
        current = list(self._current())
        # A node that stands still can't have its workers save, and whose workers are then killed for it loses steps.
        settled = all(
            each.beat.phase is Phase.RUNNING and each.beat.generation == self.generation and not each.beat.stuck
            for each in current
        )
        room = self._terms.max_nodes - len(current)
        if not settled or not self.generation or room <= 0 or not self._gathered():
            return []
        newcomers = self._fit([*current, *self._waiting()])
        return [f"{each.who.name} joins" for each in newcomers if each.who.node not in self._members][:room]

    def _gather(self) -> None:
        """See who has come or gone of those who wait: some that come one after the other call one round, not many."""
        waits = frozenset(each.who.node for each in self._waiting())
        if waits != self._waits:
            self._changed_at = self._clock
            self._waits_since = self._waits_since if self._waits else self._clock
            self._waits = waits

    def _gathered(self) -> bool:
        gather = self._terms.gather
        return self._clock - self._changed_at >= gather or self._clock - self._waits_since >= 10 * gather

    def _all_finished(self) -> bool:
        current = list(self._current())
        return bool(current) and all(
            each.beat.phase is Phase.FINISHED and each.beat.generation == self.generation for each in current
        )

    def _form(self) -> Iterable[Action]:
        if self._stopping():
            if self._clock - self._called_at < self._terms.stop_within:
                return
            for known in self._stopping():
                known.late = True
            self._departures({})
        ready = self._candidates()
        if not self._quorum.base:  # the first round begins with the host, whoever came first
            ready.sort(key=lambda each: each.who.node != self._host.node)
        if len(ready) < self._terms.min_nodes or not self._quorate(ready):
            # After a change of the host nobody waits for more than most: who comes late is taken in later.
            claims = self._claims(ready)
            self._starved, self._enough_since = self._quorum.incumbent and not claims, None
            return
        if self._enough_since is None:
            self._enough_since = self._clock
        waited = self._clock - self._enough_since
        if self._clock < self._not_before:
            return
        if self._host_left_at is not None and self._clock - self._host_left_at < _HANDS_OVER_SECONDS:
            return  # whoever leads then would have to form it once more
        if len(ready) < self._terms.max_nodes and self._starved and waited < self._terms.last_call:
            return
        yield from self._ask(ready)
        fit = self._fit(ready)
        yield from self._tell_parted()
        if len(fit) >= self._terms.min_nodes and self._quorate(fit):
            yield self._formed(fit[: self._terms.max_nodes])
        else:
            self._claims(fit)

    def _ask(self, nodes: list[Seen]) -> Iterable[Action]:
        """Have nodes that have never met try to reach each other."""
        if self._terms.preflight and self._preflight.ask([each.who for each in nodes], self._quorum.base, self._clock):
            yield Asked(self._preflight.trial)

    def _fit(self, nodes: list[Seen]) -> list[Seen]:
        """Those of them that reach each other; none before that is known."""
        who = [each.who for each in nodes]
        if not self._terms.preflight:
            return nodes
        together = self._quorum.base
        if not self._preflight.settled(who, self._reports, together, self._clock):
            return []
        kept = {each.node for each in self._preflight.fit(who, self._reports, together, self._host.node)}
        return [each for each in nodes if each.who.node in kept]

    def _tell_parted(self) -> Iterable[Action]:
        parted = brief(list(map(str, self._preflight.broken)), 3, "; ")
        if parted != self._parted:
            self._parted = parted
            if parted:
                yield Parted(parted)

    def _quorate(self, ready: list[Seen]) -> bool:
        return self._quorum.holds([each.who for each in ready])

    def _claims(self, ready: list[Seen]) -> bool:
        return self._quorum.claims([each.who for each in ready], self._clock, self._not_before)

    def _formed(self, ready: list[Seen]) -> Formed:
        who = [each.who for each in ready]
        theirs = self._quorum.takes_over(who)
        generation = max(self.generation, self._seen_generation, theirs) + 1 + self._passed_over
        self._passed_over = 0
        reason = f"{self.called}, and the shared directory showed no sign of the others" if theirs else self.called
        # Traits are compared where nodes are admitted, and are much to send to everybody.
        members = tuple(replace(each, traits={}) for each in who)
        formed = Round(generation, members, reason, self._quorum.halves(who))
        self._preflight.trust()
        self._quorum.begin(formed, formed.members, incumbent=True)
        self.generation, self.called = generation, ""
        self._members = [each.who.node for each in ready]
        self._starved, self._enough_since, self._departed, self._gone = False, None, [], []
        self._told_gone = 0
        return Formed(formed)

    # Who is who

    def _current(self) -> list[Seen]:
        return [self._nodes[node] for node in self._members]

    def _is_ready_again(self, known: Seen) -> bool:
        return known.beat.phase is Phase.READY and known.beat.generation >= self.generation

    def _stopping(self) -> list[Seen]:
        """Members that are called and not ready yet."""
        return [each for each in self._current() if not self._is_ready_again(each)]

    def _waiting(self) -> list[Seen]:
        """Those who would take part and don't yet, in the order in which they came."""
        members = set(self._members)
        return [
            known
            for node, known in self._nodes.items()
            if node not in members and node not in self._refused and known.lives and known.beat.phase is Phase.READY
        ]

    def _candidates(self) -> list[Seen]:
        return [*(each for each in self._current() if self._is_ready_again(each)), *self._waiting()]

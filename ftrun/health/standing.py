"""Where a node stands, by what is kept of it. Pure.

::

    fine ──marks──▶ suspect ──enough of them──▶ excluded ──time──▶ due ──check passed──▶ probation ──time──▶ fine
                                                   ▲                                        │
                                                   └────────────── one more mark ───────────┘

A user may exclude and admit at any moment: who admits a node forgives it everything. An exclusion by a user is over
when its time is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from ftrun.health.history import Admitted, By, Entry, Excluded, Host, Marked, Withheld

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftrun.health.marks import Sign

_DAY = 86400.0
_GROWTH = 4.0
"""A node that fails every few days has to be out for longer than that before it matters."""


@dataclass(frozen=True)
class Rules:
    """What the job says of its nodes. Durations are seconds.

    Attributes:
        after: how many marks of each sign exclude a node; None for none do.
        exclude: the policy may exclude nodes.
        window: for how long a mark counts.
        first: how long a node is left out the first time; four times as long each time after that.
        longest: the longest time.
        most: part of the nodes that may be left out at once.
        check: a node whose time is over has to pass a check.
        probation: for how long one mark is enough after that.
    """

    after: Mapping[Sign, int | None] = field(default_factory=lambda: MappingProxyType({}))
    exclude: bool = True
    window: float = 7 * _DAY
    first: float = 4 * 3600.0
    longest: float = 7 * _DAY
    most: Fraction = Fraction(1, 3)
    check: bool = True
    probation: float = 7 * _DAY


class State(enum.StrEnum):
    """Where a node stands. The values are for people."""

    FINE = "fine"
    SUSPECT = "suspect"
    EXCLUDED = "excluded"
    DUE = "to be checked"
    PROBATION = "on probation"


@dataclass(frozen=True)
class Standing:
    """Where a node stands.

    Attributes:
        state: in a word.
        marks: what counts against it.
        exclusion: the one that holds, or whose check is due.
        left: seconds until it is over; None for no end.
        before: how often the policy has excluded it lately; admissions by a user count from zero.
        withheld: why the policy doesn't exclude it; empty where it has no wish to.
    """

    state: State
    marks: tuple[Marked, ...] = ()
    exclusion: Excluded | None = None
    left: float | None = None
    before: int = 0
    withheld: str = ""


def age(entry: Entry, now: float) -> float:
    """How long ago that was. One that a clock of another machine puts in the future has only just happened."""
    return max(0.0, now - entry.at)


def left_of(exclusion: Excluded, now: float) -> float | None:
    """Seconds until an exclusion is over, at most its whole time; None for no end."""
    return None if exclusion.seconds is None else max(0.0, exclusion.seconds - age(exclusion, now))


def lasts(before: int, rules: Rules) -> float:
    """For how long the policy excludes a node that it has excluded so many times before."""
    # 4**20 times the first is beyond any limit; a larger power would only overflow.
    return min(rules.longest, rules.first * _GROWTH ** min(before, 20))


def standing(host: Host, rules: Rules, now: float) -> Standing:
    """Where a node stands now."""
    entries = _since_it_was_forgiven(host.entries)
    remembered = rules.window + 4 * rules.longest
    own = [each for each in entries if isinstance(each, Excluded) and each.by is By.POLICY]
    before = sum(age(each, now) < remembered for each in own)
    last = next((each for each in reversed(entries) if isinstance(each, Excluded | Admitted)), None)
    if isinstance(last, Excluded):
        left = left_of(last, now)
        if left is None or left > 0:
            return Standing(State.EXCLUDED, _marks(entries, now, rules), last, left, before)
        if last.by is By.POLICY and rules.check:
            return Standing(State.DUE, _marks(entries, now, rules), last, 0.0, before)
    fresh = entries[_index_after(entries, last) :]
    marks = _marks(fresh, now, rules)
    withheld = next((each.reason for each in reversed(fresh) if isinstance(each, Withheld)), "") if marks else ""
    if _on_probation(last, rules, now):
        return Standing(State.PROBATION, marks, before=before, withheld=withheld)
    return Standing(State.SUSPECT if marks else State.FINE, marks, before=before, withheld=withheld)


def _since_it_was_forgiven(entries: Sequence[Entry]) -> Sequence[Entry]:
    """What came after a user admitted it, and without what the policy took back or a user had excluded it for."""
    kept: list[Entry] = []
    for each in entries:
        if isinstance(each, Admitted) and each.by is By.USER:
            kept.clear()
        elif isinstance(each, Admitted) and each.by is By.POLICY:
            kept = [one for one in kept if not isinstance(one, Marked)]
            taken_back = max((i for i, one in enumerate(kept) if isinstance(one, Excluded)), default=None)
            if taken_back is not None:
                del kept[taken_back]
        else:
            kept.append(each)
    return kept


def _index_after(entries: Sequence[Entry], last: Entry | None) -> int:
    """Where that begins which came after an exclusion or an admission."""
    return 0 if last is None else 1 + max(index for index, each in enumerate(entries) if each is last)


def _marks(entries: Sequence[Entry], now: float, rules: Rules) -> tuple[Marked, ...]:
    return tuple(each for each in entries if isinstance(each, Marked) and age(each, now) < rules.window)


def _on_probation(last: Excluded | Admitted | None, rules: Rules, now: float) -> bool:
    if isinstance(last, Admitted):
        return last.by is By.CHECK and age(last, now) < rules.probation
    if isinstance(last, Excluded):  # it is over, and no check was asked for
        return last.by is By.POLICY and age(last, now) < (last.seconds or 0.0) + rules.probation
    return False

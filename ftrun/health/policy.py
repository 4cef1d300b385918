"""What follows from what is known of the nodes: who is left out, for how long, and who was left out wrongly. Pure.

Of all nodes the policy leaves out a stated part at most, and never so many that too few are left: if half of them go
bad within a day, it is something else that is bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.config.units import format_duration
from ftrun.health.history import Admitted, Book, By, Excluded, Marked, Withheld
from ftrun.health.marks import TABLE, Sign
from ftrun.health.standing import Rules, State, age, lasts, left_of, standing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from ftrun.health.history import Entry
    from ftrun.health.marks import Mark
    from ftrun.health.standing import Standing

_OUT = (State.EXCLUDED, State.DUE)


@dataclass(frozen=True)
class Crowd:
    """Who is there.

    Attributes:
        present: hosts that take part or wait to.
        min_nodes: fewer can't go on.
    """

    present: frozenset[str] = frozenset()
    min_nodes: int = 1


@dataclass(frozen=True)
class _Verdict:
    """A node that the policy would leave out."""

    name: str
    mark: Marked
    times: int
    reason: str
    before: int


def marked(book: Book, name: str, mark: Mark, rules: Rules, now: float) -> Book:
    """The book with one more mark. The same sign counts once in an attempt, and nothing while the node is left out."""
    host = book.hosts.get(name)
    if host is not None:
        if standing(host, rules, now).state in _OUT:
            return book
        known = [each for each in host.entries if isinstance(each, Marked)]
        if any(each.sign is mark.sign and each.attempt == mark.attempt for each in known):
            return book
    return book.add(name, Marked.of(mark, now))


def review(book: Book, crowd: Crowd, rules: Rules, now: float) -> Book:
    """The book with what the policy decides now."""
    if not rules.exclude:
        return book
    for name in sorted(book.hosts):
        if (taken_back := _taken_back(book, name, rules, now)) is not None:
            book = book.add(name, taken_back)
    for verdict in _verdicts(book, rules, now):
        book = book.add(verdict.name, *_carried_out(book, verdict, crowd, rules, now))
    return book


def excluded(book: Book, rules: Rules, now: float) -> dict[str, str]:
    """Hosts that are left out now, and why."""
    found = {}
    for name, host in book.hosts.items():
        where = standing(host, rules, now)
        if where.state is State.EXCLUDED and where.exclusion is not None:
            found[name] = told(name, where.exclusion, where.left)
    return found


def told(name: str, exclusion: Excluded, left: float | None) -> str:
    """An exclusion in a line: who, why, for how long, and what to type."""
    time = "" if left is None else f" for another {format_duration(left)}"
    return f"{_said(name, exclusion, time)}; {_way_back(name)}"


def in_short(name: str, exclusion: Excluded) -> str:
    """An exclusion at its beginning: who, why and for how long."""
    return _said(name, exclusion, "" if exclusion.seconds is None else f" for {format_duration(exclusion.seconds)}")


def _way_back(name: str) -> str:
    return f"`ftrun nodes admit {name}` lets it in"


def _said(name: str, exclusion: Excluded, time: str) -> str:
    by = " by hand" if exclusion.by is By.USER else ""
    why = f": {exclusion.reason}" if exclusion.reason else ""
    return f"{name} is excluded{by}{time}{why}"


def news(name: str, entry: Entry) -> str:
    """What people are told of an entry when it comes; empty for nothing."""
    if isinstance(entry, Excluded):
        return f"{in_short(name, entry)}; {_way_back(name)}"
    if isinstance(entry, Admitted):
        return f"{name} may take part again: {entry.reason or 'it was admitted by hand'}"
    return f"{name} stays: {entry.reason}" if isinstance(entry, Withheld) else ""


def forget(book: Book, rules: Rules, now: float) -> Book:
    """The book without nodes that haven't been seen for long, and of which there is nothing left to be said."""
    remembered = rules.window + 4 * rules.longest
    return book.without(
        name
        for name, host in book.hosts.items()
        if now - host.last_seen > remembered
        and standing(host, rules, now).state is State.FINE
        and all(age(each, now) > remembered for each in host.entries)
    )


def after_check(book: Book, name: str, trouble: str, rules: Rules, now: float) -> Book:
    """The book after a node that was left out has been checked, or has come back where no check is asked for.

    One that fails is left out once more, whatever part of the nodes that makes: it does no work as it is.

    Args:
        book: before it.
        name: the node.
        trouble: what was wrong; empty for nothing.
        rules: of the job.
        now: seconds since 1970.
    """
    host = book.hosts.get(name)
    if host is None or standing(host, rules, now).state is not State.DUE:
        return book
    if not trouble:
        return book.add(name, Admitted(now, By.CHECK, "its time is over, and it passed the check"))
    before = standing(host, rules, now).before
    reason = f"it failed the check of a node that comes back: {trouble}"
    return book.add(name, Excluded(now, By.POLICY, reason, lasts(before, rules), Sign.CHECK))


# Wrongly left out


def _taken_back(book: Book, name: str, rules: Rules, now: float) -> Admitted | None:
    """What ends an exclusion whose cause has come on another node since, too: then it isn't the node."""
    where = standing(book.hosts[name], rules, now)
    exclusion = where.exclusion
    if where.state not in _OUT or exclusion is None or exclusion.sign is None:
        return None
    if not TABLE[exclusion.sign].alone or not exclusion.fingerprint:
        return None
    for other in sorted(book.hosts.keys() - {name}):
        for each in _marks(book, other, exclusion.sign):
            if each.fingerprint == exclusion.fingerprint and age(each, now) <= age(exclusion, now):
                return Admitted(now, By.POLICY, f"the same failure came on {other} too, so it isn't the node")
    return None


def _marks(book: Book, name: str, sign: Sign) -> list[Marked]:
    """A node's marks of one sign, those included that it was forgiven."""
    return [each for each in book.hosts[name].entries if isinstance(each, Marked) and each.sign is sign]


# To be left out


def _verdicts(book: Book, rules: Rules, now: float) -> list[_Verdict]:
    """The surest first: where not all can be left out, those are."""
    found = []
    for name in book.hosts:
        where = standing(book.hosts[name], rules, now)
        if where.state not in _OUT and (verdict := _verdict(book, name, where, rules, now)) is not None:
            found.append(verdict)
    order = list(Sign)
    return sorted(found, key=lambda each: (order.index(each.mark.sign), -each.times, each.name))


def _verdict(book: Book, name: str, where: Standing, rules: Rules, now: float) -> _Verdict | None:
    for sign in Sign:
        enough = rules.after.get(sign)
        own = _counting(book, name, [each for each in where.marks if each.sign is sign], rules, now)
        if enough is None or not own:
            continue
        watched = where.state is State.PROBATION
        if len(own) >= (1 if watched else enough):
            return _Verdict(name, own[-1], len(own), _reason(own, enough, rules, watched=watched), where.before)
    return None


def _counting(book: Book, name: str, own: Sequence[Marked], rules: Rules, now: float) -> list[Marked]:
    """Those marks that speak against this node, and not against what all nodes have in common."""
    if not own or not TABLE[own[0].sign].alone:
        return list(own)
    theirs = {
        other: [each for each in _marks(book, other, own[0].sign) if age(each, now) < rules.window]
        for other in book.hosts.keys() - {name}
    }
    kept = [mark for mark in own if not any(_same(mark, each) for marks in theirs.values() for each in marks)]
    here = [other for other in theirs if not _is_out(book.hosts[other].entries, now)]
    # What most others suffer from as well is no fault of this one, even if it looks different each time.
    return [] if 2 * sum(bool(theirs[other]) for other in here) > len(here) else kept


def _same(mine: Marked, other: Marked) -> bool:
    """Whether two nodes have suffered from one cause."""
    at_once = mine.attempt == other.attempt != 0
    return at_once or (mine.fingerprint != "" and mine.fingerprint == other.fingerprint)


def _reason(own: Sequence[Marked], enough: int, rules: Rules, *, watched: bool) -> str:
    last = own[-1]
    if watched:
        return f"{last.evidence} (it was on probation)"
    if enough == 1:
        return last.evidence
    return f"{TABLE[last.sign].text}, {len(own)} times in {format_duration(rules.window)}, last: {last.evidence}"


def _carried_out(book: Book, verdict: _Verdict, crowd: Crowd, rules: Rules, now: float) -> tuple[Entry, ...]:
    refusal = _too_many(book, verdict.name, crowd, rules, now)
    if not refusal:
        seconds = lasts(verdict.before, rules)
        mark = verdict.mark
        return (Excluded(now, By.POLICY, verdict.reason, seconds, mark.sign, mark.fingerprint),)
    reason = f"{verdict.reason}; but {refusal}"
    said = any(isinstance(each, Withheld) and each.reason == reason for each in book.hosts[verdict.name].entries)
    return () if said else (Withheld(now, reason, verdict.mark.sign),)


def _too_many(book: Book, name: str, crowd: Crowd, rules: Rules, now: float) -> str:
    """Why leaving out one more would be too many; empty if it isn't."""
    out = {other for other, host in book.hosts.items() if _is_out(host.entries, now)}
    seen = {other for other, host in book.hosts.items() if now - host.last_seen < rules.window}
    num_nodes = len(seen | out | crowd.present | {name})
    allowed = allowed_out(num_nodes, rules.most)
    if len(out) + 1 > allowed:
        return f"{len(out)} of {num_nodes} nodes are excluded, and health.nodes.most allows {allowed}"
    left = len(crowd.present - out - {name})
    if left < crowd.min_nodes:
        return f"that would leave {left} nodes, and {crowd.min_nodes} are needed (--nnodes)"
    return ""


def allowed_out(num_nodes: int, most: Fraction) -> int:
    """How many of so many nodes may be left out at once: the stated part, and one of three or more in any case."""
    return max(int(num_nodes * most), 1 if num_nodes >= 3 and most else 0)


def _is_out(entries: Sequence[Entry], now: float) -> bool:
    last = next((each for each in reversed(entries) if isinstance(each, Excluded | Admitted)), None)
    return isinstance(last, Excluded) and left_of(last, now) != 0

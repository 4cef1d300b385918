"""The text of a post-mortem of several nodes. Pure.

The report of the node at fault, with what all nodes have in common before it::

    ## All nodes
    | node | host | ranks | what happened there |
    | rank | node | how it ended | failed | step | part in it | where |
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftrun.launch.evidence import report
from ftrun.launch.evidence.tail import shown
from ftrun.launch.evidence.whole import as_decided, moment, restart_of, role
from ftrun.launch.failures import across
from ftrun.launch.watching.culprit import where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftrun.launch.evidence.model import RankEvidence
    from ftrun.launch.evidence.parts import Part
    from ftrun.launch.evidence.whole import Whole

_WORTH_SAYING = 0.1
"""Clocks that are less apart than this are nobody's business."""
_MOST_RANKS = 128
_LONGEST = 120


def render(whole: Whole, places: Mapping[int, str], copies: Sequence[str]) -> str:
    """The whole report.

    Args:
        whole: what it tells.
        places: directory of each rank of the node at fault, as the report's reader finds it.
        copies: names of the files beside the report.
    """
    story = _story(whole)
    title = f"# Attempt {whole.attempt}: {whole.verdict.kind}"
    first = report.verdict(story) if story is not None else [(title, _membership(whole))]
    more = report.of_the_node(story) if story is not None else []
    text = report.put_together(
        [
            *first,
            ("## All nodes", _nodes(whole)),
            ("## All ranks", _ranks(whole)),
            *more,
            *report.files(places, copies),
        ]
    )
    restart = restart_of(whole)
    if restart is None:
        return text
    return text + report.restart_section(restart["seconds"], restart["lost_steps"], restart.get("read"))


def _story(whole: Whole) -> report.Story | None:
    part, what = whole.of_fault, whole.verdict.failure
    if part is None or what.rank < 0:
        return None
    decision = whole.decider.decision if whole.decider is not None else None
    late = across.ahead(part.evidence)
    timeline = tuple((at - late, told) for at, told in part.timeline)
    evidence = replace(across.by_first_clock(part.evidence), host=part.host)
    return report.Story(whole.attempt, as_decided(whole), decision, evidence, timeline)


def _membership(whole: Whole) -> Iterator[str]:
    yield f"{shown(whole.verdict.failure.message)}, {report.wall_clock(whole.zero)}."
    victims = whole.verdict.failure.victims
    fell = f" {report.ranks_in_words(victims)} fell with it." if victims else ""
    silent = next((each for each in whole.parts if each.lost and each.node == whole.verdict.failure.node), None)
    yield ""
    if whole.verdict.kind == across.LAUNCHER and silent is not None:
        yield f"{shown(silent.host)} ended the run, and nothing else has come from it: look into its output.{fell}"
    else:
        yield f"No rank is at fault.{fell}"
        yield from _what_to_do(whole)
    decider = whole.decider
    if decider is not None and decider.decision is not None:
        yield ""
        yield report.decided(decider.decision)


def _what_to_do(whole: Whole) -> Iterator[str]:
    words = [each.word for each in whole.parts if each.lost]
    if any(each.endswith(" is lost") for each in words):
        yield ""
        yield (
            "A node is lost when its launcher answers no more: the machine is down or cut off, or the launcher was "
            "killed. The others go on if enough are left; `ftrun status` says whether they do. Look at that machine "
            "(kernel log, batch system), and start the same command again, there or on another one."
        )
    if any(each.endswith(" left") for each in words):
        yield ""
        yield (
            "A node that left was asked to, by a signal or an exclusion; its own output says which. There is nothing "
            "to mend; the same command takes it back (after `ftrun nodes admit`, if it is excluded)."
        )


def _nodes(whole: Whole) -> Iterator[str]:
    yield "| node | host | ranks | what happened there |"
    yield "|---:|---|---|---|"
    for part in whole.parts:
        ranks = [each.rank for each in part.evidence.ranks]
        cells = [
            str(part.node),
            part.host,
            report.ranks_in_words(ranks).partition(" ")[2] if ranks else "",
            _told(part),
        ]
        yield "| " + " | ".join(map(report.cell, cells)) + " |"
    notes = [*_about_clocks(whole), *whole.verdict.order, *_about_the_decision(whole), *_about_the_missing(whole)]
    if notes:
        yield ""
        yield from (f"- {shown(each)}" for each in notes)


def _told(part: Part) -> str:
    if part.lost:
        return f"nothing came from it: {part.word}"
    if part.failure is not None:
        return f"decided: {part.failure.message.partition(chr(10))[0]}"
    return part.word


def _about_clocks(whole: Whole) -> Iterator[str]:
    first = whole.parts[0].evidence.seat.hosts[0] if whole.parts and whole.parts[0].evidence.seat else "the first node"
    for part in whole.parts:
        clock = part.evidence.seat.clock if part.evidence.seat is not None else None
        if clock is not None and abs(clock.seconds) > _WORTH_SAYING:
            side = "ahead of" if clock.seconds > 0 else "behind"
            yield (
                f"the clock of {part.host} is {abs(clock.seconds):.3f} s {side} that of {first} (known to "
                f"{clock.uncertainty:.2g} s); all times here are by the latter"
            )


def _about_the_decision(whole: Whole) -> Iterator[str]:
    decider, what = whole.decider, whole.verdict.failure
    said = decider.failure if decider is not None else None
    if decider is not None and said is not None and said.rank != what.rank:
        line = said.message.partition("\n")[0]
        yield f"{decider.host} decided by what it saw, which was: {line}"


def _about_the_missing(whole: Whole) -> Iterator[str]:
    if whole.missing:
        yield f"nothing has come from {', '.join(whole.missing)} yet"


def _ranks(whole: Whole) -> Iterator[str]:
    rows = sorted(((part, each) for part in whole.parts for each in part.evidence.ranks), key=_by_weight(whole))
    if not rows:
        return
    yield f"Times are relative to {report.wall_clock(whole.zero)}."
    yield ""
    yield "| rank | node | how it ended | failed | step | part in it | where |"
    yield "|---:|---:|---|---:|---:|---|---|"
    for part, each in rows[:_MOST_RANKS]:
        at = moment(part, each)
        when = f"{at - whole.zero:+.3f} s" if at else ""
        step = str(each.beat.step) if each.beat is not None else ""
        how = "no word of it" if part.lost else report.ended(each)
        cells = [str(each.rank), str(part.node), how, when, step, role(whole, part, each), _place(each)]
        yield "| " + " | ".join(map(report.cell, cells)) + " |"
    if len(rows) > _MOST_RANKS:
        yield ""
        yield f"{len(rows) - _MOST_RANKS} more are in `parts/`."


def _place(rank: RankEvidence) -> str:
    """Where a rank stood, or what it said last."""
    said = rank.error.message.partition("\n")[0] if rank.error is not None else ""
    return where(rank.stack) or (said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ...")


def _by_weight(whole: Whole) -> Any:
    """Where not all can be shown: the rank at fault and those that fell before those that ran."""
    many = sum(len(each.evidence.ranks) for each in whole.parts) > _MOST_RANKS

    def key(row: tuple[Part, RankEvidence]) -> tuple[bool, bool, int]:
        rank = row[1]
        return many and rank.rank != whole.verdict.failure.rank, many and not rank.fell, rank.rank

    return key

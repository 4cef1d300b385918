"""What a keeper knows, and how it changes with what is seen and what comes out of the lanes. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.decide import Known, Stage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ftrun.checkpoint.keeper.results import Waits
    from ftrun.checkpoint.keeper.work import NodeWork

_FIRST_DELAY, _LAST_DELAY = 0.05, 15.0
_LAST_POLL = 2.0


def see(
    known: Mapping[str, Known], memory: Mapping[str, NodeWork], over: Collection[str], now: float
) -> dict[str, Known]:
    """Take in what lies sealed in memory.

    Args:
        known: what was known.
        memory: what lies there.
        over: attempts that have an outcome.
        now: ``time.monotonic()``.
    """
    found = dict(known)
    for attempt, work in memory.items():
        each = known.get(attempt)
        if each is None:
            if attempt not in over and len(work.drained) < len(work.seals):
                found[attempt] = Known(work, Stage.SEALED, now)
        elif each.stage is Stage.SEALED:
            found[attempt] = replace(each, work=work, gone=None)
        else:
            found[attempt] = replace(each, work=replace(each.work, slots=work.slots, drained=work.drained))
    for attempt, each in known.items():
        if each.stage is Stage.SEALED and attempt not in memory and each.gone is None:
            found[attempt] = replace(each, gone=now)
    return found


def to_free(known: Mapping[str, Known], memory: Mapping[str, NodeWork], over: Collection[str]) -> list[NodeWork]:
    """What lies sealed in memory and is safe elsewhere, or given up, though its slots don't say so yet."""
    return [
        work
        for attempt, work in memory.items()
        if len(work.drained) < len(work.seals)
        and (known[attempt].stage is not Stage.SEALED if attempt in known else attempt in over)
    ]


def moved(known: Known, stage: Stage, work: NodeWork, now: float) -> Known:
    """It has come to another stage: patience begins anew."""
    return Known(work, stage, now, told=known.told)


def waited(known: Known, result: Waits, now: float) -> Known:
    """A step did not succeed, or has to wait; how long until the next try."""
    tries = known.tries + 1
    longest = _LAST_POLL if known.stage is Stage.DONE else _LAST_DELAY
    # The launcher may be about to tell of the start: that patience begins when it is first missed.
    anew = known.troubled is None or (result.stale and not known.stale)
    return replace(
        known,
        trouble=result.reason,
        full=result.full,
        others=result.others,
        stale=result.stale or (known.stale and known.stage is Stage.FAILED),
        troubled=now if anew else known.troubled,
        tries=tries,
        due=now + min(longest, _FIRST_DELAY * 2.0 ** min(tries - 1, 30)),
    )


def skipped(known: Known) -> Known:
    """The local tier could not take it: it goes to the root from memory."""
    return replace(known, skip_local=True, due=0.0)

"""The text of a post-mortem, in Markdown. Pure."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.goodput import tiers
from ftrun.launch.evidence.tail import shown
from ftrun.launch.failures.failure import signal_name
from ftrun.launch.failures.kinds import Kind
from ftrun.launch.watching.culprit import where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ftrun.launch.evidence.model import Evidence, RankEvidence
    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.policy import Decision

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}
_OF_MEMORY = (Kind.HOST_OUT_OF_MEMORY, Kind.KILLED)
"""Kinds of failure that want of memory may be behind."""
_MOST_FRAMES = 40
_MOST_TRACEBACK_LINES = 80


@dataclass(frozen=True)
class Story:
    """What a report tells; the decision is None where no node has taken one."""

    attempt: int
    failure: Failure
    decision: Decision | None
    evidence: Evidence
    timeline: tuple[tuple[float, str], ...] = ()

    @property
    def culprit(self) -> RankEvidence | None:
        """The rank at fault, if it is one of this node."""
        return next((each for each in self.evidence.ranks if each.rank == self.failure.rank), None)

    @property
    def zero(self) -> float:
        """The moment that others are told relative to: when the first rank ended with an error, or was noticed."""
        return min((each.exited_at for each in self.evidence.ranks if each.fell and each.exited_at), default=0.0) or (
            self.evidence.time
        )


def render(story: Story, places: Mapping[int, str], copies: Sequence[str]) -> str:
    """The whole report.

    Args:
        story: what it tells.
        places: directory of each rank, as the report's reader finds it.
        copies: names of the files beside the report.
    """
    return put_together([*verdict(story), *of_the_node(story), *files(places, copies)])


Section = tuple[str, "Iterable[str]"]
"""A title, and lines; one without lines is left out."""


def verdict(story: Story) -> list[Section]:
    """What a report begins with."""
    return [
        (f"# Attempt {story.attempt}: {story.failure.kind.value}", _summary(story)),
        ("## Why this verdict", _reasons(story)),
    ]


def of_the_node(story: Story) -> list[Section]:
    """What one node saw."""
    return [
        (f"## Rank {story.failure.rank}, at fault", _culprit(story)),
        (f"## All ranks of node {story.evidence.node}", _table(story)),
        ("## What the kernel said", _kernel(story.evidence)),
        ("## What happened when", _times(story)),
    ]


def files(places: Mapping[int, str], copies: Sequence[str]) -> list[Section]:
    """Where there is more."""
    return [("## Where to look further", _files(places, copies))]


def put_together(sections: Iterable[Section]) -> str:
    """Sections as one text."""
    return "\n".join(
        f"{title}\n\n{text}" for title, lines in sections if (text := "\n".join(lines).rstrip() + "\n") != "\n"
    )


def restart_section(seconds: Mapping[str, float], lost_steps: int, read: Mapping[str, int] | None = None) -> str:
    """Where the seconds of the restart went, to be added to a report; and which tiers the checkpoint was read from."""
    parts = [f"| {cell(name)} | {value:.3f} |" for name, value in seconds.items()]
    lines = [
        "",
        "## The restart",
        "",
        f"Training went on after {sum(seconds.values()):.3f} s. {count(lost_steps, 'step')} had to be done again.",
        "",
        "| part | seconds |",
        "|---|---:|",
        *parts,
    ]
    if read and any(read.values()):
        lines += ["", f"Of the checkpoint this node read {tiers.text(read)}."]
    return "\n".join(lines) + "\n"


def _summary(story: Story) -> Iterator[str]:
    failure, evidence, decision = story.failure, story.evidence, story.decision
    victims = f" {ranks_in_words(failure.victims)} fell with it." if failure.victims else ""
    host = f" ({evidence.host})" if evidence.host and failure.node == evidence.node else ""
    yield f"{sentence(shown(failure.message))} On node {failure.node}{host}, {wall_clock(story.zero)}.{victims}"
    if decision is not None:
        yield ""
        yield decided(decision)


def decided(decision: Decision) -> str:
    """What follows from a failure."""
    if not decision.restart:
        return f"**Not restarted** (exit code {decision.exit_code}): {decision.reason}."
    wait = f" after {decision.delay:g} s" if decision.delay else ""
    return f"**Restarted**{wait}: {decision.reason}."


def _reasons(story: Story) -> Iterator[str]:
    failure, evidence = story.failure, story.evidence
    yield from (f"- {shown(each)}" for each in failure.why)
    if evidence.hang is not None:
        yield f"- watch: {shown(evidence.hang.why)}"
    if evidence.oom_kills:
        killed = count(evidence.oom_kills, "process", "processes")
        yield f"- the kernel killed {killed} of this control group for want of memory"
    if evidence.memory and failure.kind in _OF_MEMORY:
        yield f"- memory: {evidence.memory}"
    yield f"- blame: {failure.blame}; fingerprint: `{failure.fingerprint}`"
    yield f"- {'may pass with a restart' if failure.retryable else 'would happen again after a restart'}"
    if failure.would_change:
        yield ""
        yield f"What would change it: {sentence(shown(failure.would_change))}"


def _culprit(story: Story) -> Iterator[str]:
    rank = story.culprit
    if rank is None:
        yield f"It ran on node {story.failure.node}, whose own report is beside this one."
        return
    yield f"{sentence(ended(rank))} {_progress(rank)}"
    if rank.error is not None:
        trace = rank.error.traceback.rstrip().split("\n")[-_MOST_TRACEBACK_LINES:]
        yield from _fenced("Its error:", trace if any(trace) else rank.error.message.split("\n"))
    yield from _fenced("Its main thread, innermost frame first:", rank.stack[:_MOST_FRAMES])
    yield from _fenced("Its last lines:", rank.last_lines)


def _table(story: Story) -> Iterator[str]:
    yield "Times are relative to the first failure."
    yield ""
    yield "| rank | pid | how it ended | when | step | phase | state | where |"
    yield "|---:|---:|---|---:|---:|---|---|---|"
    for each in story.evidence.ranks:
        when = f"{each.exited_at - story.zero:+.3f} s" if each.exited_at else ""
        step, phase = (str(each.beat.step), each.beat.phase.name.lower()) if each.beat else ("", "")
        state = f"{_STATES.get(each.state, each.state)}{f' in {each.waits_in}' if each.waits_in else ''}"
        cells = [str(each.rank), str(each.pid or ""), ended(each), when, step, phase, state, where(each.stack)]
        yield "| " + " | ".join(map(cell, cells)) + " |"


def _kernel(evidence: Evidence) -> Iterator[str]:
    yield from _fenced("", evidence.kernel)


def _times(story: Story) -> Iterator[str]:
    ends = [(each.exited_at, f"rank {each.rank}: {ended(each)}") for each in story.evidence.ranks if each.exited_at]
    moments = sorted([*story.timeline, *ends, (story.evidence.time, "noticed")])
    yield f"Zero is {wall_clock(story.zero)}."
    yield ""
    yield from (f"- {at - story.zero:+.3f} s  {shown(what)}" for at, what in moments if at)


def _files(places: Mapping[int, str], copies: Sequence[str]) -> Iterator[str]:
    yield from (f"- logs of rank {rank}: `{place}`" for rank, place in places.items())
    yield from (f"- `{name}`" for name in copies)


def ended(rank: RankEvidence) -> str:
    """How a rank ended, or where it was found."""
    if rank.exit_code is None:
        if rank.state in ("Z", "X"):
            return "was dead and not yet seen"
        return "was ending" if rank.error is not None else "still ran"
    if rank.exit_code < 0:
        return f"ended by {signal_name(-rank.exit_code)}"
    return f"exited with code {rank.exit_code}"


def _progress(rank: RankEvidence) -> str:
    if rank.beat is None:
        return "It left no pulse."
    total = f" of {rank.beat.total}" if rank.beat.total is not None else ""
    return f"Step {rank.beat.step}{total} was complete, the phase was {rank.beat.phase.name.lower()}."


def _fenced(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A block of foreign text; its fence is longer than any in the text."""
    if not lines:
        return
    clean = [shown(each) for each in lines]
    longest = max((len(list(run)) for each in clean for mark, run in itertools.groupby(each) if mark == "`"), default=0)
    fence = "`" * max(3, longest + 1)
    yield from ("", title, "") if title else ()
    yield from (f"{fence}text", *clean, fence)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``Ranks 0-2, 5``."""
    numbers, spans = sorted(set(ranks)), []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        spans.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"Rank{'s' * (len(numbers) > 1)} {', '.join(spans)}"


def wall_clock(at: float) -> str:
    """A moment, for people."""
    try:
        return dt.datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return "at a time unknown"


def cell(text: str) -> str:
    """A text in a table."""
    return shown(text).replace("|", "\\|")


def sentence(text: str) -> str:
    """A text as a sentence."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def count(number: int, one: str, many: str = "") -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {one if number == 1 else many or one + 's'}"

"""The last screen of a run: what was done, what went wrong, where the seconds went, and the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from ftrun.config.units import format_duration
from ftrun.goodput import ledger, plot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun import events
    from ftrun.goodput.history import Fall, History

_OUTCOMES = {
    "finished": "[green]✓ finished[/]",
    "left": "[yellow]■ left before its end; the same command continues[/]",
    "stopped": "[yellow]■ stopped; the same command continues[/]",
    "interrupted": "[yellow]■ interrupted[/]",
    "gave_up": "[red]✗ gave up[/]",
    "failed": "[red]✗ failed[/]",
}
_FEWEST_POINTS = 4
_MOST_FALLS = 30


def render(history: History, where: str) -> str:
    """The screen, in rich's markup."""
    return "\n".join(["", *_lines(history, where), ""])


def _lines(history: History, where: str) -> Iterator[str]:
    book = ledger.account(history.records)
    total = f" of {history.total:,}" if history.total else ""
    outcome = _OUTCOMES.get(history.outcome or "", history.outcome or "running")
    yield f"[bold]{escape(history.run_id)}[/]  {outcome}   [dim]{escape(where)}[/]"
    yield f"  steps      {history.step:,}{total}"
    again = f"   [dim]{history.lost_steps:,} steps done again[/]" if history.lost_steps else ""
    yield f"  restarts   {history.restarts}{again}"
    recent = history.falls[-history.launch_falls :] if history.launch_falls else []
    if len(recent) > _MOST_FALLS:
        yield f"             [dim]{len(recent) - _MOST_FALLS} earlier ones are in {escape(where)}/postmortem[/]"
    for fall in recent[-_MOST_FALLS:]:
        yield f"             [red]✗[/] {escape(_fall(fall))}"
    yield f"  commits    {len(history.commits)}{_last_commit(history)}{_lost_saves(history)}"
    if history.interval is not None:
        yield f"  interval   {_interval(history.interval)}"
    yield f"  time       {format_duration(book.wall)}   [dim]{_seconds(book)}[/]"
    if history.launch_stepped and len(history.losses) >= _FEWEST_POINTS:
        yield "  loss"
        falls = [float(fall.what.step) for fall in history.falls]
        points = [(float(step), loss) for step, loss in history.losses]
        for line in plot.curve(points, falls):
            yield f"  {line.replace('✗', '[red]✗[/]').replace('╎', '[red]╎[/]')}"


def _fall(fall: Fall) -> str:
    message = headline(fall.what.message)
    seconds = fall.seconds_to_training
    again = f"; training again after {format_duration(seconds)}" if seconds is not None else ""
    return f"step {fall.what.step:,}: {message}{again}"


def headline(message: str) -> str:
    """The first line of a message; with the second where the first only announces it."""
    first, _, rest = message.partition("\n")
    return f"{first} {rest.partition(chr(10))[0].strip()}" if first.endswith(":") and rest else first


def _last_commit(history: History) -> str:
    return f"   [dim]last at step {history.commits[-1].step:,}[/]" if history.commits else ""


def _lost_saves(history: History) -> str:
    counts = ((history.save_failures, "failed"), (history.saves_skipped, "skipped: two were still on their way"))
    found = [f"{count} save{'s' if count > 1 else ''} {how}" for count, how in counts if count]
    return f"   [yellow]{' · '.join(found)}[/]" if found else ""


def _interval(chosen: events.IntervalChosen) -> str:
    """What ``every: auto`` has chosen, and from what."""
    why = f"a save holds training for {format_duration(chosen.stall)}"
    why += f", a failure comes about every {format_duration(chosen.between_failures)}"
    bounds = {"longest": "at most", "shortest": "at least", "drain": "no shorter than a drain:"}
    bound = f"{bounds[chosen.bound]} " if chosen.bound in bounds else ""
    return f"{bound}{format_duration(chosen.seconds)}   [dim]auto: {why}[/]"


def _seconds(book: ledger.Ledger) -> str:
    shares = [f"{name} {format_duration(seconds)}" for name, seconds in book.seconds.items() if seconds >= 0.05]
    return " · ".join(shares)

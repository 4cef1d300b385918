"""What ftrun says while it runs, on stderr. One line per change, with nothing to redraw: workers write there too."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.markup import escape

from ftrun.config.units import format_duration
from ftrun.goodput import tiers
from ftrun.launch.timeline import SINCE_FAILURE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.output.outlets import Outlets
    from ftrun.launch.policy import Decision

_LAST_LINES = 12
_MOST_REASONS = 4
_MOST_NODES = 8
_WORTH_SAYING = 0.005
_SPOKEN = ("code error", "import error", "data", "exit")
"""Kinds whose cause is most often in what the rank wrote last."""
_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Start:
    """Where an attempt starts.

    Attributes:
        resume: the commit, or None.
        step: its step.
        world_size: how many ranks wrote it.
        first: the run starts at all.
        session: there was a Session in the attempt before, so that commits are to be expected.
    """

    resume: str | None
    step: int
    world_size: int | None
    first: bool
    session: bool = True


@dataclass(frozen=True)
class Fall:
    """What the console says of a fallen attempt.

    Attributes:
        attempt: its number.
        where: ``after step 12``.
        lost: steps to repeat.
        log: what the rank at fault wrote to stderr.
        shown: the console has shown that already.
        report: the post-mortem for people, where it could be written.
    """

    attempt: int
    where: str
    lost: int
    log: Path
    shown: bool
    report: Path | None = None


class Console:
    """Messages to the person at the terminal. Colour only on a terminal; paths relative where that is shorter."""

    def __init__(self, cwd: Path, outlets: Outlets) -> None:
        # Through the same way as the workers' output: in order with it, and never held up by who reads it.
        file: Any = outlets.err.as_text() if outlets.err is not None else io.StringIO()
        self._rich = RichConsole(file=file, highlight=False, soft_wrap=True)
        self._cwd = cwd

    def say(self, markup: str) -> None:
        """One line."""
        self._rich.print(f"[cyan]ftrun[/]  {markup}")

    def warn(self, text: str) -> None:
        """One line that deserves attention."""
        self.say(f"[yellow]! {escape(text)}[/]")

    def attempt_started(self, attempt: int, world_size: int, start: Start) -> None:
        """The worker group has been started."""
        before = start.world_size
        changed = f" [yellow](before: {before})[/]" if before not in (None, world_size) else ""
        workers = f"{world_size} worker" + ("s" if world_size != 1 else "") + changed
        if start.resume is not None:
            begin = f"resumes from step {start.step:,} [dim]({start.resume})[/]"
        elif start.first:
            begin = "starts fresh"
        elif start.session:
            begin = "from the start: there is no commit to resume from"
        else:
            begin = "starts the script anew; where it resumes is its own business"
        self.say(f"[green]▶[/] attempt {attempt}: {workers}, {begin}")

    def met(self, generation: int, nodes: list[str], reason: str) -> None:
        """Nodes have met for the next attempt."""
        shown = nodes if len(nodes) <= _MOST_NODES else [*nodes[:_MOST_NODES], f"{len(nodes) - _MOST_NODES} more"]
        why = f" [dim]({escape(reason)})[/]" if reason else ""
        many = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        self.say(f"[green]⇄[/] round {generation}: {many}, {escape(', '.join(shown))}{why}")

    def failed(self, what: Failure, decision: Decision, fall: Fall) -> None:
        """The worker group has fallen, and what follows from it."""
        if decision.outcome == "stopped":
            self.say(f"[yellow]■[/] attempt {fall.attempt} {decision.reason}, {fall.where}")
            return
        head, *rest = what.message.splitlines() or [""]
        self.say(f"[red]✗ attempt {fall.attempt} failed {fall.where}:[/] {escape(head)}")
        reasons = [line for line in what.why if line not in what.message]
        for line in (*rest, *reasons[:_MOST_REASONS]):
            self.say(f"  {escape(line)}")
        if not fall.shown and what.kind.value in _SPOKEN:
            self._last_lines(fall.log)
        repeat = f"{fall.lost:,} steps to repeat · " if fall.lost > 1 else "1 step to repeat · " if fall.lost else ""
        report = f" · report: {escape(self.short(fall.report))}" if fall.report is not None else ""
        self.say(f"  {repeat}log: {escape(self.short(fall.log))}{report}")
        arrow = "[green]↻[/] restarting" if decision.restart else "[red]■[/] not restarted"
        delay = f" in {format_duration(decision.delay)}" if decision.delay else ""
        self.say(f"{arrow}{delay}: {escape(decision.reason)}")

    def training_again(
        self,
        step: int | None,
        seconds: Mapping[str, float],
        lost: int,
        read: Mapping[str, int],
        *,
        since: str = SINCE_FAILURE,
    ) -> None:
        """The first step after a restart is complete.

        Args:
            step: its number, where a Session counts.
            seconds: where the time went.
            lost: steps that are done again.
            read: bytes of the checkpoint that this node has read, by the tier that they came from.
            since: from when on that time is counted, in words.
        """
        number = f"step {step:,} complete " if step is not None else ""
        parts = [f"{name} {format_duration(each)}" for name, each in seconds.items() if each >= _WORTH_SAYING]
        again = f", {lost:,} steps lost" if lost > 1 else ", 1 step lost" if lost else ""
        total = format_duration(sum(seconds.values()))
        self.say(f"[green]✓[/] training again: {number}{total} after {escape(since)}{again}")
        came = f" · read {tiers.text(read)}" if any(read.values()) else ""
        self.say(f"  [dim]{' · '.join(parts)}{came}[/]")

    def _last_lines(self, log: Path) -> None:
        try:
            with log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        except OSError:
            return
        for line in lines:
            self.say(f"  [dim]{escape(line)}[/]")

    def short(self, path: Path) -> str:
        """A path as short as it can be typed from here."""
        return str(path.relative_to(self._cwd)) if path.is_relative_to(self._cwd) else str(path)

    def print(self, text: str) -> None:
        """A block, such as the last screen."""
        self._rich.print(text)

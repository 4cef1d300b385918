"""What ftrun says while it runs, on stderr. One line per change, with nothing to redraw: workers write there too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.markup import escape

from ftrun.config.units import format_duration

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.launch.failure import Failure
    from ftrun.launch.policy import Decision

_LAST_LINES = 12


class Console:
    """Messages to the person at the terminal. Colour only on a terminal; paths relative where that is shorter."""

    def __init__(self, cwd: Path) -> None:
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self._cwd = cwd

    def say(self, markup: str) -> None:
        """One line."""
        self._rich.print(f"[cyan]ftrun[/]  {markup}")

    def warn(self, text: str) -> None:
        """One line that deserves attention."""
        self.say(f"[yellow]! {escape(text)}[/]")

    def attempt_started(self, attempt: int, world_size: int, resume: str | None, step: int) -> None:
        """The worker group has been started."""
        workers = f"{world_size} worker" + ("s" if world_size != 1 else "")
        begin = f"resumes from step {step:,} [dim]({resume})[/]" if resume else "starts fresh"
        self.say(f"[green]▶[/] attempt {attempt}: {workers}, {begin}")

    def failed(self, attempt: int, what: Failure, decision: Decision, *, step: int, lost: int, directory: Path) -> None:
        """The worker group has fallen, and what follows from it."""
        if decision.outcome == "stopped":
            self.say(f"[yellow]■[/] attempt {attempt} {decision.reason} after step {step:,}")
            return
        head, *rest = what.message.splitlines() or [""]
        where = f" after step {step:,}" if step else " before its first step"
        self.say(f"[red]✗ attempt {attempt} failed{where}:[/] {escape(head)}")
        for line in rest:
            self.say(f"  {escape(line)}")
        log = directory / "stderr.log"
        if what.kind.value in ("code error", "exit") and what.exit_code != 2:
            self._last_lines(log)
        repeat = f"{lost:,} steps to repeat" if lost != 1 else "1 step to repeat"
        self.say(f"  {repeat} · log: {escape(self.short(log))}")
        arrow = "[green]↻[/] restarting" if decision.restart else "[red]■[/] not restarted"
        delay = f" in {format_duration(decision.delay)}" if decision.delay else ""
        self.say(f"{arrow}{delay}: {escape(decision.reason)}")

    def training_again(self, step: int, seconds: float) -> None:
        """The first step after a restart is complete."""
        self.say(
            f"[green]✓[/] training again: step {step:,} complete, "
            f"{format_duration(seconds)} after the failure was noticed"
        )

    def _last_lines(self, log: Path) -> None:
        try:
            lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
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

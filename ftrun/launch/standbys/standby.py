"""Standbys: parked processes, one for each local rank, that a restart promotes instead of starting Python again.

On a small machine they are started one after the other, to take little from the training that goes on beside them.
What they import is chosen by :mod:`ftrun.launch.standbys.warming`; a promotion that isn't safe is not made, and the
worker starts cold.

Standard library only: the first ones start before the agent itself has imported torch.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, Self

from ftrun.launch.standbys import script_scan, warming
from ftrun.launch.standbys.parking import Command, Fit, Parked, Warmth

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ftrun.launch.standbys.script_scan import Scan

__all__ = ["Command", "Standbys"]

_CLOSE_SECONDS = 5.0
_RECORD_SECONDS = 2.0
_WARM_UP_SECONDS = 300.0
_ANSWER_SECONDS = 10.0
_ANSWER_WARM = 3.0
_SLICE_SECONDS = 1.0


class Standbys:
    """The parked processes of one launcher. Main thread only: the kernel kills them when the thread ends.

    Args:
        enabled: whether there are any.
        exclude: packages that must not be imported ahead of the script.
        patience: seconds in which a promotion must be answered; one that is still importing needs them for what the
            worker would import anyway.

    Attributes:
        refused: by local rank, why the last promotion was not made.
    """

    def __init__(self, *, enabled: bool = True, exclude: Iterable[str] = (), patience: float = 10.0) -> None:
        self._enabled = enabled
        self._exclude = frozenset(exclude)
        self._spoilt: frozenset[str] = frozenset()
        self._patience = patience
        self._record: Path | None = None
        self._record_due = 0.0
        self._parked: dict[int, Parked] = {}
        self._offered: dict[int, Parked] = {}
        self._wanted: dict[int, Command] = {}
        self._scans: dict[tuple[str, ...], Scan | None] = {}
        self.refused: dict[int, str] = {}

    def __enter__(self) -> Self:
        """Nothing is started before :meth:`prepare`."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave no process behind."""
        self.close()

    def configure(self, *, enabled: bool, exclude: Iterable[str] = ()) -> None:
        """Say what the job asks for, once it is known; what doesn't agree with it is ended."""
        self._enabled = enabled
        self._exclude = frozenset(exclude)
        if not enabled:
            self.discard("switched off")
        elif not all(self._exclude <= set(each.warmth.exclude) for each in self._all()):
            self.discard("other packages are excluded now")

    def learn(self, record: Path) -> None:
        """Name the ``imports.json`` of the attempt that has made its first step; it may be written a little later."""
        self._record = record
        self._record_due = time.monotonic() + _RECORD_SECONDS

    def prepare(self, local_rank: int, command: Command) -> None:
        """Have a standby for a local rank, started as for this command. :meth:`tick` does the work."""
        fit = Fit.of(command) if self._enabled else None
        if fit is None:
            return
        there = self._parked.get(local_rank)
        if there is not None and there.fit == fit and there.process.poll() is None:
            return
        if there is not None:
            self._end([self._parked.pop(local_rank)])
        self._wanted[local_rank] = command

    @property
    def warming(self) -> bool:
        """Whether some are still to be started, or to finish their imports."""
        return bool(self._wanted) or any(not each.warm for each in self._parked.values())

    def tick(self) -> None:
        """Go on: one standby at a time. Called about ten times a second; costs next to nothing."""
        for local_rank, each in list(self._parked.items()):
            each.listen()
            if each.over is not None:
                self._replace(local_rank, self._parked.pop(local_rank))
        if self._busy():
            return
        if self._wanted and (self._record is None or self._record.exists() or time.monotonic() > self._record_due):
            self.start(*next(iter(self._wanted.items())))

    def _busy(self) -> bool:
        warming = sum(not each.warm and each.age < _WARM_UP_SECONDS for each in self._parked.values())
        # They must not take the processors that the workers need; a large machine has enough for all of them at once.
        spare = (os.cpu_count() or 1) - len(self._parked) - len(self._wanted)
        return warming >= max(1, spare // 4)

    def _replace(self, local_rank: int, parked: Parked) -> None:
        """Start another one, without the package whose import has made this one useless."""
        self._end([parked])
        package = (parked.culprit or "").partition(".")[0]
        if package not in ("", "torch", "ftrun", *self._spoilt):
            self._spoilt |= {package}
            self._wanted.setdefault(local_rank, parked.command)

    def start(self, local_rank: int, command: Command) -> None:
        """Start a standby now, beside others that are warming up."""
        self._wanted.pop(local_rank, None)
        fit, split = Fit.of(command), command.split
        if fit is None or split is None or not self._enabled:
            return
        known = warming.recorded(self._record) if self._record is not None else None
        scan = self._look(split[1], command.cwd)
        modules = warming.choose(known, scan, self._exclude | self._spoilt)
        if not modules:
            return
        try:
            self._parked[local_rank] = Parked(command, fit, Warmth(modules, tuple(self._exclude), scan))
        except OSError as error:  # too many processes, no memory: the run goes on without
            self.refused[local_rank] = f"can't be started: {error.strerror}"

    def _look(self, arguments: tuple[str, ...], cwd: str) -> Scan | None:
        what = (*arguments[:2], cwd)
        if what not in self._scans or ((known := self._scans[what]) is not None and known.outdated):
            self._scans[what] = script_scan.scan(arguments, cwd)
        return self._scans[what]

    def offer(self, local_rank: int, command: Command) -> bool:
        """Ask the standby of a local rank to become this command's worker; :meth:`settle` brings the answer.

        Returns:
            False if there is none that could, for the reason in ``refused``: start cold.
        """
        self._wanted.pop(local_rank, None)
        parked = self._parked.pop(local_rank, None)
        if parked is None:
            self.refused.setdefault(local_rank, "there is none")
            return False
        self.refused.pop(local_rank, None)
        reason = self._unsuited(parked, command)
        if reason is None and command.split is not None:
            parked.promote(command, command.split[1])
            reason = parked.over
        if reason is not None:
            self.refused[local_rank] = reason
            self._end([parked])
            return False
        self._offered[local_rank] = parked
        return True

    def _unsuited(self, parked: Parked, command: Command) -> str | None:
        parked.listen()
        fit, split = Fit.of(command), command.split
        if fit is None or split is None:
            return "another kind of command"
        if parked.over is not None:
            return parked.over
        if parked.process.poll() is not None:
            return "it is gone"
        if not parked.here and parked.age > _ANSWER_SECONDS:
            return "it doesn't answer"
        reason = parked.fit.differs(fit, plain=warming.plain(parked.warmth.modules))
        scan = self._look(split[1], command.cwd)
        if reason is None and scan is not parked.warmth.scan:  # the script has changed, or is another
            allowed = frozenset(warming.choose(parked.warmth.modules, scan, self._exclude))
            late = [name for name in parked.warmth.modules if name not in allowed]
            return f"the script sets variables before it imports {late[0]}" if late else None
        return reason

    def settle(self) -> dict[int, subprocess.Popen[bytes]]:
        """Wait for the answers to all offers, for ``patience`` seconds at most.

        Returns:
            Processes that are workers now, by local rank. The other ranks start cold.
        """
        # One that has nothing left to import answers at once, or is stopped or stuck.
        patience = _ANSWER_WARM if all(each.warm for each in self._offered.values()) else self._patience
        deadline = time.monotonic() + patience
        open_ = dict(self._offered)
        while open_ and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select(list(open_.values()), [], [], min(left, _SLICE_SECONDS))
            for local_rank, parked in list(open_.items()):
                if parked in readable:
                    parked.listen()
                if parked.promoted or parked.over is not None:
                    del open_[local_rank]
        workers = {rank: each.release() for rank, each in self._offered.items() if each.promoted}
        failed = {rank: each for rank, each in self._offered.items() if not each.promoted}
        self._offered.clear()
        self.refused.update((rank, each.over or "it did not answer in time") for rank, each in failed.items())
        self._end(failed.values())
        return workers

    def take(self, commands: Mapping[int, Command]) -> dict[int, subprocess.Popen[bytes]]:
        """Promote standbys for as many of the local ranks as possible, all at once; the others start cold."""
        for local_rank, command in commands.items():
            self.offer(local_rank, command)
        return self.settle()

    def ready(self) -> int:
        """How many have imported everything."""
        return sum(each.warm for each in self._parked.values())

    def pids(self) -> set[int]:
        """Process ids of the parked ones. Each leads a session of its own."""
        return {each.process.pid for each in self._all()}

    def discard(self, reason: str) -> None:
        """End all parked processes; others may be prepared later."""
        self.refused.update(dict.fromkeys((*self._parked, *self._offered), reason))
        every = self._all()
        self._wanted.clear()
        self._parked.clear()
        self._offered.clear()
        self._end(every)

    def close(self) -> None:
        """End all parked processes; nothing is started any more."""
        self._enabled = False
        self.discard("closed")

    def _all(self) -> list[Parked]:
        return [*self._parked.values(), *self._offered.values()]

    def _end(self, every: Iterable[Parked]) -> None:
        ended = list(every)
        for each in ended:
            each.kill()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for each in ended:
            each.reap(max(0.0, deadline - time.monotonic()))

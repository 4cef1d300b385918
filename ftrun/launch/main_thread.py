"""Whether the launcher's main thread goes on: a file system that hangs can keep it in one place for ever.

The kernel counts how often a thread was given a processor and let go of it. Whoever waits as ftrun does, always with a
deadline of some seconds, moves these counters; whoever hangs in the kernel, or waits for a lock that such a one holds,
doesn't. A thread of its own looks at them. It opens nothing but ``/proc``, and imports nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol, Self

from ftrun.config.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

LIMIT = 60.0
"""Seconds in one place; what is slow and no more is behind that."""
_LEAVES_AFTER = 4
"""Times the limit until this node leaves, once others go on without it: storage that comes back by then is no harm."""
_LOOKS, _LONGEST_LOOK, _SHORTEST_LOOK = 20, 1.0, 0.05
_SAY_SECONDS, _LEAVE_SECONDS = 2.0, 15.0
_CLOSE_SECONDS = 2.0
_FRAMES = 8
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Company(Protocol):
    """The other nodes, for one whose main thread stands still. Called on the watchdog's thread."""

    def stands_still(self, where: str) -> None:
        """Tell them where it stands; an empty text where it goes on."""
        ...

    def left_behind(self) -> str:
        """Why nobody waits for this node any more, in words; empty while they do."""
        ...

    def end_workers(self) -> None:
        """Kill this node's workers, and wait for nothing."""
        ...

    def code(self) -> int:
        """What the launcher leaves with."""
        ...

    def leave(self, where: str) -> None:
        """Take this node out of the run; may hang, too."""
        ...


class Watchdog:
    """Watches this process's main thread for the length of a ``with`` block. Linux; elsewhere it does nothing.

    Args:
        say: tells people in a line.
        limit: seconds in one place after which it stands still; 0 for never.
        reported: an exit code as the job wants it.

    Attributes:
        company: the other nodes; alone, a node whose main thread stands still can only say so, and wait.
        limit: as above.
        code: what the launcher is about to leave with, once that is known: all that is left may be cut short.
    """

    def __init__(
        self, say: Callable[[str], None], limit: float = LIMIT, reported: Callable[[int], int] = lambda code: code
    ) -> None:
        self._say = say
        self._reported = reported
        self._task = f"/proc/self/task/{threading.main_thread().native_id}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-watchdog", daemon=True)
        self._still = 0.0
        self._where = ""
        self._leaves_at = 0.0
        self.company: Company | None = None
        self.limit = limit
        self.code: int | None = None

    def __enter__(self) -> Self:
        """Begin."""
        if _signs(self._task):
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    # The thread

    def _run(self) -> None:
        last, before = time.monotonic(), ""
        while not self._stop.wait(pause := self._pause()):
            now = time.monotonic()
            # While the whole process was stopped nobody stood still.
            passed, last = min(now - last, 2 * pause), now
            signs = _signs(self._task)
            if signs != before or not signs:  # without descriptors left nothing is seen
                before = signs
                self._goes_on()
                continue
            self._still += passed
            if 0 < self.limit <= self._still:
                self._stands_still()

    def _pause(self) -> float:
        return min(_LONGEST_LOOK, max(_SHORTEST_LOOK, (self.limit or LIMIT) / _LOOKS))

    def _goes_on(self) -> None:
        if self._where:
            if self.company is not None:  # first: a terminal that isn't read takes seconds, and others may be back, too
                self.company.stands_still("")
            self._tell(f"the launcher goes on, after it stood still for {format_duration(self._still)}")
        self._still, self._where, self._leaves_at = 0.0, "", 0.0

    def _stands_still(self) -> None:
        company, time_to_leave = self.company, _LEAVES_AFTER * self.limit
        if not self._where:
            self._where = place()
            if company is not None:
                company.stands_still(self._where)
            self._tell(
                f"the launcher has stood still for {format_duration(self._still)} in {self._where}: a file system that "
                "hangs does that. It goes on when that answers; workers are not concerned as long as they don't need it"
            )
        if self.code is not None:
            self._leaves_at = self._leaves_at or self.limit + time_to_leave
        elif company is not None and not self._leaves_at and (why := company.left_behind()):
            # From now on: until now the others may have stood still as well, and their storage has just come back.
            self._leaves_at = self._still + time_to_leave
            company.end_workers()
            self._tell(
                f"{why}: the workers here are ended. The launcher leaves in "
                f"{format_duration(time_to_leave)} unless it goes on before that"
            )
        if 0 < self._leaves_at <= self._still:
            self._leave(company)

    def _leave(self, company: Company | None) -> None:
        code = 1 if self.code is None else self.code
        if company is not None and self.code is None:
            code = company.code()
            # To say goodbye takes seconds, unless the other threads are stuck, too.
            _within(lambda: company.leave(self._where), _LEAVE_SECONDS)
        code = self._reported(code)
        self._tell(f"the launcher still stands still in {self._where}: it leaves with exit code {code}")
        os._exit(code)

    def _tell(self, text: str) -> None:
        # The terminal may be a file on the file system that hangs.
        _within(lambda: self._say(text), _SAY_SECONDS)


def _within(act: Callable[[], object], seconds: float) -> None:
    thread = threading.Thread(target=act, name="ftrun-watchdog-word", daemon=True)
    thread.start()
    thread.join(seconds)


def _signs(task: str) -> str:
    """What changes whenever a thread has run; empty where the kernel doesn't say."""
    try:
        with open(f"{task}/status", "rb") as file:
            switches = [line.decode() for line in file.read().splitlines() if b"ctxt_switches" in line]
        with open(f"{task}/stat", "rb") as file:
            # The program's name is in parentheses and may hold anything; user and system time follow.
            times = file.read().rpartition(b")")[2].split()[11:13]
    except OSError:
        return ""
    # By the times alone, which some sandboxes count in coarse ticks, whoever only waits would stand still.
    return f"{switches} {times}" if switches else ""


def place() -> str:
    """Where the main thread is, in words: the call, who made it, and on what."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return "a place that is not known"
    frames = _outwards(innermost)
    caller = next((each for each in frames if each.f_code.co_filename.startswith(_HOME)), innermost)
    file = caller.f_code.co_filename.removeprefix(os.path.dirname(_HOME) + os.sep)
    via = "" if caller is innermost else f"{innermost.f_code.co_name}, called by "
    on = next(filter(None, map(_path, frames)), "")
    words = f"{via}{caller.f_code.co_name} ({file}:{caller.f_lineno}){on and f' on {on}'}"
    return words.encode(errors="backslashreplace").decode()  # a file's name may be any bytes, and goes to other nodes


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _path(frame: FrameType) -> str:
    """The file that a call is about: the first path among its variables, or among what its object holds."""
    values = list(frame.f_locals.values())
    held = getattr(frame.f_locals.get("self"), "__dict__", {})
    return next((str(each) for each in (*values, *held.values()) if isinstance(each, PurePath)), "")

"""Work that two threads share: a helper takes it from one end, and whoever needs it done takes it from the other."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)

_NICE = 5
"""Where every core is busy the helper gets a quarter of one: less, and the training would do all of its work itself."""


class Work:
    """A number of short tasks. Any thread may help; each task is done once.

    Attributes:
        error: what the first task that failed raised; those behind it are not done then.
    """

    def __init__(self, tasks: Iterable[Callable[[], object]]) -> None:
        self.error: BaseException | None = None
        self._tasks = deque(tasks)
        self._busy = 0
        self._kept_by: int | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Tasks that nobody has taken yet."""
        return len(self._tasks)

    def help(self, *, from_end: bool = False) -> None:
        """Do tasks until none is left to take. An error is kept, and an interrupt passed on as well."""
        while (task := self._take(from_end=from_end)) is not None:
            error: BaseException | None = None
            try:
                task()
            except BaseException as problem:  # nobody may wait for ever for a task that is never put down
                error = problem
                if not isinstance(problem, Exception):
                    raise
            finally:
                self._put_down(error)

    def _take(self, *, from_end: bool) -> Callable[[], object] | None:
        with self._changed:
            if not self._tasks or self._kept_by not in (None, threading.get_ident()):
                return None
            self._busy += 1
            return self._tasks.pop() if from_end else self._tasks.popleft()

    def _put_down(self, error: BaseException | None) -> None:
        with self._changed:
            self._busy -= 1
            if error is not None:
                self._give_up(error)
            if self._is_over():  # and not after each task: whoever wakes up for nothing takes the time of this thread
                self._changed.notify_all()

    def keep(self) -> None:
        """Leave what nobody has taken yet to the calling thread: others only finish what they are at."""
        with self._changed:
            self._kept_by = threading.get_ident()

    def fail(self, error: BaseException) -> None:
        """What nobody has taken yet is never done; whoever asks is told of an error."""
        with self._changed:
            self._give_up(error)
            self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        self.error = self.error or error
        self._tasks.clear()

    def wait(self, timeout: float) -> None:
        """Wait until nobody works at it and nothing is left. What is not done by then is never done: an error."""
        with self._changed:
            if not self._changed.wait_for(self._is_over, timeout):
                self._give_up(CheckpointError(f"copying the state was not done after {timeout:g} s"))

    def _is_over(self) -> bool:
        return not self._tasks and not self._busy


class Helper:
    """A thread of low priority that does one job after the other. It starts with the first of them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = 0
        self._idle = threading.Condition()

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done after those before it."""
        if self._thread is None:
            # A daemon: a script that ends without letting go of it must not hang.
            thread = threading.Thread(target=self._run, name="ftrun-staging", daemon=True)
            thread.start()  # where no thread can be had, the next job tries again
            self._thread = thread
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def wait(self, timeout: float) -> bool:
        """Wait until all jobs are done; whether they are."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, timeout)

    def close(self, timeout: float) -> None:
        """Let the thread end after the jobs that it has."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _run(self) -> None:
        _give_way()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # of whatever kind: the next job is another save's, and waits for this thread
                _log.exception("ftrun: a job of the thread that stages checkpoints failed")
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def _give_way() -> None:
    """Lower the priority of the calling thread. On Linux it is the thread's own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    # A batch thread that is woken lets the running one finish its turn, or `save()` would stand still at its first job.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


def is_crowded(ranks: int) -> bool:
    """Whether so many ranks keep all processors busy that this process may use.

    A rank that was bound to a few of them (``--numa-binding``) has those for itself, if they are more than one; how
    many there are for all ranks is then what its launcher may use.
    """
    mine = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        return len(mine) == 1 or len(mine | os.sched_getaffinity(os.getppid())) <= ranks
    return len(mine) <= ranks


def remaining(deadline: float) -> float:
    """Seconds until a moment of the monotonic clock, none of them negative."""
    return max(0.0, deadline - time.monotonic())

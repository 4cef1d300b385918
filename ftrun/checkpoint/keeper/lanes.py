"""Threads that do a keeper's slow things, one at a time in each lane."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.checkpoint.keeper.decide import Lane


@dataclass
class Job:
    """Something under way in a lane.

    Attributes:
        lane: where.
        attempt: for which attempt.
        began: ``time.monotonic()``.
        result: what came out, once it is over.
        error: what it raised.
        over: it has ended.
    """

    lane: Lane
    attempt: str
    began: float
    result: Any = None
    error: Exception | None = None
    over: bool = False


class Lanes:
    """Runs jobs on threads. One thread uses it.

    Args:
        wake: called on a job's thread when it is over.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: dict[Lane, Job] = {}

    def start(self, lane: Lane, attempt: str, call: Callable[[], Any]) -> None:
        """Begin something in an idle lane."""
        job = self._jobs[lane] = Job(lane, attempt, time.monotonic())
        # A daemon: what hangs in a driver or in the kernel must not keep the process from ending.
        threading.Thread(target=self._run, args=(job, call), name=f"ftrun-{lane}", daemon=True).start()

    def jobs(self) -> list[Job]:
        """What is under way."""
        return list(self._jobs.values())

    def finished(self) -> list[Job]:
        """What has ended since the last call; its lanes are idle again."""
        done = [job for job in self._jobs.values() if job.over]
        for job in done:
            del self._jobs[job.lane]
        return done

    def _run(self, job: Job, call: Callable[[], Any]) -> None:
        try:
            job.result = call()
        except Exception as error:  # storage drivers raise anything; whoever takes the job decides what it means
            job.error = error
        job.over = True
        self._wake()

"""How many threads read a checkpoint side by side, and that they do."""

from __future__ import annotations

import os
from concurrent import futures
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_THREADS = 4


def num_threads(ranks: int) -> int:
    """How many threads of each of some processes read side by side."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


def in_threads(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Do all jobs; at the first that fails, start no more, and raise its error when the others have ended."""
    if len(jobs) <= 1 or threads == 1:
        for job in jobs:
            job()
        return
    with futures.ThreadPoolExecutor(threads, thread_name_prefix="ftrun-load") as pool:
        pending = [pool.submit(job) for job in jobs]
        done, _ = futures.wait(pending, return_when=futures.FIRST_EXCEPTION)
        failed = [each for each in done if each.exception() is not None]
        if failed:
            pool.shutdown(cancel_futures=True)
            failed[0].result()

"""The threads that ask remotes: used again, left behind where they hang, bounded, and gone when nobody needs them."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref

import pytest
from conftest import eventually

from ftrun.data.cache import patient
from ftrun.data.cache.threads import Threads


def nothing() -> None: ...


def alive() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "ftrun-remote"}


def test_a_thread_makes_one_call_after_the_other() -> None:
    threads = Threads()
    made: set[threading.Thread] = set()

    def again() -> bool:
        made_it = patient.ask(threads, threading.current_thread, 60)
        is_known = made_it in made
        made.add(made_it)
        return is_known

    # Not always the first one: it may not be idle yet when it has answered, and ends when it is for too long.
    eventually(again, 60)
    assert threading.current_thread() not in made


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> None:
        raise LookupError("not here")

    threads = Threads()
    for _ in range(2):
        with pytest.raises(LookupError, match="not here"):
            patient.ask(threads, fail, 60)
    assert patient.ask(threads, lambda: 7, 60) == 7


def test_calls_that_hang_are_left_behind_and_are_bounded() -> None:
    threads, free = Threads(most=2), threading.Event()
    beats: list[int] = []
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s$"):
            patient.ask(threads, lambda: free.wait(300), 0.05)

    def beaten() -> list[int]:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="from 2 requests before it"):
            patient.ask(threads, nothing, 0.2, lambda: beats.append(1))
        assert 0.2 <= time.monotonic() - began < 60
        return beats

    eventually(beaten, 60)  # not at the first time where the machine stands still until it is over
    waiter: list[int] = []
    waiting = threading.Thread(target=lambda: waiter.append(patient.ask(threads, lambda: 7, 60)))
    waiting.start()
    free.set()  # the remote answers, and whoever waits for a thread has one
    waiting.join(60)
    assert waiter == [7]


def test_idle_threads_end_and_hold_nothing_meanwhile() -> None:
    class Thing:
        """What a call holds."""

    before = alive()
    threads = Threads(idle=0.2)
    thing = Thing()
    gone = weakref.ref(thing)
    patient.ask(threads, functools.partial(id, thing), 60)
    del thing
    eventually(lambda: gone() is None, 60)
    eventually(lambda: alive() <= before, 60)  # those of other tests end meanwhile
    assert patient.ask(threads, lambda: 7, 60) == 7


def test_a_stream_hands_its_thread_back() -> None:
    threads = Threads(most=1)
    for _ in range(3):
        assert list(patient.stream(threads, lambda: iter(range(5)), 60, nothing)) == list(range(5))
    left = patient.stream(threads, lambda: iter(range(10**9)), 60, nothing)
    assert next(iter(left)) == 0
    left.close()  # type: ignore[attr-defined]
    assert patient.ask(threads, os.getpid, 60) == os.getpid()

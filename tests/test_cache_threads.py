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
    first = patient.ask(threads, threading.get_ident, 5)
    assert first != threading.get_ident()
    eventually(lambda: patient.ask(threads, threading.get_ident, 5) == first, 10)


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> None:
        raise LookupError("not here")

    threads = Threads()
    for _ in range(2):
        with pytest.raises(LookupError, match="not here"):
            patient.ask(threads, fail, 5)
    assert patient.ask(threads, lambda: 7, 5) == 7


def test_calls_that_hang_are_left_behind_and_are_bounded() -> None:
    threads, free = Threads(most=2), threading.Event()
    beats: list[int] = []
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s$"):
            patient.ask(threads, lambda: free.wait(30), 0.05)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="from 2 requests before it"):
        patient.ask(threads, nothing, 0.2, lambda: beats.append(1))
    assert 0.2 <= time.monotonic() - began < 10
    assert beats
    waiter: list[int] = []
    waiting = threading.Thread(target=lambda: waiter.append(patient.ask(threads, lambda: 7, 20)))
    waiting.start()
    free.set()  # the remote answers, and whoever waits for a thread has one
    waiting.join(20)
    assert waiter == [7]


def test_idle_threads_end_and_hold_nothing_meanwhile() -> None:
    class Thing:
        """What a call holds."""

    before = alive()
    threads = Threads(idle=0.2)
    thing = Thing()
    gone = weakref.ref(thing)
    patient.ask(threads, functools.partial(id, thing), 5)
    del thing
    eventually(lambda: gone() is None, 10)
    eventually(lambda: alive() <= before, 10)  # those of other tests end meanwhile
    assert patient.ask(threads, lambda: 7, 5) == 7


def test_a_stream_hands_its_thread_back() -> None:
    threads = Threads(most=1)
    for _ in range(3):
        assert list(patient.stream(threads, lambda: iter(range(5)), 5, nothing)) == list(range(5))
    left = patient.stream(threads, lambda: iter(range(10**9)), 5, nothing)
    assert next(iter(left)) == 0
    left.close()  # type: ignore[attr-defined]
    assert patient.ask(threads, os.getpid, 20) == os.getpid()

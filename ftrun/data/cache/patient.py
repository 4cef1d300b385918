"""Waiting for a remote with a deadline: it may be slow, fail now and then, or never answer."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ftrun import credentials
from ftrun.data.cache.refusals import OUT_OF_DESCRIPTORS, DiskTrouble, Outdated, RemoteError, RemoteFileMissing
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftrun.data.cache.records import Patience
    from ftrun.data.cache.threads import Threads

T = TypeVar("T")
_BEAT = 1.0
_BUSY = 0.02
_CHANCE = random.SystemRandom()
"""Not the process's generator: that is the user's, and a sample is what it is however often its file is asked for."""


def ask(threads: Threads, call: Callable[[], T], timeout: float, beat: Callable[[], None] = lambda: None) -> T:
    """Call something that may hang, in another thread, which is left behind then.

    Args:
        threads: of which one makes the call.
        call: what may hang.
        timeout: seconds to wait for it.
        beat: called about once a second while waiting.

    Raises:
        TimeoutError: it didn't answer.
        BaseException: whatever it raises.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # handed to the thread that asked
            answers.put((None, error))

    _hand_over(threads, answer, timeout, beat)
    value, error = _next(answers, timeout, beat)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return value  # type: ignore[return-value] # None only where that is the answer


def stream(
    threads: Threads, source: Callable[[], Iterable[T]], timeout: float, beat: Callable[[], None]
) -> Iterator[T]:
    """Yield what a source yields, read in another thread, which is left behind when it hangs.

    Args:
        threads: of which one reads.
        source: called in that thread.
        timeout: seconds to wait for one item.
        beat: called about once a second while waiting.

    Raises:
        TimeoutError: nothing came for so long.
        BaseException: whatever the source raises.
    """
    items: queue.SimpleQueue[tuple[str, T | BaseException | None]] = queue.SimpleQueue()
    room = threading.Semaphore(2)
    left = threading.Event()

    def read() -> None:
        try:
            for item in source():
                while not room.acquire(timeout=_BEAT):
                    if left.is_set():
                        return
                if left.is_set():
                    return
                items.put(("item", item))
            items.put(("end", None))
        except BaseException as error:  # handed to the thread that asked
            items.put(("error", error))

    _hand_over(threads, read, timeout, beat)
    try:
        while True:
            kind, value = _next(items, timeout, beat)
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            yield value  # type: ignore[misc] # an item
            room.release()
    finally:
        left.set()


def _hand_over(threads: Threads, call: Callable[[], None], timeout: float, beat: Callable[[], None]) -> None:
    until = time.monotonic() + timeout
    while not threads.call(call):
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came for {timeout:g} s from {threads.most} requests before it")
        beat()
        time.sleep(_BUSY)


def _next(items: queue.SimpleQueue[T], timeout: float, beat: Callable[[], None]) -> T:
    until = time.monotonic() + timeout
    while True:
        left = until - time.monotonic()
        try:
            return items.get(timeout=max(0.0, min(_BEAT, left)))
        except queue.Empty:
            if left <= 0:
                raise TimeoutError(f"nothing came for {timeout:g} s") from None
            beat()


def persist(
    url: str,
    action: Callable[[], T],
    patience: Patience,
    beat: Callable[[], None] = lambda: None,
    failed: Callable[[], None] = lambda: None,
) -> T:
    """Do something with a remote file until it works, with growing pauses.

    Args:
        url: named in errors.
        action: tried up to ``patience.attempts`` times.
        patience: how often, and how long between.
        beat: called about once a second in pauses.
        failed: called for each failure after which it is tried again.

    Raises:
        RemoteFileMissing: there is no such file.
        RemoteError: it may not be read, or still didn't work.
        DiskTrouble: not the remote's fault.
        Outdated: the action has found another version of the file than it was told to expect.
    """
    began = time.monotonic()
    for attempt in range(1, patience.attempts + 1):
        try:
            return action()
        except (DiskTrouble, Outdated, UsageError, RemoteError):
            raise
        except FileNotFoundError as error:
            raise RemoteFileMissing(
                f"{url}: there is no such file ({_text(error)}). Take it out of the list, or bring it back; what "
                "lies in the cache is not used for a file that was removed"
            ) from error
        except (PermissionError, IsADirectoryError, NotADirectoryError, ImportError) as error:
            raise RemoteError(f"{url} can't be read ({_text(error)}). Check the path and your rights to it") from error
        except Exception as error:  # drivers raise what they like
            if attempt == patience.attempts:
                seconds = time.monotonic() - began
                raise RemoteError(
                    f"{url} could not be read: {attempt} attempts in {seconds:.1f} s, the last one failed with "
                    f"{_text(error)}. {_advice(error)}"
                ) from error
            failed()
            _pause(min(patience.longest, patience.first * 2 ** (attempt - 1)), beat)
    raise AssertionError("Patience.attempts is less than one")


def _pause(seconds: float, beat: Callable[[], None]) -> None:
    until = time.monotonic() + seconds * _CHANCE.uniform(0.5, 1.0)
    while (left := until - time.monotonic()) > 0:
        beat()
        time.sleep(min(left, _BEAT))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        return "This process has too many files open: release leases earlier, or raise the limit with `ulimit -n`"
    if credentials.missing(error):
        return (
            "Give the remote's credentials, where its own tools look for them (in containers: on every node), or with "
            "CachedFiles(storage_options={...})"
        )
    if isinstance(error, TimeoutError):
        return (
            "The remote hangs: check that it answers, or give it longer with "
            "CachedFiles(patience=Patience(timeout=...)), of ftrun.data.cache.records"
        )
    if isinstance(error, TypeError):
        return "Its driver doesn't take what it is given: check storage_options"
    return "Check that the remote answers, for example with `ls` or its own command"

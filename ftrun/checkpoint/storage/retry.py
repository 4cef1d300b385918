"""Patience with a storage that is slow, flaky, hung or away for a while.

A call runs on a thread of its own, so that one that hangs in a driver can be left behind. Errors that time may heal
are met with another try, after a pause that grows; all others are passed on at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ftrun.checkpoint.storage.base import UnreachableError, why
from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")

_log = logging.getLogger(__name__)

_SILENT = 5.0
"""Seconds of trouble that nobody hears of."""

_SLICE = 1.0
"""Seconds of waiting at a time: a launcher that does nothing for long is taken for one that stands still itself."""

_CHANCE = random.SystemRandom()
"""Not the process's generator: this runs beside training, whose draws must be the same however often it tries."""

_FINAL_KINDS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FtrunError,
    NotImplementedError,
    MemoryError,
    EOFError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)
_FINAL_NUMBERS = {
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.ENOTEMPTY,
    errno.ENOTSUP,
    errno.EROFS,
}


@dataclass(frozen=True)
class Patience:
    """How long to try.

    Attributes:
        deadline: seconds for all tries of one operation together.
        hang: seconds without a sign of life after which a try is left behind.
        first: seconds, at most, before the second try; it doubles from try to try.
        last: seconds, at most, between tries.
    """

    deadline: float = 120.0
    hang: float = 60.0
    first: float = 0.2
    last: float = 15.0

    def pause(self, tries: int, chance: float) -> float:
        """Seconds to wait after so many tries. ``chance`` in [0, 1) keeps many callers from coming back at once."""
        longest = min(self.last, self.first * 2.0 ** min(tries - 1, 60))
        return longest * (0.5 + chance / 2)


class HungError(TimeoutError):
    """A call gave no sign of life for too long and was left behind."""


class Life:
    """Signs of life of one try, and its end when it is left behind."""

    def __init__(self) -> None:
        self._latest = time.monotonic()
        self._over = False

    def beat(self) -> None:
        """Say that the try goes on. Called by the try.

        Raises:
            HungError: it was left behind and must not touch anything any more.
        """
        if self._over:
            raise HungError("this try was left behind")
        self._latest = time.monotonic()

    def end(self) -> None:
        """Leave the try behind."""
        self._over = True

    @property
    def silence(self) -> float:
        """Seconds since the latest sign."""
        return time.monotonic() - self._latest


def is_transient(error: Exception) -> bool:
    """Whether another try may help. Drivers have a hundred names for a bad network: what is not known helps."""
    if isinstance(error, _FINAL_KINDS) and not isinstance(error, asyncio.TimeoutError):
        return False
    return not (isinstance(error, OSError) and error.errno in _FINAL_NUMBERS)


def persist(call: Callable[[Life], T], patience: Patience, what: str) -> T:
    """Do something until it succeeds.

    Args:
        call: one try; it may be left behind, and is then called again while it still runs.
        patience: how long to try.
        what: the operation and the place, for the message.

    Raises:
        UnreachableError: no try succeeded in time; the message has the latest reason.
        Exception: an error that time doesn't heal, as it was raised.
    """
    began = time.monotonic()
    tries, said = 0, False
    while True:
        tries += 1
        try:
            return _bounded(call, patience.hang)
        except Exception as error:  # whatever a driver raises: is_transient knows
            if not is_transient(error):
                raise
            pause = patience.pause(tries, _CHANCE.random())
            spent = time.monotonic() - began
            if spent + pause > patience.deadline:
                raise UnreachableError(
                    f"{what} failed for {spent:.0f} s, {tries} tries, the last time: {why(error)}. "
                    "Check the storage and the network to it"
                ) from error
            if spent >= _SILENT and not said:
                said = True
                _log.warning("ftrun: %s fails (%s); tried again for at most %g s", what, why(error), patience.deadline)
        time.sleep(pause)


def _bounded(call: Callable[[Life], T], hang: float) -> T:
    """Run one try on a thread of its own, and leave it behind when it is silent for too long."""
    life, finished = Life(), threading.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call(life))
        except Exception as error:  # it belongs to the thread that waits
            errors.append(error)
        finally:
            finished.set()

    # A daemon: a driver that never returns must not keep the process from ending.
    threading.Thread(target=run, name="ftrun-storage", daemon=True).start()
    while not finished.wait(min(_SLICE, max(0.001, hang - life.silence))):
        if life.silence >= hang:
            life.end()
            raise HungError(f"no answer for {hang:g} s")
    if errors:
        raise errors[0]
    return results[0]

"""A keeper from outside: the launcher starts it, looks after it, and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun import background
from ftrun.checkpoint import epochs
from ftrun.checkpoint.keeper.beat import Beat
from ftrun.checkpoint.keeper.codes import Code
from ftrun.checkpoint.keeper.local import LocalTier
from ftrun.checkpoint.keeper.pending import Pending
from ftrun.checkpoint.keeper.takeover import claim, release
from ftrun.checkpoint.memory.files import make_way, read
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.keeper.config import KeeperConfig
    from ftrun.checkpoint.memory.tier import Tier

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LAST_PAUSE = 0.1, 30.0
_HEALTHY = 60.0  # seconds of life after which a death counts as the first one
_LOOK = 1.0  # seconds between looks at its sign of life
_ORDERLY = (Code.DONE, Code.LOST)


class Keeper:
    """The keeper of a node, as its launcher holds it. One thread uses it.

    Args:
        tier: the node's memory tier; made when the keeper starts.
        config: what it is told.
        stalled_after: seconds without a sign of life, while there is work, after which it is replaced.
        listening: descriptor of the socket at which other nodes' keepers reach it; None where they don't.
    """

    def __init__(
        self, tier: Tier, config: KeeperConfig, *, stalled_after: float = 30.0, listening: int | None = None
    ) -> None:
        self._listening = listening
        self._tier = tier
        self._config = replace(config, token=secrets.token_hex(8))
        self._stalled_after = stalled_after
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._looked = 0.0
        self._deaths = 0
        self._not_before = 0.0
        self._asked: float | None = None

    @property
    def pid(self) -> int | None:
        """Its process; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def ensure(self) -> None:
        """Have a keeper that runs. Cheap where there is one: call it as often as you like.

        One that died is replaced, after a pause that grows from death to death. Nothing that it had taken on is lost.
        """
        now = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            if now - self._looked >= _LOOK:
                self._looked = now
                self._replace_if_stalled(now)
            return
        if self._process is not None:
            self._bury(self._process.returncode, now)
        if now >= self._not_before:
            self._start(now)

    def claim(self) -> None:
        """Take the tier over from an earlier launcher's keeper, which leaves what lies there to this one.

        Raises:
            CheckpointError: somebody holds the directory above for too long.
            OSError: the tier can't be written.
        """
        claim(self._tier, self._config)

    def begin_epoch(self, record: EpochRecord, node: int | None = None) -> None:
        """Say that the worker group starts with this epoch: what earlier ones left incomplete is dropped.

        Args:
            record: the start.
            node: number of this node in it; what the keeper's settings say where it is None.

        Raises:
            OSError: the tier can't be written.
        """
        claim(self._tier, self._config)
        epochs.tell(self._tier.path, record, node)
        self.wake()

    def wake(self) -> None:
        """Have it look at once."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"", os.fspath(self._tier.socket))

    def finish(self, timeout: float) -> bool:
        """Have it drain and commit what is sealed, then end it and remove the tier. Workers must have ended.

        Args:
            timeout: seconds; then it is killed.

        Returns:
            Whether everything that was sealed is committed. If not the tier stays: the next start takes it up.
        """
        done = self._finish(time.monotonic() + timeout)
        self._process = None
        if not done:
            return False
        try:
            release(self._tier, self._config)
        except (OSError, CheckpointError) as error:
            _log.warning("ftrun: the memory tier %s was not removed: %s", self._tier.path, error)
        return done

    def retire(self, patience: float) -> bool:
        """End the process, for which nothing is left to do, without waiting for it; what lies in the tier stays.

        Args:
            patience: seconds from the first call on, after which it is killed.

        Returns:
            Whether it has ended; until then call this again.
        """
        process, now = self._process, time.monotonic()
        if process is None or process.poll() is not None:
            self._process = self._asked = None
            return True
        if self._asked is None:
            self._asked = now
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        elif now - self._asked > patience:
            process.kill()
        return False

    def _finish(self, deadline: float) -> bool:
        while True:
            if self.pid is None:
                if not self.has_work():
                    return True
                self._start(time.monotonic())
            process = self._process
            if process is None:
                return False
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that is stopped would take it when the time is over
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill(process)
                return False
            if code in _ORDERLY:
                return code == Code.DONE
            _log.warning("ftrun: the checkpoint keeper %s; another one finishes", _how(code))
            time.sleep(min(_FIRST_PAUSE, max(0.0, deadline - time.monotonic())))

    def _start(self, now: float) -> None:
        try:
            claim(self._tier, self._config)
            log = self._tier.path / "keeper.log"
            make_way(log, link=True)
            inherits = [] if self._listening is None else [self._listening]
            arguments = [str(self._tier.path), *map(str, inherits)]
            self._process = background.start("ftrun.checkpoint.keeper", arguments, log, os.environ, inherits)
        except (OSError, CheckpointError) as error:
            self._process = None
            self._put_off(now)
            _log.warning("ftrun: the checkpoint keeper can't be started: %s; the next try follows", error)
            return
        self._started = self._looked = now

    def _bury(self, code: int, now: float) -> None:
        """Note that it ended although nobody asked it to."""
        self._process = None
        if now - self._started > _HEALTHY:
            self._deaths = 0
        self._put_off(now)
        _log.warning("ftrun: the checkpoint keeper %s; another one goes on%s", _how(code), self._last_words())

    def _put_off(self, now: float) -> None:
        self._deaths += 1
        pause = 0.0 if self._deaths == 1 else min(_LAST_PAUSE, _FIRST_PAUSE * 2.0 ** (self._deaths - 2))
        self._not_before = now + pause

    def _replace_if_stalled(self, now: float) -> None:
        beat = Beat(self._tier).read()
        latest = self._started if beat is None else max(self._started, beat[1])
        if self._process is None or now - latest < self._stalled_after or not self.has_work():
            return
        _log.warning("ftrun: the checkpoint keeper gave no sign of life for %.0f s: it is replaced", now - latest)
        self._kill(self._process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and goes when that lets it
            process.wait(5.0)

    def has_work(self) -> bool:
        """Whether something waits for a keeper."""
        sealed = self._tier.sealed()
        undrained = any(not slot.is_marked(slot.drained, seal.attempt) for slot, seal in sealed)
        return undrained or bool(Pending(self._tier).works()) or self._has_local_work()

    def _has_local_work(self) -> bool:
        config = self._config
        if not config.local:
            return False
        try:
            works = LocalTier(config.local, config.node, config.run_id).works()
        except OSError:
            return False
        return any(work.files and not work.committed for work in works)

    def _last_words(self) -> str:
        try:
            lines = read(self._tier.path / "keeper.log")[-2000:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line for line in lines if line.strip()]
        return f" (it said last: {said[-1][:300]})" if said else ""


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
